// Tests any strings as attributes of a node, as a symbol's file may hold them: they are options
// within their ranges, or an Error that has the attribute, its value and the value expected.
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "errors.h"
#include "fuzz.h"
#include "mxnet/attributes.h"

namespace {

using syncbn::Attributes;
using Strings = std::vector<std::pair<std::string, std::string>>;

Attributes Parse(const Strings& attributes) {
  std::vector<const char*> keys = {"group"}, values = {"key"};
  for (const auto& entry : attributes) {
    keys.push_back(entry.first.c_str());
    values.push_back(entry.second.c_str());
  }
  return syncbn::ParseAttributes(static_cast<int>(keys.size()), keys.data(), values.data());
}

void TestWhatIsRefused() {
  const struct {
    const char *key, *expected;
    std::vector<std::string> values;
  } table[] = {
      {"num_devices", "a count of devices, or 0 if unknown",
       {"1e10", "0.5", "-1", "", " 3", "3 ", "+3", "0x10", "nan", "99999999999", "3cpus"}},
      {"axis", "an int", {"1e10", "0.5", "", "C", "1,2", "99999999999"}},
      {"eps", "a number that is not negative", {"-1", "nan", "inf", "1e400", "", " 1", "0,5", "0x1"}},
      {"momentum", "a number from 0 to 1, or None", {"much", "-0.1", "1.5", "nan", "none"}},
      {"slope", "a number", {"nan", "inf", "steep", "0.1."}},
      {"timeout", "a number of seconds, inf for never, or 0", {"-1", "nan", "soon", ""}},
      {"ranks", "\"self\" or ascending ranks", {"1.5", "-1", "1 0", "2 2", "0;1", "99999999999"}},
      {"fix_gamma", "True or False", {"perhaps", "", "true", "2"}},
      {"contexts", "devices like \"cpu(0) cpu(1)\"",
       {"cpu", "cpu()", "cpu(x)", "cpu(0", "cpu(0)x", "(0)", "cpu(-1)", "cpu(0.5)", "cpu(0)cpu(1)",
        "c pu(0)", "cpu(99999999999)", "3(0)", "cpu((0)", "cpu(0),cpu(1)"}},
      {"device_groups", "devices like", {"cpu(0);cpu", "cpu(0) gpu;", "cpu(1);;", ";"}},
      {"activation", "None, identity, relu, leaky_relu or elu", {"gelu", ""}},
  };
  for (const auto& row : table) {
    for (const std::string& value : row.values) {
      const std::string text = ErrorOf([&] { Parse({{row.key, value}}); });
      CheckHas(text, std::string("SyncBatchNorm attribute ") + row.key + "=\"" + value +
                         "\": expected " + row.expected);
    }
  }
}

void CheckRanges(const Attributes& a) {
  const syncbn::Options& o = a.options;
  CHECK(o.num_devices >= 0 && o.epsilon >= 0 && std::isfinite(o.epsilon), o.num_devices, o.epsilon);
  CHECK(o.momentum >= 0 && o.momentum <= 1 && o.timeout >= 0, o.momentum, o.timeout);
  CHECK(std::isfinite(o.activation.slope));
  for (size_t i = 0; i < o.ranks.size(); ++i) CHECK(o.ranks[i] >= 0);
  for (size_t i = 1; i < o.ranks.size(); ++i) CHECK(o.ranks[i - 1] < o.ranks[i]);
  for (const syncbn::Device& device : o.contexts) CHECK(device.id >= 0 && !device.type.empty());
}

void TestMutations() {
  static const std::pair<const char*, const char*> valid[] = {
      {"num_devices", "2"}, {"axis", "-1"}, {"eps", "1e-05"}, {"momentum", "0.9"},
      {"momentum", "None"}, {"slope", "0.25"}, {"timeout", "300.0"}, {"timeout", "inf"},
      {"ranks", "0 1 12"}, {"ranks", "self"}, {"fix_gamma", "True"}, {"use_global_stats", "0"},
      {"unbiased_running_var", "False"}, {"contexts", "cpu(0) gpu(1)"}, {"chained", "1"},
      {"device_groups", "cpu(0) cpu(1);cpu(2)"}, {"activation", "leaky_relu"}, {"layer", "norm0"},
      {"group", "key"}, {"guard", "any"}, {"shared_name", "norm"}};
  std::mt19937 random(1);
  int taken = 0;
  for (int i = check::Times(fuzz::kFull, fuzz::kBrief); i > 0; --i) {
    Strings attributes;
    for (uint32_t count = random() % 4; count > 0; --count) {
      std::pair<std::string, std::string> attribute = fuzz::Choose(&random, valid);
      if (random() % 16 == 0) fuzz::Mutate(&random, &attribute.first);
      if (random() % 2 == 0) fuzz::Mutate(&random, &attribute.second);
      attributes.push_back(attribute);
    }
    try {
      const Attributes parsed = Parse(attributes);
      CheckRanges(parsed);
      ForDevice(parsed, {"cpu", 2});
      ++taken;
    } catch (const syncbn::Error& error) {
      const std::string text = error.what();
      CHECK(text.find("expected ") != std::string::npos || text.find("runs on cpu(2)") !=
            std::string::npos, text);
    }
  }
  CHECK(taken > 0);
}

}  // namespace

int main() {
  TestWhatIsRefused();
  TestMutations();
  return check::Result();
}
