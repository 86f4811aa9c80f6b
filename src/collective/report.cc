// Texts of failed rendezvous: the layer, the phase, who has arrived, who has not, and what to do.
#include "collective/report.h"

#include <iomanip>
#include <sstream>
#include <vector>

#include "collective/advice.h"
#include "core/error.h"

namespace syncbn {
namespace {

std::string Layer(const std::string& layer) { return Concat(TheAdvice().title, " '", layer, "'"); }

std::string Recover() {
  return Concat(" Before the next step call ", TheAdvice().recover,
                ", which waits for the work in flight and clears the error.");
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

std::string ArrivedList(const Rendezvous& rendezvous) {
  std::vector<std::string> arrived;
  for (const auto& entry : rendezvous.arrivals) {
    arrived.push_back(entry.first.Name() + " with shape " + entry.second.shape);
  }
  return Join(arrived);
}

std::set<Device> KnownMissing(const Rendezvous& rendezvous, const std::set<Device>& known) {
  std::set<Device> missing;
  for (const Device& device : known) {
    if (!rendezvous.arrivals.count(device)) missing.insert(device);
  }
  return missing;
}

}  // namespace

std::string Title(const std::string& layer, const std::string& phase) {
  return Concat(Layer(layer), ", ", phase);
}

std::string TimeoutReport(const std::string& title, const Rendezvous& rendezvous,
                          const std::set<Device>& known, size_t size, double seconds) {
  const std::set<Device> missing = KnownMissing(rendezvous, known);
  const size_t unknown = size - rendezvous.arrivals.size() - missing.size();
  std::vector<std::string> absent;
  if (!missing.empty()) absent.push_back(Names(missing));
  if (unknown > 0) {
    absent.push_back(Concat(unknown, missing.empty() ? " that never" : " more that never",
                            " called the layer"));
  }
  std::ostringstream waited;
  waited << std::setprecision(4) << seconds;
  const bool on_cpu = rendezvous.arrivals.begin()->first.type == "cpu";
  return Concat(title, ": waited ", waited.str(), " s for ", size - rendezvous.arrivals.size(),
                " of ", size, " devices. Arrived: ", ArrivedList(rendezvous), ". Missing: ",
                Join(absent), ". Likely cause: ",
                TheAdvice().likely_cause(on_cpu, unknown > 0), ".", Recover());
}

std::string DisagreementReport(const std::string& title, const Rendezvous& rendezvous,
                               const Device& device, const Arrival& arrival) {
  const auto& other = *rendezvous.arrivals.begin();
  return Concat(title, ": devices disagree: ", other.first.Name(), " has ",
                other.second.signature, " (shape ", other.second.shape, "), but ", device.Name(),
                " has ", arrival.signature, " (shape ", arrival.shape, ").", Recover());
}

std::string TooManyDevicesReport(const std::string& layer, const Device& device,
                                 const std::set<Device>& others, size_t size) {
  return Concat(Layer(layer), ": ", TheAdvice().size, "=", size, ", but ", device.Name(),
                " calls the layer as well as ", Names(others), "; ", TheAdvice().too_many_devices,
                ".", Recover());
}

std::string SitsOutReport(const std::string& layer, const Device& device,
                          const std::set<Device>& participants) {
  return Concat(Layer(layer), ": ", device.Name(), " calls the layer, but only ",
                Names(participants), " take part: ", TheAdvice().sits_out, ".", Recover());
}

std::string TwiceReport(const std::string& title, const Device& device) {
  return Concat(title, ": ", device.Name(), " came twice to one exchange; ", TheAdvice().twice, ".",
                Recover());
}

std::string EarlierFailureReport(const std::string& title, const Device& device,
                                 const std::string& failure) {
  return Concat(title, ": ", device.Name(), " stopped because of an earlier error: ", failure);
}

std::string WasResetReport() {
  return Concat("the layer was reset by ", TheAdvice().recover,
                " after the forward call that this call belongs to.");
}

}  // namespace syncbn
