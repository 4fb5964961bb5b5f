// Kernels: registered by libtorch as it is loaded, launched with checks, and computing nothing.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "counters.h"
#include "device.h"
#include "errors.h"
#include "log.h"
#include "memory.h"
#include "settings.h"
#include "stream.h"

namespace simulator {
namespace {

struct Kernels {
  std::mutex mutex;
  std::unordered_map<const void*, const char*> names;
};
Kernels& kernels() {
  static Kernels& k = *new Kernels();
  return k;
}

const char* kernel_name(const void* function) {
  auto& k = kernels();
  std::lock_guard lock(k.mutex);
  auto it = k.names.find(function);
  return it == k.names.end() ? nullptr : it->second;
}

struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};
// kernel<<<...>>> pushes one, and the kernel's host function pops it again.
thread_local std::vector<Configuration> pushed;

// What a device refuses. Grids of zero blocks are a favorite: they come from empty tensors.
bool is_possible(const Configuration& c) {
  int most_shared = 0;
  cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, current_device());
  auto [g, b] = std::pair(c.grid, c.block);
  uint64_t threads = uint64_t(b.x) * b.y * b.z;
  return g.x && g.y && g.z && g.x <= 0x7fffffffu && g.y <= 65535 && g.z <= 65535 && threads && threads <= 1024 && b.z <= 64 &&
         c.shared_bytes <= size_t(most_shared);
}

cudaError_t launch(const void* function, const Configuration& c) {
  const char* name = kernel_name(function);
  auto [g, b] = std::pair(c.grid, c.block);
  bool possible = is_possible(c);
  log("%s device %d stream %u grid %u,%u,%u block %u,%u,%u shared %zu %s", possible ? "launch" : "refused launch", current_device(),
      stream_number(c.stream), g.x, g.y, g.z, b.x, b.y, b.z, c.shared_bytes, name ? name : "(unknown kernel)");
  if (!possible) return fail(cudaErrorInvalidConfiguration);
  if (!name) return fail(cudaErrorInvalidDeviceFunction);
  if (!find_stream(c.stream)) return fail(cudaErrorInvalidResourceHandle);
  note_launch();
  count_launch(current_device());
  return cudaSuccess;
}

} // namespace
} // namespace simulator

using namespace simulator;

extern "C" {

// --- what compiled device code calls as it is loaded ---------------------------------------------

void** __cudaRegisterFatBinary(void* binary) { return reinterpret_cast<void**>(new void*(binary)); }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void** handle) { delete reinterpret_cast<void**>(handle); }
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

void __cudaRegisterFunction(void**, const char* host_function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  auto& k = kernels();
  std::lock_guard lock(k.mutex);
  k.names[host_function] = name;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, CUstream_st* stream) {
  pushed.push_back({grid, block, shared_bytes, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  if (pushed.empty()) return fail(cudaErrorMissingConfiguration);
  Configuration c = pushed.back();
  pushed.pop_back();
  *grid = c.grid;
  *block = c.block;
  *shared_bytes = c.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = c.stream;
  return cudaSuccess;
}

// --- launches ------------------------------------------------------------------------------------

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t shared_bytes, cudaStream_t stream) {
  return launch(kernel, {grid, block, shared_bytes, stream});
}

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void**, size_t shared_bytes, cudaStream_t stream) {
  return launch(function, {grid, block, shared_bytes, stream});
}

cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void**, size_t shared_bytes, cudaStream_t stream) {
  return launch(function, {grid, block, shared_bytes, stream});
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void**) {
  return launch(function, {config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream});
}

// --- attributes and occupancy --------------------------------------------------------------------

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = settings().arch;
  attributes->maxDynamicSharedSizeBytes = 48 << 10;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int threads, size_t, unsigned) {
  *blocks = threads > 0 && threads <= 1024 ? std::min(2048 / threads, 32) : 1;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int threads, size_t shared_bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared_bytes, 0);
}

// --- variables of device code: the host's copy serves, since no kernel reads them ----------------

cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
  *address = const_cast<void*>(symbol);
  return cudaSuccess;
}

cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from, size_t bytes, size_t offset, cudaMemcpyKind) {
  memcpy(static_cast<char*>(const_cast<void*>(symbol)) + offset, from, bytes);
  return cudaSuccess;
}

} // extern "C"
