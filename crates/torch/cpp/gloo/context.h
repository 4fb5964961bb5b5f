// The PyTorch wheel ships c10d's headers but not Gloo's. ProcessGroupGloo.hpp only holds pointers to these types, so
// declaring them is enough; libtorch contains the definitions.
#pragma once
#include <chrono>

namespace gloo {
class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};
} // namespace gloo
