// Scores of the site's search: Sphinx's own, but names come first, then guides, before all the two
// about errors, because what is pasted here is often an error. Titles on pages for developers count
// little, because a title matches if it contains the word (Steps: eps, Glossary: loss).

// The places of words that other pages use more often.
const PLACES = {
  eps: "api/index#gluon_syncbn.SyncBatchNorm",
  epsilon: "api/index#gluon_syncbn.SyncBatchNorm",
  momentum: "api/index#gluon_syncbn.SyncBatchNorm",
  float16: "guides/training#mixed-precision",
  mask: "guides/training#how-do-i-leave-padding-out-of-the-statistics",
  padding: "guides/training#how-do-i-leave-padding-out-of-the-statistics",
  loss: "guides/make_parallel#what-a-net-must-and-must-not-do",
  timeout: "guides/hang",
  freeze: "guides/statistics#fine-tune-with-a-frozen-backbone",
};

// A result is [page, title, anchor, description, score, file].
var Scorer = {
  score: (result) => {
    const query = new URLSearchParams(window.location.search).get("q") || "";
    const [page, anchor] = (PLACES[query.trim().toLowerCase()] || "").split("#");
    const [found, , own, , score] = result;
    if (found === page && own === "") {
      if (anchor) result[2] = `#${anchor}`;
      return score + 100;
    }
    if (/^(design|changelog)/.test(found)) return score * 0.3;
    return score + (found.startsWith("guides/") ? 20 : 0) + (/hang|errors/.test(found) ? 5 : 0);
  },
  objNameMatch: 30,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
