// Reads the text form of devices, the inverse of Device::Name, and writes that of several.
#include "collective/devices/device.h"

#include <sstream>

#include "core/error.h"
#include "core/parse.h"

namespace syncbn {

Device ParseDevice(const std::string& name) {
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

std::set<Device> ParseDevices(const std::string& names) {
  std::set<Device> devices;
  std::istringstream stream(names);
  for (std::string name; stream >> name;) devices.insert(ParseDevice(name));
  return devices;
}

std::string Names(const std::set<Device>& devices) {
  std::vector<std::string> names;
  for (const Device& device : devices) names.push_back(device.Name());
  return Join(names);
}

}  // namespace syncbn
