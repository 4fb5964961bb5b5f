// Stub for programs built without the feature `cuda`.
#include "bridge.h"

namespace trainyard {

std::shared_ptr<GroupHandle> nccl_group(const StoreHandle&, int32_t, int32_t, uint64_t) {
  throw std::runtime_error("this program was built without NCCL support; build it with `--features cuda`");
}

} // namespace trainyard
