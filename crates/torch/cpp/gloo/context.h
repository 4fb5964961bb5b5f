// The wheel ships c10d's headers but not Gloo's. c10d's Gloo header only holds pointers to these
// types, so declaring what it names is enough; the definitions are inside libtorch.
#pragma once
#include <chrono>

namespace gloo {
class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};
} // namespace gloo
