// The operator `Custom(op_type="gluon_syncbn")`: MXNet's callbacks, which convert handles to
// tensors and exceptions to errors of MXNet.
//
// Inputs: x, gamma, beta. Output: y. Auxiliary states: running_mean, running_var.
// A chained node also has an input "after", which depends on the output of an earlier node with the
// same running statistics. The operator does not read "after", but MXNet runs the earlier node
// first. A masked node has a last input "rows", which repeats the number of valid rows per channel.
//
// MXNet calls Create in every imperative call, so Create must be cheap. Forward and Backward run on
// threads for custom operators, so they may wait for other devices.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "core/environment.h"
#include "core/error.h"
#include "core/spare_threads.h"
#include "mxnet/mxnet_api.h"
#include "mxnet/native_op.h"
#include "op/layer.h"
#include "op/sync_batch_norm.h"

namespace syncbn {
namespace {

using AnyCallback = int (*)(void);
template <typename Function>
AnyCallback Any(Function function) {
  return reinterpret_cast<AnyCallback>(reinterpret_cast<void*>(function));
}

template <typename State>
int Delete(void* state) {
  delete static_cast<State*>(state);
  return 1;
}

// `request` is an OpReqType of MXNet.
WriteMode ToWriteMode(int request) {
  if (request == 0) return WriteMode::kNull;
  return request == 3 ? WriteMode::kAdd : WriteMode::kWrite;
}

struct Node {
  std::shared_ptr<Layer> layer;
  bool masked = false;
  bool chained = false;
  bool native = false;  // the node is of the native operator

  int Inputs() const { return 3 + (chained ? 1 : 0) + (masked ? 1 : 0); }

  // Returns the axis of the channels of a tensor, or a value that is not one of its axes.
  int AxisOf(int ndim) const {
    const int axis = masked ? -1 : layer->options()->axis;
    return axis < 0 ? axis + ndim : axis;
  }
};

// Throws Error if this process does not have the layer that the attribute "layer_key" names.
Node ReadNode(int size, const char** keys, const char** values) {
  Node node;
  std::string layer_key;
  for (int i = 0; i < size; ++i) {
    const std::string key = keys[i], value = values[i];
    if (key == "layer_key") layer_key = value;
    if (key == "masked") node.masked = value == "True";
    if (key == "chained") node.chained = value == "True";
    if (key == "native") node.native = value == "True";
  }
  node.layer = FindLayer(layer_key);
  return node;
}

// The operator of a node on one device.
struct Operator {
  Operator(const Node& from, const Device& device)
      : node(from),
        batch_norm(from.layer, from.masked, device, MakeBackend(device, AllocateFromMxnet)) {}
  const Node node;
  SyncBatchNorm batch_norm;
  void* contexts[3] = {this, this, this};
};

void CheckCanSynchronize(int num_devices) {
  if (num_devices == 0) {
    throw Error(
        "SyncBatchNorm: a graph that is traced before the layer is initialized must have a number "
        "of devices, got num_devices=None. Call net.initialize() first, or give num_devices.");
  }
  if (num_devices > 1 && IsSet("MXNET_ENGINE_TYPE", "NaiveEngine")) {
    throw Error(Concat("SyncBatchNorm: expected num_devices=1 with MXNET_ENGINE_TYPE=NaiveEngine, ",
                       "which runs one operator at a time, got num_devices=", num_devices,
                       ". Unset MXNET_ENGINE_TYPE."));
  }
}

// `inputs` are x, gamma, beta, (after), (rows), running_mean, running_var.
void BeginForward(Operator* op, bool training, int request, const std::vector<Tensor>& inputs,
                  const Tensor& y) {
  if (op->batch_norm.UsesBatch(training))
    CheckCanSynchronize(op->node.layer->options()->num_devices);
  const int mean = op->node.Inputs();
  op->batch_norm.BeginForward(
      training, {inputs[0], inputs[1], inputs[2], ToWriteMode(request), y, inputs[mean],
                 inputs[mean + 1], op->node.masked ? inputs[mean - 1] : Tensor()});
}

// ---- Custom's callbacks, which run on threads for custom operators

// x, gamma, beta, (after), (rows) | y | running_mean, running_var
int Forward(int size, void** handles, int* /*tags*/, const int* requests, const int training,
            void* state) {
  return OperatorCallback(size, handles, [&](const std::vector<NDArray>& arrays) {
    Operator* op = static_cast<Operator*>(state);
    const int y = op->node.Inputs();
    std::vector<Tensor> inputs;
    for (int i = 0; i < y + 3; ++i) {
      if (i != y) inputs.push_back(arrays[i].View());
    }
    BeginForward(op, training != 0, requests[0], inputs, arrays[y].View());
    op->batch_norm.Finish();
  });
}

// dy | x, gamma, beta, ... | y | dx, dgamma, dbeta, ... | running_mean, running_var
// Only two arrays before dx have data: dy, and y if from_output is set, else x.
int Backward(int size, void** handles, int* /*tags*/, const int* requests, const int /*training*/,
             void* state) {
  return OperatorCallback(size, handles, [&](const std::vector<NDArray>& arrays) {
    Operator* op = static_cast<Operator*>(state);
    const int saved = op->batch_norm.options().from_output ? op->node.Inputs() + 1 : 1;
    const int dx = op->node.Inputs() + 2;
    const Gradients gradients{ToWriteMode(requests[0]), ToWriteMode(requests[1]),
                              ToWriteMode(requests[2]), arrays[dx].View(),
                              arrays[dx + 1].View(),    arrays[dx + 2].View()};
    op->batch_norm.BeginBackward(arrays[0].View(), arrays[saved].View(), gradients);
    op->batch_norm.Finish();
  });
}

// ---- what the graph asks, for both operators

template <typename... Parts>
[[noreturn]] void ThrowError(const Node& node, const Parts&... parts) {
  throw Error(Concat("SyncBatchNorm '", node.layer->members.layer, "': ", parts...));
}

struct Properties {
  Node node;
  std::string error;  // ListArguments throws it, see Create
  std::vector<const char*> arguments;
  std::vector<int> x_shape, channel_shape, after_shape = {1};
  int dependencies[2];
  void* contexts[10];
};

int ListArguments(char*** names, void* state) {
  return Callback([&] {
    Properties* properties = static_cast<Properties*>(state);
    if (!properties->error.empty()) throw Error(properties->error);
    std::vector<const char*>& arguments = properties->arguments;
    arguments = {"data", "gamma", "beta"};
    if (properties->node.chained) arguments.push_back("after");
    if (properties->node.masked) arguments.push_back("rows");
    arguments.push_back(nullptr);
    *names = const_cast<char**>(arguments.data());
  });
}

int ListOutputs(char*** names, void* /*state*/) {
  static const char* outputs[] = {"output", nullptr};
  *names = const_cast<char**>(outputs);
  return 1;
}

int ListAuxiliaryStates(char*** names, void* /*state*/) {
  static const char* states[] = {"running_mean", "running_var", nullptr};
  *names = const_cast<char**>(states);
  return 1;
}

// data, gamma, beta, (after), (rows), output, running_mean, running_var
int InferShape(int size, int* ndims, int** shapes, void* state) {
  return Callback([&] {
    Properties* properties = static_cast<Properties*>(state);
    if (ndims[0] <= 0) return;  // MXNet has not inferred the shape yet
    const int ndim = ndims[0];
    if (ndim < 2 || ndim > 5) {
      ThrowError(properties->node, "data must have 2 to 5 dimensions, got ", ndim);
    }
    const int position = properties->node.AxisOf(ndim);
    properties->x_shape.assign(shapes[0], shapes[0] + ndim);
    if (position < 0 || position >= ndim) {
      ThrowError(properties->node, "axis must be one of data's dimensions, got axis ",
                 properties->node.layer->options()->axis, " for ", ndim, " dimensions");
    }
    properties->channel_shape.assign(1, properties->x_shape[position]);
    for (int i = 1; i < size; ++i) {
      std::vector<int>* shape = &properties->channel_shape;
      if (i == properties->node.Inputs()) shape = &properties->x_shape;
      if (i == 3 && properties->node.chained) shape = &properties->after_shape;
      ndims[i] = static_cast<int>(shape->size());
      shapes[i] = shape->data();
    }
  });
}

int InferType(int size, int* types, void* state) {
  return Callback([&] {
    const Properties& properties = *static_cast<Properties*>(state);
    const int unknown = -1;
    const int float32 = static_cast<int>(DType::kFloat32);
    const int float64 = static_cast<int>(DType::kFloat64);
    const int int64 = 6;
    const int y = properties.node.Inputs();
    if (types[0] != unknown && !IsSupported(types[0])) {
      ThrowError(properties.node, "data must be float16, float32 or float64, got ",
                 NameOfFlag(types[0]), ". Call data.astype('float32').");
    }
    if (types[0] == unknown) types[0] = types[y] == unknown ? float32 : types[y];
    types[y] = types[0];
    if (properties.node.chained) types[3] = int64;
    for (int i = 1; i < size; ++i) {
      if (i == y || (i == 3 && properties.node.chained)) continue;
      if (types[i] == unknown) types[i] = types[0] == float64 ? float64 : float32;
      if (types[i] != float32 && types[i] != float64) {
        ThrowError(properties.node,
                   "parameters and running statistics must be float32 or float64, got ",
                   NameOfFlag(types[i]), ". Call net.cast('float32').");
      }
    }
  });
}

// Only the native operator has this. It reads and writes arrays of any storage type.
int InferStorageType(int size, int* types, void* /*state*/) {
  constexpr int kUnknown = -1, kDense = 0;
  std::replace(types, types + size, kUnknown, kDense);
  return 1;
}

int InferBackwardStorageType(int size, int* types, int* /*tags*/, void* state) {
  return InferStorageType(size, types, state);
}

int DeclareBackwardDependency(const int* out_grads, const int* inputs, const int* outputs,
                              int* size, int** dependencies, void* state) {
  Properties* properties = static_cast<Properties*>(state);
  properties->dependencies[0] = out_grads[0];
  properties->dependencies[1] =
      properties->node.layer->options()->from_output ? outputs[0] : inputs[0];
  *size = 2;
  *dependencies = properties->dependencies;
  return 1;
}

// MXNet's CUDA graphs capture the work that a static_shape graph queues on its stream, and replay
// it later. They exclude Custom, which has a state (cuda_graphs.h, OpOK), but not _backward_Custom.
// Its callback, which queues nothing on the stream, would never run again.
void CheckCudaGraphs(const Node& node, const Device& device) {
  const char* graphs = std::getenv("MXNET_ENABLE_CUDA_GRAPHS");
  const std::string value = graphs == nullptr ? "" : graphs;
  if (device.type != "gpu" || value.empty() || value == "0" || value == "false") return;
  throw Error(Concat("SyncBatchNorm '", node.layer->members.layer, "' on ", device.Name(),
                     ": expected no CUDA graphs, got MXNET_ENABLE_CUDA_GRAPHS=", value,
                     ". Unset it: MXNet would replay backward without this layer."));
}

int CreateOperator(const char* context, int /*size*/, unsigned** /*shapes*/, const int* /*ndims*/,
                   const int* /*dtypes*/, MXCallbackList* list, void* state) {
  return Callback([&] {
    static AnyCallback callbacks[] = {Any(Delete<Operator>), Any(Forward), Any(Backward)};
    const Device device = ParseDevice(context);
    const Node& node = static_cast<Properties*>(state)->node;
    CheckCudaGraphs(node, device);
    Operator* op = new Operator(node, device);
    list->num_callbacks = 3;
    list->callbacks = callbacks;
    list->contexts = op->contexts;
  });
}

// If this function failed, MXNet would call the first callback of `list`, which is not set yet. So
// ListArguments throws the error.
int Create(const char* /*op_type*/, const int size, const char** keys, const char** values,
           MXCallbackList* list) {
  static AnyCallback callbacks[] = {Any(Delete<Properties>), Any(ListArguments),
                                    Any(ListOutputs),        Any(ListAuxiliaryStates),
                                    Any(InferShape),         Any(DeclareBackwardDependency),
                                    Any(CreateOperator),     Any(InferType),
                                    Any(InferStorageType),   Any(InferBackwardStorageType)};
  Properties* properties = new Properties;
  try {
    properties->node = ReadNode(size, keys, values);
  } catch (const std::exception& error) {
    properties->error = error.what();
  }
  for (void*& context : properties->contexts) context = properties;
  list->num_callbacks = properties->node.native ? 10 : 8;
  list->callbacks = callbacks;
  list->contexts = properties->contexts;
  return 1;
}

}  // namespace

// ---- the native operator's calls, which begin on the engine's workers

void RunNative(std::shared_ptr<NativeCall> call) {
  // Waking a thread takes longer than most waits.
  constexpr std::chrono::microseconds kAwake{300};
  Operator* const op = static_cast<Operator*>(call->op);
  bool is_ready = false;
  try {
    const std::vector<Tensor>&in = call->inputs, &out = call->outputs;
    const std::vector<int>& requests = call->requests;
    if (call->is_forward) {
      BeginForward(op, call->is_training, requests[0], in, out[0]);
    } else {
      op->batch_norm.BeginBackward(in[0], in[1],
                                   {ToWriteMode(requests[0]), ToWriteMode(requests[1]),
                                    ToWriteMode(requests[2]), out[0], out[1], out[2]});
    }
    is_ready = op->batch_norm.IsReady(kAwake);
  } catch (const std::exception& error) {
    return call->Complete(error.what());
  }
  const auto finish = [op, call] {
    try {
      op->batch_norm.Finish();
    } catch (const std::exception& error) {
      return call->Complete(error.what());
    }
    call->Complete(nullptr);
  };
  if (is_ready) return finish();
  try {
    RunInSpareThread(finish);
  } catch (const std::system_error&) {  // the wait ends, at the latest after the timeout
    finish();
  }
}

bool TakesBlocks(void* op, int ndim) {
  const Node& node = static_cast<Operator*>(op)->node;
  return !node.masked && node.AxisOf(ndim) == 1;
}

Tensor ViewArray(void* array, bool with_data) {
  Tensor tensor;
  int ndim = 0, dtype = 0;
  const int64_t* shape = nullptr;
  CheckMxnet(Mxnet().NDArrayGetShapeEx64(array, &ndim, &shape));
  tensor.shape.assign(shape, shape + ndim);
  if (with_data) CheckMxnet(Mxnet().NDArrayGetData(array, &tensor.data));
  CheckMxnet(Mxnet().NDArrayGetDType(array, &dtype));
  tensor.dtype = static_cast<DType>(dtype);
  return tensor;
}

bool IsDense(void* array) {
  int type = 0;
  CheckMxnet(Mxnet().NDArrayGetStorageType(array, &type));
  return type == 0;
}

void* NewArray(const Tensor& like) {
  constexpr int kCpu = 1, kDelayed = 1;
  const int ndim = static_cast<int>(like.shape.size()), dtype = static_cast<int>(like.dtype);
  NDArrayHandle array = nullptr;
  CheckMxnet(Mxnet().NDArrayCreateEx64(like.shape.data(), ndim, kCpu, 0, kDelayed, dtype, &array));
  return array;
}

void* CopyHandle(void* array) {
  NDArrayHandle copy = nullptr;
  CheckMxnet(Mxnet().ShallowCopyNDArray(array, &copy));
  return copy;
}

void FreeArray(void* array) { Mxnet().NDArrayFree(array); }

void RegisterOperator() { CheckMxnet(Mxnet().CustomOpRegister("gluon_syncbn", Create)); }

}  // namespace syncbn
