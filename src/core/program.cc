// Finds the lines that the Python program is executing. The locator (see SetLocator) needs Python's
// GIL, but a thread that forks may hold the GIL and wait for the caller of WhereProgramStands. So
// the locator has a separate thread, and WhereProgramStands returns when a fork begins.
#include "core/program.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <system_error>
#include <thread>

namespace syncbn {
namespace {

std::atomic<void (*)()> locator{nullptr};
std::atomic<int> forks{0};
thread_local std::string reported;

struct Answer {
  std::string text;
  std::atomic<bool> is_ready{false};
};

}  // namespace

std::string WhereProgramStands() {
  const auto locate = locator.load();
  if (locate == nullptr) return "";
  const auto answer = std::make_shared<Answer>();
  try {
    std::thread([answer, locate] {
      locate();
      answer->text = reported;
      answer->is_ready = true;
    }).detach();
  } catch (const std::system_error&) {
    return "";  // the system has no more threads
  }
  while (!answer->is_ready) {
    if (forks > 0) return "";
    // There is no mutex, because a fork could copy it while it is locked.
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return answer->text;
}

void BeginFork() { ++forks; }

void EndFork() { --forks; }

void SetLocator(void (*locate)()) { locator = locate; }

void ReportWhere(const char* text) { reported = text; }

}  // namespace syncbn
