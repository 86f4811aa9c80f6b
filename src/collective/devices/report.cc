// Texts of failures: the layer and the phase, who has arrived, who has not, and what to do.
#include "collective/devices/report.h"

#include <iomanip>
#include <vector>

#include "core/error.h"

namespace syncbn {
namespace {

const char kRecover[] =
    " Before the next step call gluon_syncbn.recover(), which waits for the work in flight and "
    "clears the error.";

std::string Quoted(const std::string& layer) { return Concat("SyncBatchNorm '", layer, "'"); }

}  // namespace

std::string Title(const std::string& layer, const std::string& phase) {
  return Concat(Quoted(layer), ", ", phase);
}

std::string TimeoutReport(const std::string& title, const Rendezvous& rendezvous, size_t size,
                          const std::set<Device>& known, double seconds,
                          const std::string& where) {
  std::vector<std::string> arrived, missing;
  for (const auto& entry : rendezvous.arrivals) {
    arrived.push_back(entry.first.Name() + " with shape " + entry.second.shape);
  }
  for (const Device& device : known) {
    if (!rendezvous.arrivals.count(device)) missing.push_back(device.Name());
  }
  const size_t unknown = size - arrived.size() - missing.size();
  if (unknown > 0) {
    missing.push_back(Concat(unknown, missing.empty() ? "" : " more",
                             " that never called the layer"));
  }
  return Concat(title, ": waited ", std::setprecision(4), seconds, " s for ",
                size - arrived.size(), " of ", size, " devices. Arrived: ",
                Join(arrived), ". Missing: ", Join(missing), ".", kRecover, where,
                "\nThe usual causes, each with its cure: python -m gluon_syncbn hang");
}

std::string DisagreementReport(const std::pair<const Device, Arrival>& a,
                               const std::pair<const Device, Arrival>& b) {
  return Concat("devices disagree: ", a.first.Name(), " has ", a.second.signature, " (shape ",
                a.second.shape, "), but ", b.first.Name(), " has ", b.second.signature, " (shape ",
                b.second.shape, ").", kRecover);
}

std::string TooManyDevicesReport(const std::string& layer, const Device& device,
                                 const std::set<Device>& others, size_t size) {
  return Concat(Quoted(layer), ": num_devices=", size, ", but ", device.Name(),
                " calls the layer as well as ", Names(others), "; give num_devices the number of "
                "contexts that get a shard of the batch, and call net.hybridize() again after "
                "moving a net to other contexts.", kRecover);
}

std::string NoParticipantReport(const std::string& layer, const Device& device,
                          const std::set<Device>& participants) {
  return Concat(Quoted(layer), ": ", device.Name(), " calls the layer, but "
                "this step has shards on ", Names(participants), " only.", kRecover);
}

std::string TwiceReport(const Device& device) {
  return Concat(device.Name(), " arrived twice at one rendezvous; every context may hold one shard "
                "of the batch.", kRecover);
}

std::string EarlierFailureReport(const std::string& layer, const std::string& phase,
                                 const Device& device, const std::string& failure) {
  return Concat(Title(layer, phase), ": ", device.Name(),
                " stopped because of an earlier error: ", failure);
}

}  // namespace syncbn
