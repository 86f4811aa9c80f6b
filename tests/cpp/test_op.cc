// Tests op/ apart from the passes: the choice of a backend, and the ends of spans.
#include "check.h"
#include "layer_shard.h"
#include "op/backend.h"

namespace {

TEST(GpuIsRefusedWhereCudaWasNotBuilt) {
  CheckHas(ErrorOf([] { syncbn::MakeBackend({"gpu", 1}, nullptr); }),
           "SyncBatchNorm on gpu(1): this build of gluon_syncbn has CPU kernels only, because it "
           "was built for native tests; install a working nvcc");
}

int open_spans = 0;
int all_spans = 0;

TEST(ACallThatFailsEndsItsSpans) {
  const syncbn::Profiler counter{[] { return true; },
                                 [](const std::string&, const std::string&) -> void* {
                                   ++open_spans;
                                   ++all_spans;
                                   return &open_spans;
                                 },
                                 [](void* open) { --*static_cast<int*>(open); }};
  syncbn::profiler = &counter;
  test::Setting setting;
  const auto shared = std::make_shared<syncbn::Layer>("layer");
  const auto layer =
      test::MakeLayer(setting, 2, {"cpu", 0}, shared, syncbn::MakeCpuBackend());
  test::Shard shard(syncbn::DType::kFloat32, 2, 0, false);
  shared->group.Fail("a failure");
  CheckHas(ErrorOf([&] { shard.Step(layer.get(), setting, test::InPlace); }), "a failure");
  syncbn::profiler = nullptr;
  CHECK(all_spans == 1 && open_spans == 0);
}

}  // namespace

int main() { return check::RunTests(); }
