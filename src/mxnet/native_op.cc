// See native_op.h.
#include "mxnet/native_op.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "core/environment.h"
#include "mxnet/mxnet_objects.h"

namespace syncbn {
namespace {

using namespace mxnet_objects;

// ---- arrays -------------------------------------------------------------------------------------

constexpr int kNull = 0, kWrite = 1, kAdd = 3;  // values of MXNet's OpReqType

std::atomic<int64_t> blocked_calls{0};
Function cast_storage;

// Returns null if the array is row-major. MXNet's IsDefaultFormat is the same.
const MemoryDesc* LayoutOf(void* array) {
  constexpr int kBlocked = 2;
  const Chunk* chunk = static_cast<Array*>(array)->chunk;
  if (chunk == nullptr || chunk->memory == nullptr) return nullptr;
  const MemoryDesc& desc = chunk->memory->desc;
  bool is_plain = desc.format_kind == kBlocked && desc.inner_nblks == 0;
  for (int i = 0; i + 1 < desc.ndims; ++i) {
    is_plain = is_plain && desc.strides[i] >= desc.strides[i + 1];
  }
  return is_plain ? nullptr : &desc;
}

// Returns the number of channels in a block if `desc` is nChw8c or nChw16c, or the same with
// another number of spatial dimensions, and has this shape. Otherwise returns 0.
int64_t BlockOf(const MemoryDesc& desc, const std::vector<int64_t>& shape) {
  constexpr int kFloat32 = 3;
  const int ndim = static_cast<int>(shape.size());
  if (desc.ndims != ndim || ndim < 3 || desc.data_type != kFloat32 || desc.offset0 != 0 ||
      desc.inner_nblks != 1 || desc.inner_idxs[0] != 1) {
    return 0;
  }
  const int64_t block = desc.inner_blks[0];
  if ((block != 8 && block != 16) || shape[1] % block != 0) return 0;
  int64_t stride = block;
  for (int i = ndim - 1; i >= 0; --i) {
    if (desc.dims[i] != shape[i] || desc.padded_dims[i] != shape[i]) return 0;
    if (desc.strides[i] != stride) return 0;
    stride *= i == 1 ? shape[1] / block : shape[i];
  }
  return block;
}

struct Call : NativeCall {
  Call(const Shared<OpState>& state, const OpContext& context)
      : param(*state.object->state), on_complete(context.on_complete) {
    op = param.info.object->contexts[1];
    is_training = context.is_train;
  }
  ~Call() override {
    for (void* copy : copies) FreeArray(copy);
  }

  void Complete(const char* error) override {
    if (error != nullptr) return Fail(error);
    try {
      for (const auto& [dense, array] : sparse_outputs) Cast(dense, array);
    } catch (const std::exception& thrown) {
      return Fail(thrown.what());
    }
    on_complete.callback(on_complete.engine, on_complete.parameter, nullptr);
  }

  void Fail(const char* error) {
    // The engine appends the error to a vector without a lock (threaded_engine.cc, OnComplete).
    static std::mutex& mutex = *new std::mutex;
    std::lock_guard<std::mutex> lock(mutex);
    const dmlc::Error thrown(error);
    on_complete.callback(on_complete.engine, on_complete.parameter, &thrown);
  }

  // Returns the array number `index` of `count` arrays.
  void* At(const Arrays& arrays, size_t index, size_t count) {
    const size_t size = static_cast<size_t>(arrays.end - arrays.begin);
    array_size = count == 0 ? 0 : size / count;
    if (array_size == 0 || size % count != 0 || array_size > sizeof(RawArray)) {
      throw std::runtime_error("expected other arguments of the operator from MXNet");
    }
    return arrays.begin + index * array_size;
  }

  // Copies an array to one of another storage type, as the operator cast_storage does.
  void Cast(void* from, void* to) const {
    const auto one = [&](void* array) {
      char* const begin = static_cast<char*>(array);
      return Arrays{begin, begin + array_size, begin + array_size};
    };
    const std::vector<int> write{kWrite};
    using Invoker = void (*)(const void*, const void* attributes, const void* context,
                             const Arrays&, const std::vector<int>&, const Arrays&);
    // MXNet reads neither the attributes nor, on a CPU, the context.
    const char nothing[512] = {};
    reinterpret_cast<Invoker>(cast_storage.invoker)(cast_storage.data, nothing, nothing, one(from),
                                                    write, one(to));
  }

  // Returns a dense array with the shape of another one.
  void* NewDense(void* array) {
    copies.push_back(NewArray(ViewArray(array, false)));
    return copies.back();
  }

  // Returns an array that is read. If it has neither blocks nor row-major order, returns a copy.
  Tensor Read(void* array) {
    if (!IsDense(array)) {
      void* const dense = NewDense(array);
      Cast(array, dense);
      return ViewArray(dense, true);
    }
    Tensor tensor = ViewArray(array, false);
    const MemoryDesc* desc = LayoutOf(array);
    if (desc == nullptr) return ViewArray(array, true);
    const int64_t block = BlockOf(*desc, tensor.shape);
    if (block > 0 && TakesBlocks(op, desc->ndims)) {
      tensor.data = static_cast<Array*>(array)->chunk->data;
      tensor.block = block;
      return tensor;
    }
    RawArray* const copy = new RawArray(api.Reorder2Default(array));
    copies.push_back(copy);
    return ViewArray(copy, true);
  }

  // Gives an array a layout. Returns false for a view, which can only be row-major.
  static bool Create(void* array, const MemoryDesc& desc) {
    const bool is_created = api.CreateMKLDNNData(array, desc) != nullptr;
    // The thread's stream would own the description until its next convolution, but this may be the
    // program's thread: the engine runs an asynchronous operator that is ready where it is queued.
    api.Submit(api.Stream(), true);
    return is_created;
  }

  // Returns an array that is written, or added to. It gets the layout of `like` if that has blocks.
  Tensor Write(void* array, int request, void* like) {
    Tensor tensor = ViewArray(array, false);
    if (request == kNull) return tensor;
    if (!IsDense(array)) {
      if (request == kAdd) throw std::runtime_error("expected no grad_req 'add' of a sparse array");
      void* const dense = NewDense(array);
      copies.push_back(CopyHandle(array));  // MXNet may delete `array` before the call ends
      sparse_outputs.emplace_back(dense, copies.back());
      return ViewArray(dense, true);
    }
    const MemoryDesc* desc = LayoutOf(request == kAdd ? array : like);
    const int64_t block = desc == nullptr ? 0 : BlockOf(*desc, tensor.shape);
    if (block > 0 && TakesBlocks(op, desc->ndims) && (request == kAdd || Create(array, *desc))) {
      tensor.data = static_cast<Array*>(array)->chunk->data;
      tensor.block = block;
      ++blocked_calls;
      return tensor;
    }
    if (LayoutOf(array) != nullptr) api.ReorderChunk(static_cast<Array*>(array)->chunk);
    return ViewArray(array, true);
  }

  const CustomParam& param;
  const OnComplete on_complete;
  size_t array_size = 0;
  std::vector<void*> copies;
  std::vector<std::pair<void*, void*>> sparse_outputs;  // {dense copy, output}
};

// ---- the operator -------------------------------------------------------------------------------

// Makes a call with make(Call*), and runs it.
template <typename Make>
void Run(const Shared<OpState>& state, const OpContext& context, const Make& make) {
  auto call = std::make_shared<Call>(state, context);
  try {
    make(call.get());
  } catch (const std::exception& error) {
    return call->Complete(error.what());
  }
  RunNative(std::move(call));
}

void Forward(const Shared<OpState>& state, const OpContext& context, const Arrays& inputs,
             const std::vector<int>& requests, const Arrays& outputs) {
  Run(state, context, [&](Call* call) {
    const size_t count = call->param.num_args + call->param.num_auxs;
    call->is_forward = true;
    call->requests = requests;
    for (size_t i = 0; i < count; ++i)
      call->inputs.push_back(call->Read(call->At(inputs, i, count)));
    call->outputs.push_back(call->Write(outputs.begin, requests[0], inputs.begin));
  });
}

void Backward(const Shared<OpState>& state, const OpContext& context, const Arrays& inputs,
              const std::vector<int>& requests, const Arrays& outputs) {
  Run(state, context, [&](Call* call) {
    const CustomParam& param = call->param;
    const size_t count = param.bwd_idx.size() + param.num_auxs;
    void* const saved = call->At(inputs, 1, count);
    call->requests = requests;
    call->inputs = {call->Read(inputs.begin), call->Read(saved)};
    for (size_t i = 0; i < param.num_args; ++i) {
      call->outputs.push_back(
          call->Write(call->At(outputs, i, param.num_args), requests[i], saved));
    }
  });
}

Function custom_gradient;
const Op *backward_custom, *backward_native;

// Returns Custom's gradient, with our operator in place of _backward_Custom.
std::vector<NodeEntry> Gradient(const Shared<Node>& node, const std::vector<NodeEntry>& gradients) {
  using Invoker =
      std::vector<NodeEntry> (*)(const void*, const Shared<Node>&, const std::vector<NodeEntry>&);
  const auto invoke = reinterpret_cast<Invoker>(custom_gradient.invoker);
  std::vector<NodeEntry> result = invoke(custom_gradient.data, node, gradients);
  Node* const backward = result.at(0).node.object;
  if (backward->op == backward_custom) backward->op = backward_native;
  return result;
}

// ---- registration -------------------------------------------------------------------------------

template <typename Value>
std::vector<std::pair<Value, int>>& ValuesOf(const char* attribute) {
  const Any* any = api.GetAttrMap(attribute);
  if (any == nullptr || any->type == nullptr) throw std::runtime_error(attribute);
  auto* const map = static_cast<OpMap<Value>*>(any->object);
  if (map->attribute != attribute) throw std::runtime_error(attribute);
  return map->values;
}

template <typename Value>
void Set(const char* attribute, const Op* op, const Value& value) {
  constexpr int kPriority = 10;  // nnvm's default
  auto& values = ValuesOf<Value>(attribute);
  if (values.size() <= op->index) values.resize(op->index + 1, {Value(), 0});
  values[op->index] = {value, kPriority};
}

// Registers a copy of an operator. Returns the original and the copy.
std::pair<const Op*, Op*> Copy(const char* from_name, const char* to_name) {
  void* const registry = api.Registry();
  const Op* const from = api.RegisterOrGet(registry, from_name);
  if (from->name != from_name) throw std::runtime_error("Op::name");
  Op* const to = api.RegisterOrGet(registry, to_name);
  to->get_num_inputs = from->get_num_inputs;
  to->get_num_outputs = from->get_num_outputs;
  to->attr_parser = from->attr_parser;
  for (const char* attribute :
       {"FInferShape", "FInferType", "FListInputNames", "FListOutputNames", "FMutateInputs",
        "FExecType", "FCreateOpState", "FInferStorageType", "FStatefulComputeEx<gpu>"}) {
    const auto& values = ValuesOf<Function>(attribute);
    if (values.size() <= from->index || values[from->index].second == 0) continue;
    const Function copy = values[from->index].first;
    Set(attribute, to, copy);
  }
  Set("TIsMKLDNN", to, true);
  return {from, to};
}

void Register() {
  const auto [custom, forward] = Copy("Custom", "_gluon_syncbn");
  custom_gradient = ValuesOf<Function>("FGradient").at(custom->index).first;
  std::tie(backward_custom, backward_native) = Copy("_backward_Custom", "_backward_gluon_syncbn");
  Set("TIsBackward", backward_native, true);
  Set("TIsLayerOpBackward", backward_native, true);
  Set("FStatefulComputeEx<cpu>", backward_native, Function(Backward));
  Set("FStatefulComputeEx<cpu>", forward, Function(Forward));
  Set("FGradient", forward, Function(Gradient));
  const Op* const cast = api.RegisterOrGet(api.Registry(), "cast_storage");
  cast_storage = ValuesOf<Function>("FComputeEx<cpu>").at(cast->index).first;
}

}  // namespace

const char* RegisterNativeOperator(const char* libmxnet_path) {
  static std::string reason;
  if (IsSet("GLUON_SYNCBN_NATIVE", "0")) return "GLUON_SYNCBN_NATIVE=0 is set";
  // That engine ignores the error of an operator that completes later.
  if (IsSet("MXNET_ENGINE_TYPE", "NaiveEngine")) return "MXNET_ENGINE_TYPE=NaiveEngine is set";
  void* const library = dlopen(libmxnet_path, RTLD_LAZY | RTLD_NOLOAD);
  const auto get_version = reinterpret_cast<int (*)(int*)>(dlsym(library, "MXGetVersion"));
  int version = 0;
  if (get_version == nullptr || get_version(&version) != 0 || version < 10700 || version > 10901) {
    return "MXNet must be one of 1.7.0 to 1.9.1";
  }
  for (const auto& [symbol, function] : kSymbols) {
    void* const found = dlsym(library, symbol);
    if (found == nullptr) {
      reason = std::string("this build of MXNet lacks ") + symbol;
      return reason.c_str();
    }
    *static_cast<void**>(function) = found;
  }
  try {
    Register();
  } catch (const std::exception& error) {
    reason = std::string("MXNet's registry of operators has another layout: ") + error.what();
    return reason.c_str();
  }
  return "";
}

int64_t CountBlockedCalls() { return blocked_calls; }

}  // namespace syncbn
