// The simulated accelerator as a GPU library: a program that loads it at run time finds GPUs and their process groups.
#include <cstdlib>
#include <string>

#include "gpu_library.h"
#include "memory.h"
#include "simulated_accelerator.h"

namespace {

// Writes the report to $TRAINYARD_SIM_REPORT, in which %r stands for the rank.
void report_at_exit() {
  std::string path = std::getenv("TRAINYARD_SIM_REPORT");
  const char* rank = std::getenv("RANK");
  if (auto at = path.find("%r"); at != std::string::npos) {
    path.replace(at, 2, rank != nullptr ? rank : "0");
  }
  trainyard::simulated::write_report(path);
}

// When the library is loaded: before the program asks libtorch for GPUs.
const bool installed = [] {
  trainyard::simulated::install();
  if (std::getenv("TRAINYARD_SIM_REPORT") != nullptr) {
    std::atexit(report_at_exit);
  }
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

extern "C" void trainyard_gpu_observe_memory(const trainyard::MemoryObserver& observer) {
  trainyard::simulated::observe_memory(observer);
}

extern "C" void trainyard_gpu_limit_memory(c10::Device device, uint64_t bytes) {
  trainyard::simulated::limit_memory(device.index(), bytes);
}

extern "C" void trainyard_gpu_begin_step(bool /*profile*/) {
  trainyard::simulated::begin_step();
}

extern "C" void trainyard_gpu_end_step() {
  trainyard::simulated::end_step();
}
