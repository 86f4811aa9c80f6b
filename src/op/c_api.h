// The layer on one device as plain C functions, so that tests run several devices of one or of no
// GPU through the real exchange without MXNet.
// Functions return 0 (create: an object), or -1 (null) with the text in gluon_syncbn_last_error.
#pragma once
#include <cstdint>

extern "C" {
// Memory of a shard on the device; vectors are float64 for float64 data, else float32. `dtype` is a
// DType number, requests are 0 (leave alone), 1 (write) or 2 (add).
struct gluon_syncbn_shard {
  int dtype, ndim;
  const int64_t* shape;
  const void *x, *gamma, *beta;
  void *running_mean, *running_var;
  int y_request;
  void* y;
  const void* dy;
  int dx_request, dgamma_request, dbeta_request;
  void *dx, *dgamma, *dbeta;
};

// `device` ("gpu(1)") is the rank among the devices of the group with this key; `computes_on` is
// where its memory is. `function` and `slope` are the Activation; with `from_output` backward reads
// the shard's y, else its x.
void* gluon_syncbn_op_create(const char* group, const char* device, const char* computes_on,
                             int num_devices, int axis, double epsilon, double momentum,
                             double timeout, int function, double slope, int from_output);
int gluon_syncbn_op_forward(void* op, int training, const gluon_syncbn_shard* shard);
int gluon_syncbn_op_backward(void* op, const gluon_syncbn_shard* shard);
void gluon_syncbn_op_delete(void* op);
}
