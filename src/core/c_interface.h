// A macro that defines C functions for Python and lists their signatures. Python compares these
// with its ctypes declarations. CatchAll converts C++ exceptions to texts.
#pragma once
#include <exception>
#include <string>
#include <type_traits>

// SYNCBN_EXPORT(int, name, double x) { ... } defines a function and lists its signature.
#define SYNCBN_EXPORT(result, name, ...)                                      \
  extern "C" __attribute__((visibility("default"))) result name(__VA_ARGS__); \
  static const bool name##_is_described = syncbn::Describe(#name, name);      \
  result name(__VA_ARGS__)

namespace syncbn {

// A line for each function: its name, and the kind and size of its result and arguments.
inline std::string& Interface() {
  static std::string lines;
  return lines;
}

template <typename Type>
std::string TypeCode() {
  if constexpr (std::is_void_v<Type>) {
    return " void";
  } else {
    const char* const kind = std::is_pointer_v<Type>          ? " pointer"
                             : std::is_class_v<Type>          ? " struct"
                             : std::is_floating_point_v<Type> ? " float"
                                                              : " int";
    return kind + std::to_string(sizeof(Type));
  }
}

template <typename Result, typename... Arguments>
bool Describe(const char* name, Result (*)(Arguments...)) {
  Interface() += name + TypeCode<Result>() + (TypeCode<Arguments>() + ... + "\n");
  return true;
}

// The error of the latest C function that failed on this thread.
inline thread_local std::string last_error;

// Calls body(). Returns 0, or -1 after an exception, whose text is then in last_error. Every
// exception must be a std::exception.
template <typename Body>
int CatchAll(const Body& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return -1;
  }
}

// Returns body(), or `failed` after an exception.
template <typename Value, typename Body>
Value CatchAll(Value failed, const Body& body) {
  CatchAll([&] { failed = body(); });
  return failed;
}

}  // namespace syncbn
