// The simulated accelerator as a GPU library: a program that loads it at run time finds GPUs and their process groups.
#include "gpu_library.h"
#include "simulated_accelerator.h"

namespace {

// When the library is loaded: before the program asks libtorch for GPUs.
const bool installed = [] {
  trainyard::simulated::install();
  return true;
}();

} // namespace

extern "C" c10d::Backend* trainyard_gpu_backend(const trainyard::GpuGroup& group) {
  trainyard::simulated::NcclOptions options;
  options.timeout = group.timeout;
  options.name = group.name;
  auto backend = trainyard::simulated::make_simulated_nccl(group.store, group.rank, group.size, options);
  backend->setBoundDeviceId(group.device);
  backend->eagerConnectSingleDevice(group.device);
  return backend.release();
}
