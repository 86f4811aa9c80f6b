// Threads for work that blocks.
#pragma once
#include <functional>

namespace syncbn {

// Runs `work`, which must not throw, in a thread that no other work uses meanwhile. Threads are
// reused, and exist until the process ends. Throws std::system_error if there can be no more
// threads.
void RunInSpareThread(std::function<void()> work);

}  // namespace syncbn
