// The name of a device. Its order is that of every reduction, so a result never depends on who
// arrived first. It must not know how a device computes.
#pragma once
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "core/error.h"
#include "core/parse.h"

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
inline Device ParseDevice(const std::string& name) {
  constexpr char kLetters[] = "abcdefghijklmnopqrstuvwxyz_";
  const size_t open = name.find('(');
  Device device{name.substr(0, open), 0};
  const bool word = open != 0 && device.type.find_first_not_of(kLetters) == std::string::npos;
  if (!word || open == std::string::npos || name.back() != ')' ||
      !ParseNumber(name.substr(open + 1, name.size() - open - 2), &device.id) || device.id < 0) {
    throw Error(Concat("a device is written like \"cpu(0)\", but got \"", name, "\""));
  }
  return device;
}

// Reads "cpu(0) cpu(1)".
inline std::set<Device> ParseDevices(const std::string& names) {
  std::set<Device> devices;
  std::istringstream stream(names);
  for (std::string name; stream >> name;) devices.insert(ParseDevice(name));
  return devices;
}

// "cpu(0), cpu(1)"
inline std::string Names(const std::set<Device>& devices) {
  std::vector<std::string> names;
  for (const Device& device : devices) names.push_back(device.Name());
  return Join(names);
}

}  // namespace syncbn
