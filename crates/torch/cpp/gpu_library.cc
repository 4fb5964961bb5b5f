// Loads a GPU library and creates process groups with it.
#include "gpu_library.h"

#include <dlfcn.h>

#include "bridge.h"

namespace trainyard {
namespace {

decltype(&trainyard_gpu_backend) create_backend = nullptr;
decltype(&trainyard_gpu_observe_memory) observe_memory_of_gpus = nullptr;
decltype(&trainyard_gpu_limit_memory) limit_memory_of_gpu = nullptr;
decltype(&trainyard_gpu_begin_step) begin_gpu_step = nullptr;
decltype(&trainyard_gpu_end_step) end_gpu_step = nullptr;

template <typename Function>
void find(void* library, const std::string& file, const char* name, Function& function) {
  auto* symbol = dlsym(library, name);
  TORCH_CHECK(symbol != nullptr, file, " is not a GPU library: ", dlerror());
  function = reinterpret_cast<Function>(symbol);
}

} // namespace

void load_gpu_library(rust::Str path) {
  std::string file(path.data(), path.size());
  // Global, because libtorch's CUDA libraries register their kernels with the libtorch that is loaded already.
  void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_GLOBAL);
  TORCH_CHECK(library != nullptr, dlerror());
  find(library, file, "trainyard_gpu_backend", create_backend);
  find(library, file, "trainyard_gpu_observe_memory", observe_memory_of_gpus);
  find(library, file, "trainyard_gpu_limit_memory", limit_memory_of_gpu);
  find(library, file, "trainyard_gpu_begin_step", begin_gpu_step);
  find(library, file, "trainyard_gpu_end_step", end_gpu_step);
}

bool observe_gpu_memory(const MemoryObserver& observer) {
  if (observe_memory_of_gpus == nullptr) {
    return false;
  }
  observe_memory_of_gpus(observer);
  return true;
}

void set_gpu_memory_limit(int32_t index, uint64_t bytes) {
  TORCH_CHECK(limit_memory_of_gpu != nullptr, "no GPU library is loaded");
  limit_memory_of_gpu(c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)), bytes);
}

void begin_step(bool profile) {
  if (begin_gpu_step != nullptr) {
    begin_gpu_step(profile);
  }
}

void end_step() {
  if (end_gpu_step != nullptr) {
    end_gpu_step();
  }
}

std::shared_ptr<GroupHandle> gpu_group(
    const StoreHandle& store, int32_t rank, int32_t size, int32_t device, rust::Str name, uint64_t timeout_ms) {
  TORCH_CHECK(create_backend != nullptr, "no GPU library is loaded");
  GpuGroup group{
      store.store,
      rank,
      size,
      c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)),
      std::string(name.data(), name.size()),
      std::chrono::milliseconds(timeout_ms)};
  auto backend = c10::intrusive_ptr<c10d::Backend>::reclaim(create_backend(group));
  return std::make_shared<GroupHandle>(std::move(backend));
}

} // namespace trainyard
