// Tests strings as attributes of a node, as a symbol's file may hold them: they are options, or an
// Error that has the attribute, its value and the value expected.
#include <string>
#include <utility>
#include <vector>

#include "check.h"
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

TEST(TypicalMistakes) {
  const struct {
    const char *key, *expected;
    std::vector<std::string> values;
  } table[] = {
      {"num_devices", "a count of devices, or 0 if unknown",
       {"1e10", "0.5", "-1", "", " 3", "3 ", "+3", "0x10", "nan", "99999999999", "3cpus"}},
      {"axis", "an int", {"C"}},
      {"eps", "a number that is not negative", {"-1", "nan", "inf", "1e400", "0,5", "0x1"}},
      {"momentum", "a number from 0 to 1; recompute_statistics averages", {"1.5", "None"}},
      {"slope", "a number", {"steep"}},
      {"timeout", "a number of seconds, inf for never, or 0", {"-1"}},
      {"ranks", "\"self\" or ascending ranks", {"-1", "1 0", "2 2", "0;1"}},
      {"fix_gamma", "True or False", {"true"}},
      {"contexts", "devices like \"cpu(0) cpu(1)\"",
       {"cpu", "cpu()", "cpu(x)", "cpu(0", "cpu(0)x", "(0)", "cpu(-1)", "cpu(0.5)", "cpu(0)cpu(1)",
        "c pu(0)", "cpu(99999999999)", "3(0)", "cpu((0)", "cpu(0),cpu(1)"}},
      {"activation", "None, identity, relu or leaky_relu", {"elu", ""}},
  };
  for (const auto& row : table) {
    for (const std::string& value : row.values) {
      CheckHas(ErrorOf([&] { Parse({{row.key, value}}); }),
               syncbn::Concat("SyncBatchNorm attribute ", row.key, "=\"", value, "\": expected ",
                              row.expected));
    }
  }
}

TEST(AttributesOfMxnetAreIgnored) { Parse({{"__ctx_group__", "MXNet's own"}}); }

}  // namespace

int main() { return check::RunTests(); }
