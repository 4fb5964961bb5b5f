// NCCL process groups, compiled with the feature `cuda` only. Without a GPU the constructor throws.
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "bridge.h"

namespace trainyard {

std::shared_ptr<GroupHandle> nccl_group(const StoreHandle& store, int32_t rank, int32_t size, uint64_t timeout_ms) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = std::chrono::milliseconds(timeout_ms);
  return std::make_shared<GroupHandle>(
      c10::make_intrusive<c10d::ProcessGroupNCCL>(store.store, rank, size, options));
}

} // namespace trainyard
