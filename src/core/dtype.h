// Element types of the data that the layer normalizes.
#pragma once
#include <cstddef>
#include <string>

namespace syncbn {

// The values are MXNet's own (mshadow type flags).
enum class DType : int { kFloat32 = 0, kFloat64 = 1, kFloat16 = 2 };

inline bool IsSupported(int flag) { return flag == 0 || flag == 1 || flag == 2; }

inline size_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return 4;
    case DType::kFloat64: return 8;
    case DType::kFloat16: return 2;
  }
  return 0;
}

// `flag` may also be a dtype of MXNet that the layer does not support.
inline std::string NameOfFlag(int flag) {
  static const char* const names[] = {"float32", "float64", "float16", "uint8", "int32",
                                      "int8",    "int64",   "bool",    "int16", "uint16",
                                      "uint32",  "uint64",  "bfloat16"};
  const int known = sizeof(names) / sizeof(*names);
  return flag >= 0 && flag < known ? names[flag] : "MXNet's dtype number " + std::to_string(flag);
}

inline std::string Name(DType dtype) { return NameOfFlag(static_cast<int>(dtype)); }

}  // namespace syncbn
