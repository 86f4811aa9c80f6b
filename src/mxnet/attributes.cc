// Strings to options. Python has checked them; a symbol from a file is checked here.
#include "mxnet/attributes.h"

#include <limits>
#include <sstream>

#include "core/parse.h"

namespace syncbn {
namespace {

constexpr int kMostInt = std::numeric_limits<int>::max();
constexpr double kMost = std::numeric_limits<double>::max();

// One attribute. Its functions throw Error for a value that is not what they read.
struct Attribute {
  const std::string key, value;

  [[noreturn]] void Fail(const std::string& expected) const {
    throw Error(Concat("SyncBatchNorm attribute ", key, "=\"", value, "\": expected ", expected));
  }

  void Read(std::string* text) const { *text = value; }

  template <typename T>
  void Read(T* number, T least, T most, const char* expected) const {
    if (!ParseNumber(value, number) || *number < least || *number > most) Fail(expected);
  }

  void Read(bool* flag) const {
    *flag = value == "True" || value == "1";
    if (!*flag && value != "False" && value != "0") Fail("True or False");
  }

  std::set<Device> Devices(const std::string& part) const {
    try {
      const std::set<Device> devices = ParseDevices(part);
      if (!devices.empty()) return devices;
    } catch (const Error&) {
    }
    Fail("devices like \"cpu(0) cpu(1)\"");
  }

  void Read(std::set<Device>* contexts) const {
    if (!value.empty()) *contexts = Devices(value);
  }

  void Read(std::vector<std::set<Device>>* groups) const {
    std::istringstream parts(value);
    for (std::string part; std::getline(parts, part, ';');) groups->push_back(Devices(part));
  }

  void Read(std::vector<int>* ranks) const {
    std::istringstream numbers(value);
    for (std::string number; numbers >> number;) {
      int rank = 0;
      const int least = ranks->empty() ? 0 : ranks->back() + 1;
      if (!ParseNumber(number, &rank) || rank < least) Fail("\"self\" or ascending ranks");
      ranks->push_back(rank);
    }
  }

  void Read(NonFinite* policy) const {
    if (value == "propagate") return;
    if (value != "skip" && value != "raise") Fail("propagate, skip or raise");
    *policy = value == "skip" ? NonFinite::kSkip : NonFinite::kRaise;
  }
};

// Backward reads y where x_hat can be reconstructed from it: a ReLU has no inverse, and an ELU
// loses x in the digits of y near -slope.
void ReadActivation(const Attribute& of, Options* options) {
  options->from_output = of.value == "identity" || of.value == "leaky_relu";
  if (of.value == "relu" || of.value == "leaky_relu") {
    options->activation.function = Function::kLeakyRelu;
  } else if (of.value == "elu") {
    options->activation.function = Function::kElu;
  } else if (of.value != "None" && of.value != "identity") {
    of.Fail("None, identity, relu, leaky_relu or elu");
  }
}

void Set(const Attribute& of, Attributes* out) {
  const std::string& key = of.key;
  Options& options = out->options;
  if (key == "group") return of.Read(&out->group);
  if (key == "layer") return of.Read(&out->layer);
  if (key == "guard") return of.Read(&out->guard);
  if (key == "chained") return of.Read(&out->chained);
  if (key == "masked") return of.Read(&options.masked);
  if (key == "device_groups") return of.Read(&out->device_groups);
  if (key == "contexts") return of.Read(&options.contexts);
  if (key == "shared_name") return of.Read(&options.shared_name);
  if (key == "fix_gamma") return of.Read(&options.fix_gamma);
  if (key == "use_global_stats") return of.Read(&options.use_global_stats);
  if (key == "unbiased_running_var") return of.Read(&options.unbiased_running_var);
  if (key == "nonfinite") return of.Read(&options.nonfinite);
  if (key == "activation") return ReadActivation(of, &options);
  if (key == "axis") return of.Read(&options.axis, -kMostInt, kMostInt, "an int");
  if (key == "slope") return of.Read(&options.activation.slope, -kMost, kMost, "a number");
  if (key == "eps") return of.Read(&options.epsilon, 0.0, kMost, "a number that is not negative");
  if (key == "num_devices") {
    of.Read(&options.num_devices, 0, kMostInt, "a count of devices, or 0 if unknown");
  } else if (key == "ranks") {
    options.across_processes = of.value != "self";
    if (options.across_processes) of.Read(&options.ranks);
  } else if (key == "momentum") {
    options.cumulative = of.value == "None";
    const char expected[] = "a number from 0 to 1, or None";
    if (!options.cumulative) of.Read(&options.momentum, 0.0, 1.0, expected);
  } else if (key == "timeout") {
    const char expected[] = "a number of seconds, inf for never, or 0 for the default";
    options.timeout = kMost;
    if (of.value != "inf") of.Read(&options.timeout, 0.0, kMost, expected);
  } else if (key.compare(0, 2, "__") != 0) {  // MXNet's own, such as __ctx_group__
    of.Fail("no such attribute");
  }
}

}  // namespace

Attributes ParseAttributes(int size, const char** keys, const char** values) {
  Attributes attributes;
  for (int i = 0; i < size; ++i) Set({keys[i], values[i]}, &attributes);
  if (attributes.group.empty()) Attribute{"group", ""}.Fail("the key of a layer");
  const Activation& activation = attributes.options.activation;
  const bool has_inverse = attributes.options.from_output || activation.function == Function::kElu;
  if (has_inverse && activation.function != Function::kIdentity && !(activation.slope > 0)) {
    Attribute{"slope", Concat(activation.slope)}.Fail("a positive number");
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
    FailLayer(attributes, "runs on ", device.Name(),
              ", which is in none of the groups of contexts that group= names");
  }
  return attributes;
}

}  // namespace syncbn
