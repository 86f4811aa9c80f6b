// Checks for the native tests. A failed check fails the program, and the first 20 failed checks
// print their lines. Several threads may check at once.
#pragma once
#include <atomic>
#include <functional>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "core/environment.h"
#include "core/error.h"

namespace check {

inline std::atomic<int> failures{0};

// Returns `full` with GLUON_SYNCBN_NATIVE_TESTS=full, which takes minutes, and otherwise `brief`.
// Under sanitizers, which are slow, it returns a tenth of this number.
inline int Rounds(int full, int brief) {
  const int rounds = syncbn::IsSet("GLUON_SYNCBN_NATIVE_TESTS", "full") ? full : brief;
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  return rounds / 10;
#endif
  return rounds;
}

template <typename... Parts>
void Fail(const char* file, int line, const Parts&... parts) {
  constexpr int kMaxShown = 20;
  if (++failures > kMaxShown) return;
  std::cerr << syncbn::Concat(file, ":", line, ": ", parts...) << std::endl;
}

inline int Result() {
  if (failures > 0) std::cerr << failures << " checks failed" << std::endl;
  return failures > 0 ? 1 : 0;
}

inline std::vector<void (*)()> tests;  // the functions that TEST has defined

inline int RunTests() {
  for (void (*const test)() : tests) test();
  return Result();
}

}  // namespace check

#define TEST(Name)                                                                     \
  void Name();                                                                         \
  [[maybe_unused]] const bool Name##_is_listed = (check::tests.push_back(Name), true); \
  void Name()

#define CHECK(condition, ...)                                                          \
  do {                                                                                 \
    if (!(condition)) check::Fail(__FILE__, __LINE__, #condition, " ", ##__VA_ARGS__); \
  } while (false)

#define CHECK_EQ(a, b, ...)                                                                    \
  do {                                                                                         \
    const auto a_ = (a);                                                                       \
    const auto b_ = (b);                                                                       \
    if (!(a_ == b_))                                                                           \
      check::Fail(__FILE__, __LINE__, #a " == " #b ": ", a_, " and ", b_, " ", ##__VA_ARGS__); \
  } while (false)

// NaN also fails.
#define CHECK_NEAR(a, b, tolerance, ...)                                                   \
  do {                                                                                     \
    const auto a_ = (a);                                                                   \
    const auto b_ = (b);                                                                   \
    const auto tolerance_ = (tolerance);                                                   \
    if (!((a_ < b_ ? b_ - a_ : a_ - b_) <= tolerance_))                                    \
      check::Fail(__FILE__, __LINE__, #a " near " #b ": ", a_, " and ", b_, " differ by ", \
                  a_ - b_, ", tolerance ", tolerance_, " ", ##__VA_ARGS__);                \
  } while (false)

constexpr char kNoError[] = "nothing was thrown";

// Returns the text of the error that `function` throws, or kNoError.
inline std::string ErrorOf(const std::function<void()>& function) {
  try {
    function();
  } catch (const syncbn::Error& error) {
    return error.what();
  }
  return kNoError;
}

inline void CheckHas(const std::string& text, const std::string& part,
                     const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  if (text.find(part) == std::string::npos) check::Fail(file, line, "no \"", part, "\" in: ", text);
}

// Calls function(0), ..., function(threads - 1), each on its own thread.
inline void Parallel(int threads, const std::function<void(int)>& function) {
  std::vector<std::thread> running;
  for (int i = 0; i < threads; ++i) running.emplace_back(function, i);
  for (auto& thread : running) thread.join();
}
