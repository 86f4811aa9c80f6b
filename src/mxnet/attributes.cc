// Strings to options. Python has checked them; a symbol from a file is checked here.
#include "mxnet/attributes.h"

#include <limits>
#include <sstream>

#include "core/error.h"
#include "core/parse.h"

namespace syncbn {
namespace {

[[noreturn]] void Fail(const std::string& key, const std::string& value, const char* expected) {
  throw Error(Concat("SyncBatchNorm attribute ", key, "=\"", value, "\": expected ", expected));
}

template <typename T>
T Number(const std::string& key, const std::string& value, T least, T most, const char* expected) {
  T number = 0;
  if (!ParseNumber(value, &number) || number < least || number > most) Fail(key, value, expected);
  return number;
}

constexpr int kMostInt = std::numeric_limits<int>::max();
constexpr double kMost = std::numeric_limits<double>::max();

std::set<Device> DevicesOf(const std::string& key, const std::string& value,
                           const std::string& part) {
  try {
    const std::set<Device> devices = ParseDevices(part);
    if (!devices.empty()) return devices;
  } catch (const Error&) {
  }
  Fail(key, value, "devices like \"cpu(0) cpu(1)\"");
}

std::vector<int> RanksOf(const std::string& key, const std::string& value) {
  const char expected[] = "\"self\" or ascending ranks";
  std::vector<int> ranks;
  std::istringstream numbers(value);
  for (std::string number; numbers >> number;) {
    int rank = 0;
    const int least = ranks.empty() ? 0 : ranks.back() + 1;
    if (!ParseNumber(number, &rank) || rank < least) Fail(key, value, expected);
    ranks.push_back(rank);
  }
  return ranks;
}

bool Flag(const std::string& key, const std::string& value) {
  if (value == "True" || value == "1") return true;
  if (value == "False" || value == "0") return false;
  Fail(key, value, "True or False");
}

// Backward reads y where x_hat can be reconstructed from it: a ReLU has no inverse, and an ELU
// loses x in the digits of y near -slope.
void SetFunction(const std::string& key, const std::string& value, Options* options) {
  options->from_output = value == "identity" || value == "leaky_relu";
  if (value == "relu" || value == "leaky_relu") {
    options->activation.function = Function::kLeakyRelu;
  } else if (value == "elu") {
    options->activation.function = Function::kElu;
  } else if (value != "None" && value != "identity") {
    Fail(key, value, "None, identity, relu, leaky_relu or elu");
  }
}

void SetNonFinite(const std::string& key, const std::string& value, Options* options) {
  if (value == "propagate") {
    options->nonfinite = NonFinite::kPropagate;
  } else if (value == "skip") {
    options->nonfinite = NonFinite::kSkip;
  } else if (value == "raise") {
    options->nonfinite = NonFinite::kRaise;
  } else {
    Fail(key, value, "propagate, skip or raise");
  }
}

void Set(const std::string& key, const std::string& value, Attributes* out) {
  Options& options = out->options;
  if (key == "group") {
    out->group = value;
  } else if (key == "layer") {
    out->layer = value;
  } else if (key == "guard") {
    out->guard = value;
  } else if (key == "chained") {
    out->chained = Flag(key, value);
  } else if (key == "masked") {
    options.masked = Flag(key, value);
  } else if (key == "contexts") {
    options.contexts = value.empty() ? std::set<Device>() : DevicesOf(key, value, value);
  } else if (key == "device_groups") {
    std::istringstream parts(value);
    for (std::string part; std::getline(parts, part, ';');) {
      out->device_groups.push_back(DevicesOf(key, value, part));
    }
  } else if (key == "shared_name") {
    options.shared_name = value;
  } else if (key == "ranks") {
    options.across_processes = value != "self";
    if (options.across_processes) options.ranks = RanksOf(key, value);
  } else if (key == "num_devices") {
    options.num_devices = Number(key, value, 0, kMostInt, "a count of devices, or 0 if unknown");
  } else if (key == "eps") {
    options.epsilon = Number(key, value, 0.0, kMost, "a number that is not negative");
  } else if (key == "momentum") {
    options.cumulative = value == "None";
    if (options.cumulative) return;
    options.momentum = Number(key, value, 0.0, 1.0, "a number from 0 to 1, or None");
  } else if (key == "axis") {
    options.axis = Number(key, value, -kMostInt, kMostInt, "an int");
  } else if (key == "fix_gamma") {
    options.fix_gamma = Flag(key, value);
  } else if (key == "use_global_stats") {
    options.use_global_stats = Flag(key, value);
  } else if (key == "unbiased_running_var") {
    options.unbiased_running_var = Flag(key, value);
  } else if (key == "nonfinite") {
    SetNonFinite(key, value, &options);
  } else if (key == "activation") {
    SetFunction(key, value, &options);
  } else if (key == "slope") {
    options.activation.slope = Number(key, value, -kMost, kMost, "a number");
  } else if (key == "timeout") {
    const char expected[] = "a number of seconds, inf for never, or 0 for the default";
    options.timeout = value == "inf" ? kMost : Number(key, value, 0.0, kMost, expected);
  } else if (key.compare(0, 2, "__") != 0) {  // MXNet's own, such as __ctx_group__
    Fail(key, value, "no such attribute");
  }
}

}  // namespace

Attributes ParseAttributes(int size, const char** keys, const char** values) {
  Attributes attributes;
  for (int i = 0; i < size; ++i) Set(keys[i], values[i], &attributes);
  if (attributes.group.empty()) Fail("group", "", "the key of a layer");
  const Activation& activation = attributes.options.activation;
  const bool has_inverse = attributes.options.from_output || activation.function == Function::kElu;
  if (has_inverse && activation.function != Function::kIdentity && !(activation.slope > 0)) {
    Fail("slope", Concat(activation.slope), "a positive number");
  }
  if (attributes.options.shared_name.empty()) attributes.options.shared_name = attributes.layer;
  return attributes;
}

Attributes ForDevice(Attributes attributes, const Device& device) {
  for (size_t i = 0; i < attributes.device_groups.size(); ++i) {
    const std::set<Device>& part = attributes.device_groups[i];
    if (!part.count(device)) continue;
    attributes.group += Concat('/', i);
    attributes.options.num_devices = static_cast<int>(part.size());
    attributes.options.contexts = part;
    return attributes;
  }
  if (!attributes.device_groups.empty()) {
    throw Error(Concat("SyncBatchNorm '", attributes.layer, "': runs on ", device.Name(),
                       ", which is in none of the groups of contexts that group= names"));
  }
  return attributes;
}

}  // namespace syncbn
