#include "mxnet/guard.h"

#include <map>

#include "core/error.h"

namespace syncbn {
namespace {

thread_local std::map<std::string, int> calls;  // of each guard, under way in this thread

template <typename... Parts>
[[noreturn]] void Fail(const Attributes& attributes, const Parts&... parts) {
  throw Error(Concat("SyncBatchNorm '", attributes.layer, "': ", parts...));
}

}  // namespace

void CallGuarded(const std::string& guard, bool begins) { calls[guard] += begins ? 1 : -1; }

void CheckGuard(const Attributes& attributes, const Device& device) {
  if (device.type != "cpu" || attributes.guard == "any") return;
  if (attributes.guard == "gpu") {
    Fail(attributes, "the graph was traced for GPU contexts and now runs on ", device.Name(),
              "; call net.hybridize() after moving the parameters");
  }
  if (calls[attributes.guard] == 0) {
    Fail(attributes, "this symbol was traced for ",
              attributes.guard == "outside" ? "the layer alone" : "static_shape=True",
              ", and its results are wrong in any other mode on a CPU; before export call "
              "gluon_syncbn.revert_sync_batchnorm(net), or net.hybridize() without static_shape "
              "followed by one call of the net");
  }
}

}  // namespace syncbn
