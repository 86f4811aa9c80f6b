// The layer on one device as plain C functions. With them scripts/check_gpu.sh runs several devices
// of one GPU through the real exchange without MXNet.
// Who uses it: tests/support/native.py. Functions return 0, or create an object; on an error they
// return -1, or null, and its text is in gluon_syncbn_last_error.
#include <utility>
#include <vector>

#include "collective/devices/registry.h"
#include "core/c_interface.h"
#include "op/sync_batch_norm.h"

using syncbn::DType;
using syncbn::Layout;
using syncbn::Request;
using syncbn::SyncBatchNorm;
using syncbn::Tensor;

// `device` ("gpu(1)") is the rank among the devices of the group with this key; `computes_on` is
// the device of its memory. `function` and `slope` are the Activation; with `from_output` backward
// reads the shard's y, else its x.
struct gluon_syncbn_settings {
  const char *group, *device, *computes_on;
  int num_devices, axis;
  double epsilon, momentum, timeout;
  syncbn::Function function;
  double slope;
  int from_output;
};

// Memory of a shard on the device; vectors are float64 for float64 data, else float32. `dtype` is a
// DType number, and requests are numbers of Request.
struct gluon_syncbn_shard {
  int dtype, ndim;
  const int64_t* shape;
  const void *x, *gamma, *beta;
  void *running_mean, *running_var;
  Request y_request;
  void* y;
  const void* dy;
  Request dx_request, dgamma_request, dbeta_request;
  void *dx, *dgamma, *dbeta;
};

namespace {

struct Op {
  int axis;
  bool from_output;
  SyncBatchNorm batch_norm;
};

// The memory of one shard as Tensors.
struct Views {
  Views(const gluon_syncbn_shard& shard, int axis)
      : shape(shard.shape, shard.shape + shard.ndim),
        dtype(static_cast<DType>(shard.dtype)),
        channels(shape.at(static_cast<size_t>(axis))) {}

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

SYNCBN_EXPORT void* gluon_syncbn_op_create(const gluon_syncbn_settings* settings) {
  return syncbn::CatchAll(static_cast<Op*>(nullptr), [&] {
    syncbn::Options options;
    options.num_devices = settings->num_devices;
    options.axis = settings->axis;
    options.epsilon = settings->epsilon;
    options.momentum = settings->momentum;
    options.timeout = settings->timeout;
    options.activation = {settings->function, settings->slope};
    options.from_output = settings->from_output != 0;
    auto group = syncbn::Registry::Get().FindOrCreate(settings->group, settings->group);
    return new Op{options.axis, options.from_output,
                  SyncBatchNorm(options, syncbn::ParseDevice(settings->device), std::move(group),
                                std::make_shared<syncbn::RunningHistory>(),
                                syncbn::MakeBackend(syncbn::ParseDevice(settings->computes_on)))};
  });
}

SYNCBN_EXPORT int gluon_syncbn_op_forward(void* op, int training, const gluon_syncbn_shard* shard) {
  return syncbn::CatchAll([&] {
    Op& self = *static_cast<Op*>(op);
    const Views views(*shard, self.axis);
    self.batch_norm.Forward(
        training != 0,
        {views.Data(shard->x), views.Vector(shard->gamma), views.Vector(shard->beta),
         shard->y_request, views.Data(shard->y), views.Vector(shard->running_mean),
         views.Vector(shard->running_var)});
  });
}

SYNCBN_EXPORT int gluon_syncbn_op_backward(void* op, const gluon_syncbn_shard* shard) {
  return syncbn::CatchAll([&] {
    Op& self = *static_cast<Op*>(op);
    const Views views(*shard, self.axis);
    const syncbn::Gradients gradients{
        shard->dx_request, shard->dgamma_request, shard->dbeta_request, views.Data(shard->dx),
        views.Vector(shard->dgamma), views.Vector(shard->dbeta)};
    self.batch_norm.Backward(views.Data(shard->dy),
                             views.Data(self.from_output ? shard->y : shard->x), gradients);
  });
}

SYNCBN_EXPORT void gluon_syncbn_op_delete(void* op) { delete static_cast<Op*>(op); }
