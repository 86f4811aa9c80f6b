// Objects and functions of the C++ code of MXNet 1.7.0 to 1.9.1, as native_op.cc believes them to
// be, because it does not use MXNet's headers. This is all that it believes.
//
// Functions of MXNet get and are called with references and pointers only, because GCC 4.8, which
// built MXNet's wheels, passes some classes by value in another way.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace dmlc {
// As in mxnet_api.h, which this file may not include.
struct __attribute__((visibility("default"))) Error : public std::runtime_error {
  explicit Error(const std::string& text) : std::runtime_error(text) {}
};
}  // namespace dmlc

namespace syncbn::mxnet_objects {

// ---- objects ------------------------------------------------------------------------------------
//
// They have these members first, in this order. The comments name their headers.

// std::function of any signature (libstdc++, bits/std_function.h).
struct Function {
  using Manager = bool (*)(void* to, const void* from, int operation);
  static constexpr int kClone = 2, kDestroy = 3;

  Function() = default;
  Function(const Function& other) {
    if (other.manager == nullptr) return;
    other.manager(data, other.data, kClone);
    manager = other.manager;
    invoker = other.invoker;
  }
  template <typename Plain>
  explicit Function(Plain* plain) {
    static_assert(sizeof(Function) == sizeof(std::function<Plain>));
    new (this) std::function<Plain>(plain);
  }
  Function& operator=(const Function& other) {
    this->~Function();
    return *new (this) Function(other);
  }
  ~Function() {
    if (manager != nullptr) manager(data, data, kDestroy);
  }

  uintptr_t data[2] = {};
  Manager manager = nullptr;
  void* invoker = nullptr;
};

struct Op {  // nnvm/op.h
  std::string name, description;
  std::vector<char> arguments;  // another type, never read
  uint32_t num_inputs, num_outputs, support_level;
  Function get_num_outputs, get_num_inputs, attr_parser;
  uint32_t index;
};

template <typename Value>
struct OpMap {  // nnvm/op.h
  std::string attribute;
  std::vector<std::pair<Value, int>> values;  // a priority of 0 means there is no value
};

struct Any {  // dmlc/any.h
  const void* type;
  void* object;
};

template <typename T>
struct Shared {  // std::shared_ptr; OpStatePtr (mxnet/op_attr_types.h) has one
  T* object;
  void* count;
};

struct Node {  // nnvm/node.h
  const Op* op;
};

struct NodeEntry {  // nnvm/node.h
  Shared<Node> node;
  uint32_t index, version;
};

struct CallbackList {  // MXCallbackList in mxnet/c_api.h
  int size;
  int (**callbacks)();
  void** contexts;
};

struct CustomParam {  // src/operator/custom/custom.cc
  std::string op_type;
  size_t num_args, num_outs, num_auxs;
  std::vector<int> bwd_idx;
  Shared<CallbackList> info;
};

struct OpState {  // OpStatePtr::OpState in mxnet/op_attr_types.h
  void* var;
  CustomParam* state;
};

struct OnComplete {  // engine::CallbackOnComplete in mxnet/engine.h
  void (*callback)(void* engine, void* parameter, const dmlc::Error* error);
  void *engine, *parameter;
};

struct OpContext {  // mxnet/op_attr_types.h, RunContext in mxnet/base.h
  bool need_grad, is_train;
  int device[2];
  void *stream, *aux_stream;
  bool is_bulk;
  OnComplete on_complete;
};

struct MemoryDesc {  // dnnl_memory_desc_t in dnnl_types.h
  int ndims;
  int64_t dims[12];
  int data_type;
  int64_t padded_dims[12], padded_offsets[12];
  int64_t offset0;
  int format_kind;
  int64_t strides[12];
  int inner_nblks;
  int64_t inner_blks[12], inner_idxs[12];
};

struct Memory {  // MKLDNNMemory in src/operator/nn/mkldnn/mkldnn_base-inl.h
  Shared<void> memory;
  MemoryDesc desc;
};

struct Chunk {  // NDArray::Chunk in mxnet/ndarray.h, Storage::Handle in mxnet/storage.h
  void* data;
  size_t size;
  int device[2];
  int shared_pid, shared_id;
  std::vector<char> aux_handles;  // another type, never read
  Memory* memory;                 // null if the array is row-major
};

struct Array {  // NDArray in mxnet/ndarray.h, whose size follows from the size of a vector
  Chunk* chunk;
};

struct Arrays {  // std::vector<NDArray>
  char *begin, *end, *capacity;
};

// Memory for an NDArray, which FreeArray deletes. The destructor, which never runs, makes compilers
// return the object as they return an NDArray.
struct RawArray {
  alignas(16) char bytes[1024];
  ~RawArray() {}
};

// ---- functions of libmxnet.so -------------------------------------------------------------------

static struct {
  Any* (*GetAttrMap)(const std::string& attribute);
  void* (*Registry)();
  Op* (*RegisterOrGet)(void* registry, const std::string& name);
  // Gives an array that the operator writes a layout of oneDNN. Returns null for a view.
  void* (*CreateMKLDNNData)(void* array, const MemoryDesc& desc);
  RawArray (*Reorder2Default)(const void* array);  // returns a row-major copy
  void (*ReorderChunk)(Chunk* chunk);              // makes an array row-major in place
  void* (*Stream)();                               // the thread's MKLDNNStream
  void (*Submit)(void* stream, bool cleanup);
} api;

static const std::pair<const char*, void*> kSymbols[] = {
    {"_ZN4nnvm2Op10GetAttrMapERKSs", &api.GetAttrMap},
    {"_ZN4dmlc8RegistryIN4nnvm2OpEE3GetEv", &api.Registry},
    {"_ZN4dmlc8RegistryIN4nnvm2OpEE19__REGISTER_OR_GET__ERKSs", &api.RegisterOrGet},
    {"_ZN5mxnet7NDArray16CreateMKLDNNDataERKN4dnnl6memory4descE", &api.CreateMKLDNNData},
    {"_ZNK5mxnet7NDArray15Reorder2DefaultEv", &api.Reorder2Default},
    {"_ZN5mxnet7NDArray5Chunk15Reorder2DefaultEv", &api.ReorderChunk},
    {"_ZN5mxnet12MKLDNNStream3GetEv", &api.Stream},
    {"_ZN5mxnet12MKLDNNStream6SubmitEb", &api.Submit}};

}  // namespace syncbn::mxnet_objects
