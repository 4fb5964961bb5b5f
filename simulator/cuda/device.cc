// Devices: how many there are, and what they say about themselves.
#include "device.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "errors.h"
#include "log.h"
#include "memory.h"
#include "settings.h"

namespace simulator {
namespace {

thread_local int current = 0;

constexpr int cuda_version = CUDART_VERSION;

// What an A100 (sm_80) or H100 (sm_90) answers, as far as libtorch asks.
int attribute(cudaDeviceAttr attribute) {
  int arch = settings().arch;
  bool hopper = arch >= 90;
  switch (int(attribute)) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 0x7fffffff;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 48 << 10;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return (hopper ? 227 : 163) << 10;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return (hopper ? 228 : 164) << 10;
    case cudaDevAttrReservedSharedMemoryPerBlock: return 1 << 10;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrMultiProcessorCount: return hopper ? 132 : 108;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrComputeCapabilityMajor: return arch / 10;
    case cudaDevAttrComputeCapabilityMinor: return arch % 10;
    case cudaDevAttrL2CacheSize: return (hopper ? 50 : 40) << 20;
    case cudaDevAttrClockRate: return 1410000;
    case cudaDevAttrMemoryClockRate: return 1593000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrMaxPitch: return 0x7fffffff;
    case cudaDevAttrTextureAlignment: return 512;
    case cudaDevAttrTotalConstantMemory: return 64 << 10;
    case cudaDevAttrAsyncEngineCount: return 3;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrConcurrentManagedAccess:
    case cudaDevAttrComputePreemptionSupported:
    case cudaDevAttrCanUseHostPointerForRegisteredMem:
    case cudaDevAttrHostRegisterSupported: return 1;
    default: break;
  }
  // The runtime's header leaves this one to the driver's; expandable segments ask for it.
  constexpr int virtual_memory_supported = 102;
  return int(attribute) == virtual_memory_supported ? 1 : 0;
}

void fill(cudaDeviceProp& p, int device) {
  p = {};
  snprintf(p.name, sizeof p.name, "Simulated GPU sm_%d", settings().arch);
  memset(p.uuid.bytes, device + 1, sizeof p.uuid.bytes);
  p.totalGlobalMem = settings().memory;
  p.major = attribute(cudaDevAttrComputeCapabilityMajor);
  p.minor = attribute(cudaDevAttrComputeCapabilityMinor);
  p.multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
  p.sharedMemPerBlock = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  p.sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  p.sharedMemPerMultiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  p.reservedSharedMemPerBlock = attribute(cudaDevAttrReservedSharedMemoryPerBlock);
  p.regsPerBlock = p.regsPerMultiprocessor = attribute(cudaDevAttrMaxRegistersPerBlock);
  p.warpSize = attribute(cudaDevAttrWarpSize);
  p.memPitch = attribute(cudaDevAttrMaxPitch);
  p.maxThreadsPerBlock = p.maxThreadsDim[0] = p.maxThreadsDim[1] = attribute(cudaDevAttrMaxThreadsPerBlock);
  p.maxThreadsDim[2] = attribute(cudaDevAttrMaxBlockDimZ);
  p.maxGridSize[0] = attribute(cudaDevAttrMaxGridDimX);
  p.maxGridSize[1] = p.maxGridSize[2] = attribute(cudaDevAttrMaxGridDimY);
  p.maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  p.maxBlocksPerMultiProcessor = attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
  p.totalConstMem = attribute(cudaDevAttrTotalConstantMemory);
  p.textureAlignment = attribute(cudaDevAttrTextureAlignment);
  p.l2CacheSize = attribute(cudaDevAttrL2CacheSize);
  p.memoryBusWidth = attribute(cudaDevAttrGlobalMemoryBusWidth);
  p.asyncEngineCount = attribute(cudaDevAttrAsyncEngineCount);
  p.canMapHostMemory = p.concurrentKernels = p.unifiedAddressing = p.cooperativeLaunch = 1;
  p.managedMemory = p.concurrentManagedAccess = p.memoryPoolsSupported = p.hostRegisterSupported = 1;
  p.streamPrioritiesSupported = 1;
  p.pciBusID = device + 1;
}

} // namespace

int current_device() { return current; }
bool is_device(int device) { return device >= 0 && device < settings().devices; }

} // namespace simulator

using namespace simulator;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = settings().devices;
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (!is_device(device)) return fail(cudaErrorInvalidDevice);
  current = device;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = cuda_version;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = cuda_version;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  if (!is_device(device)) return fail(cudaErrorInvalidDevice);
  *value = attribute(which);
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (!is_device(device)) return fail(cudaErrorInvalidDevice);
  fill(*properties, device);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int room, int device) {
  if (!is_device(device)) return fail(cudaErrorInvalidDevice);
  snprintf(text, size_t(room), "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  if (!is_device(device) || !is_device(peer)) return fail(cudaErrorInvalidDevice);
  *can = device != peer;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  return is_device(peer) ? cudaSuccess : fail(cudaErrorInvalidDevice);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  *total = settings().memory;
  *available = settings().memory - held_by_device(current);
  return cudaSuccess;
}

// libtorch looks up the driver's functions here; those of a later revision carry it as a suffix.
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  static void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_GLOBAL);
  *function = driver ? dlsym(driver, name) : nullptr;
  if (driver && !*function) *function = dlsym(driver, (std::string(name) + "_v2").c_str());
  log("entry point %s: %s", name, *function ? "found" : "missing");
  // A function that does not exist is no error of the call.
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

} // extern "C"
