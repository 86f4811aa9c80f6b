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

// ---- causes of a timeout -----------------------------------------------------------------------

// The functions below return a cause and its cure, in two sentences without the last full stop.

std::string NumDevices(const Absence& absence) {
  const std::set<Device>& on = absence.options.expected;
  return Concat("num_devices=", absence.options.size, " is not the number of contexts that get a "
                "shard of the batch. Leave it out, or give it that number",
                on.empty() ? "" : "; the layer is initialized on " + Names(on));
}

std::string NoBackward(const Absence& absence) {
  if (absence.driver > 1) {
    return Concat("backward was not called for ", Names(absence.missing), " from Devices.map. Call "
                  "it there for every context: devices.map(lambda loss: loss.backward(), losses)");
  }
  return Concat("backward was not called for ", Names(absence.missing), ". Call autograd.backward "
                "once, with the losses of all contexts, before a gradient is read");
}

std::string NoForward(const Absence& absence, const std::set<Device>& idle) {
  if (absence.driver < 2) {
    return Concat("the net was not called for ", Names(idle), ". In training call it for every "
                  "context before a result is read (asnumpy, wait_to_read, print) or backward is "
                  "called");
  }
  if (!absence.never.empty()) {
    return Concat("the layer is initialized on ", Names(absence.never), ", which got no shard. "
                  "Initialize the net on the contexts that get one, or name these with "
                  "gluon_syncbn.participating");
  }
  return Concat("the function that Devices.map calls did not call the layer for ", Names(idle),
                " in this step. Call the net for every context, or name those that have a shard "
                "with gluon_syncbn.participating");
}

std::string Late(const Absence& absence) {
  return Concat("an operator in front of this layer has failed on ", Names(absence.missing), ", or "
                "takes longer than the timeout. Look at the other errors, or raise the timeout "
                "with gluon_syncbn.set_timeout");
}

const char kTemplate[] =
    "the call went to the template of a parallel net, its attribute net. Call the parallel net, "
    "which gives every context a shard";
const char kPlainLoop[] =
    "a plain loop over CPU contexts, which deadlocks inside MXNet. Give the net that the loop "
    "calls to gluon_syncbn.allow_plain_loop, or call it with gluon_syncbn.Devices(contexts).map";

const char kModule[] =
    "a symbol that is bound to CPU contexts, as by mx.mod.Module, which calls them in a plain loop "
    "that deadlocks inside MXNet. Make the symbol a SymbolBlock, and give that to "
    "gluon_syncbn.make_parallel";

std::string ReadsInside(const Absence& absence) {
  return Concat("the function that is called for ", Names(absence.in_driver), " waits for a result "
                "(asnumpy, wait_to_read, print). Read results after it was called for every "
                "context");
}

std::string CalledAgain(const Absence& absence) {
  return Concat(Names(absence.again), " got a second shard before ",
                absence.idle.empty() ? "the others" : Names(absence.idle),
                " got one. Give every context one shard in each step");
}

std::string LikelyCause(const Absence& absence) {
  const bool is_forward = absence.options.phase == "forward";
  const bool plain_loop = absence.driver == 0 && absence.options.device.type == "cpu";
  if (absence.driver == 0 && absence.needs_driver) return kTemplate;
  if (absence.driver > 0 && !absence.in_driver.empty() && absence.queued.empty()) {
    return ReadsInside(absence);
  }
  if (is_forward && !absence.again.empty() && absence.queued.empty()) {
    return CalledAgain(absence);
  }
  if (absence.Unknown() > 0) {
    return plain_loop && absence.options.expected.empty() ? kModule : NumDevices(absence);
  }
  if (!is_forward) {
    if (plain_loop) return kPlainLoop;
    return absence.needs_driver ? Late(absence) : NoBackward(absence);
  }
  if (!absence.idle.empty()) return NoForward(absence, absence.idle);
  if (plain_loop) return kPlainLoop;
  return absence.queued.empty() ? NoForward(absence, absence.missing) : Late(absence);
}

}  // namespace

std::string Title(const std::string& layer, const std::string& phase) {
  return Concat(Quoted(layer), ", ", phase);
}

std::string TimeoutReport(const std::string& title, const Absence& absence, double seconds) {
  const size_t size = absence.options.size;
  std::vector<std::string> arrived, missing;
  for (const auto& entry : absence.rendezvous.arrivals) {
    arrived.push_back(entry.first.Name() + " with shape " + entry.second.shape);
  }
  if (!absence.missing.empty()) missing.push_back(Names(absence.missing));
  if (absence.Unknown() > 0) {
    missing.push_back(Concat(absence.Unknown(), missing.empty() ? "" : " more",
                             " that never called the layer"));
  }
  return Concat(title, ": waited ", std::setprecision(4), seconds, " s for ",
                size - arrived.size(), " of ", size, " devices. Arrived: ",
                Join(arrived), ". Missing: ", Join(missing), ". Likely cause: ",
                LikelyCause(absence), ". The guide \"Debugging a hang\" (docs/guides/hang.md) has "
                "more.", kRecover);
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
                "gluon_syncbn.participating() names only ", Names(participants), ".", kRecover);
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
