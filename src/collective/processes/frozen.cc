// See frozen.h.
#include "collective/processes/frozen.h"

#include <mutex>
#include <set>

#include "core/error.h"

namespace syncbn {
namespace {

std::mutex frozen_mutex;
std::set<std::string>& Frozen() {
  static auto* frozen = new std::set<std::string>;  // communicators outlive static destructors
  return *frozen;
}

}  // namespace

void NoteFrozen(const std::string& layer, bool is_frozen) {
  std::lock_guard<std::mutex> lock(frozen_mutex);
  if (is_frozen) {
    Frozen().insert(layer);
  } else {
    Frozen().erase(layer);
  }
}

std::string FrozenClause(const std::string& text) {
  std::lock_guard<std::mutex> lock(frozen_mutex);
  for (const std::string& layer : Frozen()) {
    const std::string name = Concat('\'', layer, '\'');
    if (text.find(name) == std::string::npos) continue;
    return Concat("has frozen ", name, ": call gluon_syncbn.freeze_statistics on all ranks or on "
                  "none");
  }
  return "";
}

}  // namespace syncbn
