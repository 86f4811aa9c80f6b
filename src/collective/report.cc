// Texts of failed meetings: which layer, which operation, who came, who did not, and what to do.
#include "collective/report.h"

#include <iomanip>
#include <sstream>
#include <vector>

#include "core/error.h"

namespace syncbn {
namespace {

const char kRecover[] =
    " Before the next step call gluon_syncbn.recover(), which waits for the work in flight and "
    "clears the error.";

std::string Title(const std::string& layer, const std::string& operation) {
  return Concat("SyncBatchNorm '", layer, "', ", operation, ": ");
}

std::string Join(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ", ") + part;
  return text;
}

std::string Names(const std::set<Device>& devices) {
  std::vector<std::string> names;
  for (const Device& device : devices) names.push_back(device.Name());
  return Join(names);
}

std::string ArrivedList(const Round& round) {
  std::vector<std::string> arrived;
  for (const auto& entry : round.arrivals) {
    arrived.push_back(entry.first.Name() + " with shape " + entry.second.shape);
  }
  return Join(arrived);
}

std::set<Device> KnownMissing(const Round& round, const std::set<Device>& known) {
  std::set<Device> missing;
  for (const Device& device : known) {
    if (!round.arrivals.count(device)) missing.insert(device);
  }
  return missing;
}

std::string LikelyCause(const Round& round, size_t unknown) {
  const char count[] =
      "num_devices is not the number of contexts that get a shard of the batch, or one context got "
      "two shards in one step";
  const char early[] =
      "the loop reads a result (asnumpy, wait_to_read, print) before every context has been given "
      "its work, or a context got no shard, or two";
  const char loop[] =
      "a plain loop over several CPU contexts, which deadlocks inside MXNet: call "
      "gluon_syncbn.allow_plain_loop(net), or drive them with gluon_syncbn.Devices(contexts).map";
  const bool on_cpu = round.arrivals.begin()->first.type == "cpu";
  if (unknown > 0) return on_cpu ? Concat(count, "; or ", loop) : count;
  return on_cpu ? Concat(loop, "; or ", early) : early;
}

}  // namespace

std::string TimeoutReport(const std::string& layer, const std::string& operation,
                          const Round& round, const std::set<Device>& known, size_t size,
                          double seconds) {
  const std::set<Device> missing = KnownMissing(round, known);
  const size_t unknown = size - round.arrivals.size() - missing.size();
  std::vector<std::string> absent;
  if (!missing.empty()) absent.push_back(Names(missing));
  if (unknown > 0) {
    absent.push_back(Concat(unknown, missing.empty() ? " that never" : " more that never", " called the layer"));
  }
  std::ostringstream waited;
  waited << std::setprecision(4) << seconds;
  return Concat(Title(layer, operation), "waited ", waited.str(), " s for ",
                size - round.arrivals.size(), " of ", size, " devices. Arrived: ",
                ArrivedList(round), ". Missing: ", Join(absent), ". Likely cause: ",
                LikelyCause(round, unknown), ".", kRecover);
}

std::string DisagreementReport(const std::string& layer, const std::string& operation,
                               const Round& round, const Device& device, const Arrival& arrival) {
  const auto& other = *round.arrivals.begin();
  return Concat(Title(layer, operation), "devices disagree: ", other.first.Name(), " has ",
                other.second.contract, " (shape ", other.second.shape, "), but ", device.Name(),
                " has ", arrival.contract, " (shape ", arrival.shape, ").", kRecover);
}

std::string TooManyDevicesReport(const std::string& layer, const Device& device,
                                 const std::set<Device>& others, size_t size) {
  return Concat("SyncBatchNorm '", layer, "': num_devices=", size, ", but ", device.Name(),
                " calls the layer as well as ", Names(others),
                "; give num_devices the number of contexts that get a shard of the batch, and "
                "call net.hybridize() again after moving a net to other contexts.", kRecover);
}

std::string SitsOutReport(const std::string& layer, const Device& device,
                          const std::set<Device>& participants) {
  return Concat("SyncBatchNorm '", layer, "': ", device.Name(), " calls the layer, but only ",
                Names(participants), " take part: gluon_syncbn.participating() says which contexts "
                "have a shard of the batch.", kRecover);
}

std::string TwiceReport(const std::string& layer, const std::string& operation,
                        const Device& device) {
  return Concat(Title(layer, operation), device.Name(),
                " came twice to one exchange; every context may hold one shard of the batch.",
                kRecover);
}

std::string EarlierFailureReport(const std::string& layer, const std::string& operation,
                                 const Device& device, const std::string& failure) {
  return Concat(Title(layer, operation), device.Name(), " stopped because of an earlier error: ",
                failure);
}

}  // namespace syncbn
