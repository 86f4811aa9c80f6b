// The words of the Python package for the collective's errors: its functions, and likely mistakes.
// Who uses it: the collective, which must not know them, through advice.h.
#include "collective/advice.h"
#include "core/error.h"

namespace syncbn {
namespace {

std::string LikelyCause(bool on_cpu, bool size_may_be_wrong) {
  const char size[] =
      "num_devices is not the number of contexts that get a shard of the batch, or one context got "
      "two shards in one step";
  const char early[] =
      "the loop reads a result (asnumpy, wait_to_read, print) before every context has been given "
      "its work, or a context got no shard, or two";
  const char loop[] =
      "a plain loop over several CPU contexts, which deadlocks inside MXNet: call "
      "gluon_syncbn.allow_plain_loop(net), or drive them with gluon_syncbn.Devices(contexts).map";
  if (size_may_be_wrong) return on_cpu ? Concat(size, "; or ", loop) : size;
  return on_cpu ? Concat(loop, "; or ", early) : early;
}

Advice Words() {
  Advice words;
  words.title = "SyncBatchNorm";
  words.size = "num_devices";
  words.recover = "gluon_syncbn.recover()";
  words.init = "gluon_syncbn.distributed.init()";
  words.shutdown = "gluon_syncbn.distributed.shutdown()";
  words.join = "distributed.join";
  words.likely_cause = LikelyCause;
  words.too_many_devices =
      "give num_devices the number of contexts that get a shard of the batch, and call "
      "net.hybridize() again after moving a net to other contexts";
  words.sits_out = "gluon_syncbn.participating() says which contexts have a shard of the batch";
  words.twice = "every context may hold one shard of the batch";
  return words;
}

const RegisterAdvice advice(Words());

}  // namespace
}  // namespace syncbn
