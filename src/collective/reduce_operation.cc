// The reduce operations that need no knowledge of a layer, and the table of all of them.
#include "collective/reduce_operation.h"

#include <cstdint>
#include <map>

#include "core/error.h"

namespace syncbn {
namespace {

std::map<std::string, ReduceOperation>& Table() {
  static auto* table = new std::map<std::string, ReduceOperation>;
  return *table;
}

void Concatenate(const Bytes& higher, Bytes* lower) {
  lower->insert(lower->end(), higher.begin(), higher.end());
}

template <typename T>
void Add(const Bytes& higher, Bytes* lower) {
  if (higher.size() != lower->size()) {
    throw Error(Concat("a sum of ", lower->size(), " bytes cannot take one of ", higher.size()));
  }
  if (lower->size() % sizeof(T) != 0) {
    throw Error(Concat("a sum of ", lower->size(), " bytes, expected a multiple of ", sizeof(T)));
  }
  // operator new aligns both for every arithmetic type.
  const T* from = reinterpret_cast<const T*>(higher.data());
  T* to = reinterpret_cast<T*>(lower->data());
  for (size_t i = 0; i < lower->size() / sizeof(T); ++i) to[i] += from[i];
}

const RegisterReduceOperation concatenate("concat", Concatenate);
const RegisterReduceOperation add_float32("sum_float32", Add<float>);
const RegisterReduceOperation add_float64("sum_float64", Add<double>);
// The same bits as int64_t, also where it wraps.
const RegisterReduceOperation add_int64("sum_int64", Add<uint64_t>);

}  // namespace

RegisterReduceOperation::RegisterReduceOperation(const char* name, ReduceOperation operation) {
  Table()[name] = operation;
}

ReduceOperation FindReduceOperation(const std::string& name) {
  const auto entry = Table().find(name);
  if (entry == Table().end()) throw Error(Concat("there is no reduce operation \"", name, "\""));
  return entry->second;
}

}  // namespace syncbn
