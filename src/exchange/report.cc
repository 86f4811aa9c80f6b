// A text has the exchange, who has arrived, who has not, and what to type.
#include "exchange/report.h"

#include <algorithm>
#include <iomanip>

#include "core/error.h"

namespace syncbn {
namespace {

const char kRecover[] =
    " Before the next step call gluon_syncbn.recover(), which waits for the work in flight and "
    "clears the error.";
const char kHang[] = "\nThe usual causes, each with its cure: python -m gluon_syncbn hang";
const char kStartAgain[] = " Start the program again from its checkpoint.";

std::string Quoted(const std::string& layer) { return Concat("SyncBatchNorm '", layer, "'"); }

// "(8, 64)"
template <typename Numbers>
std::string List(const Numbers& numbers) {
  std::vector<std::string> texts;
  for (const auto number : numbers) texts.push_back(std::to_string(number));
  return Join(texts);
}

std::string Shape(const std::vector<int64_t>& shape) { return "(" + List(shape) + ")"; }

std::string Ranks(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + List(ranks);
}

std::string Text(const Signature& signature) {
  if (signature.channels == 0) return signature.text;
  return Concat("channels=", signature.channels, ", dtype=", Name(signature.dtype),
                ", axis=", signature.axis, ", epsilon=", signature.epsilon);
}

std::string Text(const Terms& terms, bool of_device) {
  const std::string signature = Text(terms.signature);
  if (!of_device) {
    return Concat("rank ", terms.place.rank, " has ", signature,
                  " (synchronized: ", Ranks(terms.ranks), ")");
  }
  return Concat(terms.place.device.Name(), " has ", signature, ", num_devices=", terms.devices,
                " (shape ", Shape(terms.shape), ")");
}

}  // namespace

std::string DevicesMissingReport(const Exchange& exchange, int rank, const std::set<Device>& known,
                                 double seconds, const std::string& where) {
  std::vector<std::string> arrived, missing;
  for (const auto& [place, part] : exchange.parts) {
    if (place.rank == rank) {
      arrived.push_back(place.device.Name() + " with shape " + Shape(part.shape));
    }
  }
  for (const Device& device : known) {
    if (!exchange.parts.count({rank, device})) missing.push_back(device.Name());
  }
  const size_t named = arrived.size() + missing.size();
  if (named < exchange.devices) {
    missing.push_back(Concat(exchange.devices - named, missing.empty() ? "" : " more",
                             " that never called the layer"));
  }
  return Concat(exchange.key.Title(), ": waited ", std::setprecision(4), seconds, " s for ",
                exchange.devices - arrived.size(), " of ", exchange.devices,
                " devices. Arrived: ", Join(arrived), ". Missing: ", Join(missing), ".", kRecover,
                where, kHang);
}

std::string RanksMissingReport(const Exchange& exchange, int rank,
                               const std::function<std::string(int)>& state, double seconds,
                               const std::string& where) {
  std::vector<int> present = exchange.ranks;
  std::vector<std::string> missing;
  if (exchange.sent) {
    present = {rank};
    missing.push_back(Concat("rank ", exchange.position.parent,
                             ", which does not answer: it "
                             "computes, has left the loop or has died"));
  }
  for (const Subtree& child : exchange.sent ? std::vector<Subtree>() : exchange.Missing()) {
    const auto begin = std::lower_bound(present.begin(), present.end(), child.rank);
    present.erase(begin, begin + child.size);
    missing.push_back(
        Concat("rank ", child.rank, ", ", state(child.rank),
               child.size == 1 ? "" : Concat(" (it sends for ", child.size, " ranks)")));
  }
  return Concat(exchange.key.Title(), ": waited ", std::setprecision(4), seconds, " s for ",
                missing.size(), " of ", exchange.ranks.size(),
                " processes. Arrived: ", present.empty() ? "none" : Ranks(present),
                ". Missing: ", Join(missing, "; "), ".", kStartAgain, where, kHang);
}

std::string DisagreementReport(const Key& key, const Terms& a, const Terms& b) {
  const bool of_devices = a.place.rank == b.place.rank;
  return Concat(key.Title(), ": ", of_devices ? "devices" : "processes",
                " disagree: ", Text(a, of_devices), ", but ", Text(b, of_devices), ".",
                of_devices ? kRecover : kStartAgain);
}

std::string TooManyDevicesReport(const std::string& layer, const Device& device,
                                 const std::set<Device>& others, size_t size) {
  return Concat(Quoted(layer), ": num_devices=", size, ", but ", device.Name(),
                " calls the layer as well as ", Names(others),
                ". Set num_devices to the number "
                "of contexts that get a shard of the batch, and call net.hybridize() again after "
                "you move a net to other contexts.",
                kRecover);
}

std::string NoParticipantReport(const std::string& layer, const Device& device,
                                const std::set<Device>& participants) {
  return Concat(Quoted(layer), ": ", device.Name(),
                " calls the layer, but "
                "this step has shards on ",
                Names(participants), " only.", kRecover);
}

std::string TwiceReport(const Key& key, const Device& device) {
  return Concat(key.Title(), ": ", device.Name(),
                " arrived twice in one call. Pass only one shard "
                "of the batch to each context.",
                kRecover);
}

std::string EarlierFailureReport(const Key& key, const Device& device, const std::string& failure) {
  return Concat(key.Title(), ": ", device.type.empty() ? "" : device.Name() + " ",
                "stopped because of an earlier error: ", failure);
}

std::string EndReport(const Key& key, const std::string& failure) {
  const std::string title = key.Title();
  return failure.compare(0, title.size(), title) == 0 ? failure : Concat(title, ": ", failure);
}

std::string RankLeftReport(const Key& key, int rank) {
  return Concat(key.Title(), ": rank ", rank, " has left: its program has ended or called ",
                kShutdown, ", so this exchange cannot complete.");
}

std::string RankFailedReport(int rank, const std::string& text, const std::string& where) {
  return Concat("ended because of an error on rank ", rank, ": ", text,
                where.empty() ? "" : "\nOn this rank:", where);
}

}  // namespace syncbn
