#include "mxnet/node.h"

namespace syncbn {

Node ReadNode(int size, const char** keys, const char** values) {
  Node node;
  std::string layer_key;
  for (int i = 0; i < size; ++i) {
    const std::string key = keys[i], value = values[i];
    if (key == "layer_key") layer_key = value;
    if (key == "masked") node.masked = value == "True";
    if (key == "chained") node.chained = value == "True";
  }
  node.layer = Registry::Get().Find(layer_key);
  return node;
}

}  // namespace syncbn
