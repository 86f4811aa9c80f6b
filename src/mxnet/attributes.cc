// Strings to options. Python has checked them; a symbol from a file is checked here.
#include "mxnet/attributes.h"

#include <limits>
#include <set>
#include <sstream>
#include <vector>

#include "core/error.h"
#include "core/parse.h"

namespace syncbn {
namespace {

constexpr int kMaxInt = std::numeric_limits<int>::max();
constexpr double kMax = std::numeric_limits<double>::max();

// One attribute. Its functions throw Error for a value that is not what they read.
struct Attribute {
  const std::string key, value;

  [[noreturn]] void Fail(const std::string& expected) const {
    throw Error(Concat("SyncBatchNorm attribute ", key, "=\"", value, "\": expected ", expected));
  }

  void Read(std::string* text) const { *text = value; }

  template <typename T>
  void Read(T* number, T min, T max, const char* expected) const {
    if (!ParseNumber(value, number) || *number < min || *number > max) Fail(expected);
  }

  void Read(bool* flag) const {
    *flag = value == "True" || value == "1";
    if (!*flag && value != "False" && value != "0") Fail("True or False");
  }

  void Read(std::set<Device>* devices) const {
    try {
      *devices = ParseDevices(value);
    } catch (const Error&) {
      Fail("devices like \"cpu(0) cpu(1)\"");
    }
  }

  void Read(std::vector<int>* ranks) const {
    std::istringstream numbers(value);
    for (std::string number; numbers >> number;) {
      int rank = 0;
      const int min = ranks->empty() ? 0 : ranks->back() + 1;
      if (!ParseNumber(number, &rank) || rank < min) Fail("\"self\" or ascending ranks");
      ranks->push_back(rank);
    }
  }

  void Read(NonFinite* policy) const {
    if (value == "propagate") return;
    if (value != "skip" && value != "raise") Fail("propagate, skip or raise");
    *policy = value == "skip" ? NonFinite::kSkip : NonFinite::kRaise;
  }
};

// Backward reads y where x_hat can be reconstructed from it: a ReLU has no inverse.
void ReadActivation(const Attribute& attribute, Options* options) {
  options->from_output = attribute.value == "identity" || attribute.value == "leaky_relu";
  if (attribute.value == "relu" || attribute.value == "leaky_relu") {
    options->activation.function = Function::kLeakyRelu;
  } else if (attribute.value != "None" && attribute.value != "identity") {
    attribute.Fail("None, identity, relu or leaky_relu");
  }
}

void Set(const Attribute& attribute, Attributes* out) {
  const std::string& key = attribute.key;
  Options& options = out->options;
  if (key == "layer_key") return attribute.Read(&out->layer_key);
  if (key == "layer") return attribute.Read(&out->layer);
  if (key == "guard") return attribute.Read(&out->guard);
  if (key == "chained") return attribute.Read(&out->chained);
  if (key == "masked") return attribute.Read(&options.masked);
  if (key == "contexts") return attribute.Read(&options.contexts);
  if (key == "shared_name") return attribute.Read(&options.shared_name);
  if (key == "fix_gamma") return attribute.Read(&options.fix_gamma);
  if (key == "use_global_stats") return attribute.Read(&options.use_global_stats);
  if (key == "unbiased_running_var") return attribute.Read(&options.unbiased_running_var);
  if (key == "nonfinite") return attribute.Read(&options.nonfinite);
  if (key == "activation") return ReadActivation(attribute, &options);
  if (key == "axis") return attribute.Read(&options.axis, -kMaxInt, kMaxInt, "an int");
  if (key == "slope") return attribute.Read(&options.activation.slope, -kMax, kMax, "a number");
  if (key == "eps") return attribute.Read(&options.epsilon, 0.0, kMax, "a number that is not negative");
  if (key == "num_devices") {
    attribute.Read(&options.num_devices, 0, kMaxInt, "a count of devices, or 0 if unknown");
  } else if (key == "ranks") {
    options.across_processes = attribute.value != "self";
    if (options.across_processes) attribute.Read(&options.ranks);
  } else if (key == "momentum") {
    const char expected[] = "a number from 0 to 1; recompute_statistics averages over batches";
    attribute.Read(&options.momentum, 0.0, 1.0, expected);
  } else if (key == "timeout") {
    const char expected[] = "a number of seconds, inf for never, or 0 for the default";
    options.timeout = kMax;
    if (attribute.value != "inf") attribute.Read(&options.timeout, 0.0, kMax, expected);
  } else if (key.compare(0, 2, "__") != 0) {  // MXNet's own, such as __ctx_group__
    attribute.Fail("no such attribute");
  }
}

}  // namespace

Attributes ParseAttributes(int size, const char** keys, const char** values) {
  Attributes attributes;
  for (int i = 0; i < size; ++i) Set({keys[i], values[i]}, &attributes);
  if (attributes.layer_key.empty()) Attribute{"layer_key", ""}.Fail("the key of a layer");
  const Activation& activation = attributes.options.activation;
  const bool is_leaky =
      attributes.options.from_output && activation.function == Function::kLeakyRelu;
  if (is_leaky && !(activation.slope > 0)) {
    Attribute{"slope", Concat(activation.slope)}.Fail("a positive number");
  }
  if (attributes.options.shared_name.empty()) attributes.options.shared_name = attributes.layer;
  return attributes;
}

}  // namespace syncbn
