// Reads the text form of devices, the inverse of Device::Name.
#include "collective/device.h"

#include <cstdlib>
#include <sstream>

#include "core/error.h"

namespace syncbn {

Device ParseDevice(const std::string& name) {
  const size_t open = name.find('(');
  if (open == 0 || open == std::string::npos || name.back() != ')') {
    throw Error(Concat("a device is written like \"cpu(0)\", but got \"", name, "\""));
  }
  return {name.substr(0, open), std::atoi(name.c_str() + open + 1)};
}

std::set<Device> ParseDevices(const std::string& names) {
  std::set<Device> devices;
  std::istringstream stream(names);
  for (std::string name; stream >> name;) devices.insert(ParseDevice(name));
  return devices;
}

}  // namespace syncbn
