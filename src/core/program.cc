// The locator is Python's, see native/program.py.
#include "core/program.h"

#include <atomic>

namespace syncbn {
namespace {

std::atomic<void (*)()> locator{nullptr};
thread_local std::string told;

}  // namespace

std::string WhereProgramStands() {
  told.clear();
  if (const auto locate = locator.load()) locate();
  return told;
}

void SetLocator(void (*locate)()) { locator = locate; }

void TellWhere(const char* text) { told = text; }

}  // namespace syncbn
