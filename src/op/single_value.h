// The first layer that trained on one value per channel over all devices: its output is beta.
#pragma once
#include <atomic>
#include <mutex>
#include <string>

namespace syncbn {

// Its name; null before, and once it was taken. Never deleted.
inline std::atomic<const std::string*> single_value{nullptr};

inline void NoteSingleValue(const std::string& layer) {
  static std::once_flag once;
  std::call_once(once, [&] { single_value = new std::string(layer); });
}

}  // namespace syncbn
