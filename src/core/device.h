// A device and its name.
#pragma once
#include <cstdlib>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "core/error.h"

namespace syncbn {

struct Device {
  std::string type;  // "cpu" or "gpu"
  int id = 0;

  std::string Name() const { return type + "(" + std::to_string(id) + ")"; }
};

// Reductions merge the contributions of devices in this order.
inline bool operator<(const Device& a, const Device& b) {
  return std::tie(a.type, a.id) < std::tie(b.type, b.id);
}

// Parses "cpu(0)".
inline Device ParseDevice(const std::string& name) {
  const size_t bracket = name.find('(');
  return {name.substr(0, bracket), std::atoi(name.c_str() + bracket + 1)};
}

// Parses "cpu(0) cpu(1)".
inline std::set<Device> ParseDevices(const std::string& names) {
  std::set<Device> devices;
  std::istringstream stream(names);
  for (std::string name; stream >> name;) devices.insert(ParseDevice(name));
  return devices;
}

// Returns "cpu(0), cpu(1)".
inline std::string Names(const std::set<Device>& devices) {
  std::vector<std::string> names;
  for (const Device& device : devices) names.push_back(device.Name());
  return Join(names);
}

}  // namespace syncbn
