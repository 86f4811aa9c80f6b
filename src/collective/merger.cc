// The mergers that need no knowledge of the layer, and the table of all of them.
#include "collective/merger.h"

#include <cstdint>
#include <cstring>
#include <map>

#include "core/error.h"

namespace syncbn {
namespace {

std::map<std::string, Merger>& Table() {
  static auto* table = new std::map<std::string, Merger>;
  return *table;
}

void Concatenate(const Bytes& higher, Bytes* lower) {
  lower->insert(lower->end(), higher.begin(), higher.end());
}

template <typename T>
void Add(const Bytes& higher, Bytes* lower) {
  if (higher.size() != lower->size()) {
    throw Error(Concat("a sum of ", lower->size(), " bytes meets one of ", higher.size()));
  }
  if (lower->size() % sizeof(T) != 0) {
    throw Error(Concat("a sum of ", lower->size(), " bytes, expected a multiple of ", sizeof(T)));
  }
  // operator new aligns both for every arithmetic type.
  const T* from = reinterpret_cast<const T*>(higher.data());
  T* to = reinterpret_cast<T*>(lower->data());
  for (size_t i = 0; i < lower->size() / sizeof(T); ++i) to[i] += from[i];
}

const RegisterMerger concatenate("concat", Concatenate);
const RegisterMerger add_float32("sum_float32", Add<float>);
const RegisterMerger add_float64("sum_float64", Add<double>);
const RegisterMerger add_int64("sum_int64", Add<uint64_t>);  // the same bits, also where it wraps

}  // namespace

RegisterMerger::RegisterMerger(const char* name, Merger merger) { Table()[name] = merger; }

Merger FindMerger(const std::string& name) {
  const auto entry = Table().find(name);
  if (entry == Table().end()) throw Error(Concat("there is no merger \"", name, "\""));
  return entry->second;
}

}  // namespace syncbn
