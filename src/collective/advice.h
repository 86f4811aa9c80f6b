// The parts of error messages that the collective must not know: names of the program's functions,
// and likely mistakes of its users.
// Who uses it: report.cc and others that word an error; op/advice.cc hands the parts in.
#pragma once
#include <string>

#include "collective/calls.h"

namespace syncbn {

struct Advice {
  const char* title = "group";     // of a layer, in front of its name
  const char* size = "size";       // the argument that gives the number of devices
  const char* recover = "Reset";   // names of functions
  const char* init = "Open";
  const char* shutdown = "Leave";
  const char* join = "Join";
  // Hints for failed rendezvous, each the rest of a sentence or more.
  std::string (*likely_cause)(const Absence&) =
      [](const Absence&) -> std::string { return "not known"; };
  const char* too_many_devices = "";
  const char* sits_out = "";
  const char* twice = "";
};

inline Advice& TheAdvice() {
  static Advice* const advice = new Advice;  // operators may outlive static destructors
  return *advice;
}

// Hands the parts in; made while the library is loaded.
struct RegisterAdvice {
  explicit RegisterAdvice(const Advice& advice) { TheAdvice() = advice; }
};

}  // namespace syncbn
