// The name of a device. Its order is that of every reduction, so a result never depends on who
// arrived first.
// Who uses it: collective and op. It must not know how a device computes.
#pragma once
#include <set>
#include <string>
#include <tuple>

namespace syncbn {

struct Device {
  std::string type;  // "cpu" or "gpu"
  int id = 0;

  std::string Name() const { return type + "(" + std::to_string(id) + ")"; }
};

inline bool operator<(const Device& a, const Device& b) {
  return std::tie(a.type, a.id) < std::tie(b.type, b.id);
}

// Reads "cpu(0)"; throws Error on anything else.
Device ParseDevice(const std::string& name);
// Reads "cpu(0) cpu(1)".
std::set<Device> ParseDevices(const std::string& names);
// "cpu(0), cpu(1)"
std::string Names(const std::set<Device>& devices);

}  // namespace syncbn
