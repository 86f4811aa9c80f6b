// Scores of the site's search: Sphinx's own, but names come first, then guides, before all
// the two about errors, because what is pasted here is often an error.
// A result is [page, title, anchor, description, score, file].
var Scorer = {
  score: ([page, , , , score]) =>
    score + (page.startsWith("guides/") ? 20 : 0) + (/hang|errors/.test(page) ? 5 : 0),
  objNameMatch: 30,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
