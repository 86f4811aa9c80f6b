// A phase of a layer on a device, as the framework's profiler shows it while it runs.
#pragma once
#include <string>
#include <string_view>

#include "core/device.h"
#include "core/error.h"

namespace syncbn {

struct Profiler {
  bool (*is_running)();
  // Begins a span of the calling thread, which ends it. Null if there is none to end.
  void* (*begin)(const std::string& device, const std::string& name);
  void (*end)(void* span);
};

// Null for none. Set before the first operator is made.
inline const Profiler* profiler = nullptr;

class Span {
 public:
  Span(const char* what, std::string_view phase, const std::string& layer,
       const Device& device) {
    if (profiler == nullptr || !profiler->is_running()) return;
    const std::string name = device.Name();
    span_ = profiler->begin(name, Concat(what, ", ", phase, " of ", layer, " on ", name));
  }
  ~Span() {
    if (span_ != nullptr) profiler->end(span_);
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  void* span_ = nullptr;
};

}  // namespace syncbn
