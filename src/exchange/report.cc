#include "exchange/report.h"

#include <algorithm>
#include <iomanip>

#include "core/error.h"

namespace syncbn {
namespace {

const char kRecover[] =
    " Before the next step call gluon_syncbn.recover(), which waits for the work in flight and "
    "clears the error.";
const char kHang[] = "\nTo list common causes and fixes, run python -m gluon_syncbn hang";
const char kStartAgain[] = " Start the program again from its checkpoint.";

std::string Ranks(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + JoinNumbers(ranks);
}

std::string Text(const Terms& terms, bool of_device) {
  const Signature& signature = terms.signature;
  const std::string text =
      Concat("channels=", signature.channels, ", dtype=", Name(signature.dtype),
             ", axis=", signature.axis, ", epsilon=", signature.epsilon);
  return of_device
             ? Concat(terms.place.device.Name(), " has ", text, ", num_devices=", terms.devices)
             : Concat("rank ", terms.place.rank, " has ", text, " and synchronizes ",
                      Ranks(signature.ranks));
}

}  // namespace

std::string DevicesMissingReport(const Exchange& exchange, int rank, const std::set<Device>& known,
                                 double seconds, const std::string* where) {
  std::vector<std::string> arrived, missing;
  for (const auto& [place, part] : exchange.parts) {
    if (place.rank == rank) {
      arrived.push_back(place.device.Name() + " with shape " + ShapeText(part.shape));
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
                " devices. Arrived: ", Join(arrived), ". Missing: ", Join(missing), ".",
                where == nullptr ? "" : Concat(kRecover, *where, kHang));
}

std::string RanksMissingReport(const Exchange& exchange, int rank, const std::map<int, Key>& latest,
                               double seconds, const std::string* where) {
  const std::vector<int>& ranks = exchange.signature.ranks;
  const auto own = std::lower_bound(ranks.begin(), ranks.end(), rank);
  int known = 1;  // this rank, and the ranks that send through it
  for (const Subtree& child : exchange.position.children) known += child.size;
  std::vector<int> arrived(own, own + known);
  std::vector<std::string> missing;
  for (const Subtree& other : exchange.Missing()) {
    const auto begin = std::lower_bound(arrived.begin(), arrived.end(), other.rank);
    arrived.erase(begin, begin + other.size);
    const auto part = latest.find(other.rank);
    const std::string since = part == latest.end() ? "yet" : "since " + part->second.Title();
    missing.push_back(
        Concat("rank ", other.rank, ", which ",
               exchange.sent ? "does not answer: it is busy, has left the training loop or has died"
                             : "has sent nothing " + since,
               other.size > 1 ? Concat(" (it sends for ", other.size, " ranks)") : ""));
  }
  return Concat(exchange.key.Title(), ": waited ", std::setprecision(4), seconds, " s for ",
                exchange.sent ? 1 : known - arrived.size(), " of ", ranks.size(),
                " processes. Arrived: ", Ranks(arrived), ". Missing: ", Join(missing, "; "), ".",
                where == nullptr ? "" : Concat(kStartAgain, *where, kHang));
}

std::string DisagreementReport(const Key& key, const Terms& a, const Terms& b) {
  const bool of_devices = a.place.rank == b.place.rank;
  return Concat(key.Title(), ": ", of_devices ? "devices" : "processes",
                " disagree: ", Text(a, of_devices), ", but ", Text(b, of_devices), ".",
                of_devices ? kRecover : kStartAgain);
}

std::string TooManyDevicesReport(const std::string& layer, const Device& device,
                                 const std::set<Device>& others, size_t size) {
  return Concat("SyncBatchNorm '", layer, "': num_devices=", size, ", but the layer is called on ",
                device.Name(), " as well as on ", Names(others),
                ". Set num_devices to the number "
                "of contexts that get a shard of the batch, and call net.hybridize() again after "
                "you move a net to other contexts.",
                kRecover);
}

std::string StayingReport(int rank, const std::vector<int>& staying) {
  return Concat("gluon_syncbn: rank ", rank, " has ended and waits for ", Ranks(staying),
                ", still busy, stopped or hanging. To end all ranks, end the launcher (mpirun).");
}

}  // namespace syncbn
