// Loads a GPU library and creates process groups with it.
#include "gpu_library.h"

#include <dlfcn.h>

#include "bridge.h"

namespace trainyard {
namespace {

decltype(&trainyard_gpu_backend) create_backend = nullptr;

} // namespace

void load_gpu_library(rust::Str path) {
  std::string file(path.data(), path.size());
  // Global, because libtorch's CUDA libraries register their kernels with the libtorch that is loaded already.
  void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_GLOBAL);
  TORCH_CHECK(library != nullptr, dlerror());
  auto* symbol = dlsym(library, "trainyard_gpu_backend");
  TORCH_CHECK(symbol != nullptr, file, " is not a GPU library: ", dlerror());
  create_backend = reinterpret_cast<decltype(create_backend)>(symbol);
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
