// The C functions declared in c_api.h.
// Who uses it: tests, through ctypes.
#pragma GCC visibility push(default)
#include "op/c_api.h"
#pragma GCC visibility pop

#include <vector>

#include "collective/registry.h"
#include "core/error.h"
#include "core/last_error.h"
#include "op/sync_batch_norm.h"

using syncbn::DType;
using syncbn::Layout;
using syncbn::Request;
using syncbn::SyncBatchNorm;
using syncbn::Tensor;

namespace {

struct Op {
  int axis;
  bool from_output;
  SyncBatchNorm batch_norm;
};

Request ToRequest(int request) {
  if (request == 0) return Request::kNull;
  return request == 2 ? Request::kAdd : Request::kWrite;
}

// The views of one shard.
struct Views {
  Views(const gluon_syncbn_shard& shard, int axis)
      : shape(shard.shape, shard.shape + shard.ndim),
        dtype(static_cast<DType>(shard.dtype)),
        channels(shape.at(static_cast<size_t>(axis))) {
    if (!syncbn::IsSupported(shard.dtype)) {
      throw syncbn::Error(syncbn::Concat("no kernels for dtype number ", shard.dtype));
    }
  }

  Tensor Data(const void* data) const { return {const_cast<void*>(data), shape, dtype}; }
  Tensor Vector(const void* data) const {
    return {const_cast<void*>(data), {channels},
            dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32};
  }

  std::vector<int64_t> shape;
  DType dtype;
  int64_t channels;
};

}  // namespace

void* gluon_syncbn_op_create(const char* group, const char* device, const char* computes_on,
                             int num_devices, int axis, double epsilon, double momentum,
                             double timeout, int function, double slope, int from_output) {
  Op* op = nullptr;
  syncbn::CatchAll([&] {
    syncbn::Options options;
    options.num_devices = num_devices;
    options.axis = axis;
    options.epsilon = epsilon;
    options.momentum = momentum;
    options.timeout = timeout;
    options.activation = {static_cast<syncbn::Function>(function), slope};
    options.from_output = from_output != 0;
    op = new Op{axis, options.from_output,
                SyncBatchNorm(options, syncbn::ParseDevice(device),
                                    syncbn::Registry::Get().FindOrCreate(group, group),
                                    syncbn::MakeBackend(syncbn::ParseDevice(computes_on)))};
  });
  return op;
}

int gluon_syncbn_op_forward(void* op, int training, const gluon_syncbn_shard* shard) {
  return syncbn::CatchAll([&] {
    Op& self = *static_cast<Op*>(op);
    const Views views(*shard, self.axis);
    self.batch_norm.Forward(training != 0, views.Data(shard->x), views.Vector(shard->gamma),
                            views.Vector(shard->beta), ToRequest(shard->y_request),
                            views.Data(shard->y), views.Vector(shard->running_mean),
                            views.Vector(shard->running_var));
  });
}

int gluon_syncbn_op_backward(void* op, const gluon_syncbn_shard* shard) {
  return syncbn::CatchAll([&] {
    Op& self = *static_cast<Op*>(op);
    const Views views(*shard, self.axis);
    const syncbn::Gradients gradients{
        ToRequest(shard->dx_request),     ToRequest(shard->dgamma_request),
        ToRequest(shard->dbeta_request),  views.Data(shard->dx),
        views.Vector(shard->dgamma),      views.Vector(shard->dbeta)};
    self.batch_norm.Backward(views.Data(shard->dy),
                             views.Data(self.from_output ? shard->y : shard->x), gradients);
  });
}

void gluon_syncbn_op_delete(void* op) { delete static_cast<Op*>(op); }
