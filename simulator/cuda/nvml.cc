// NVML: the few functions that libtorch finds by name when it maps expandable segments or explains a full device.
// Its header is not among those that libtorch's environment installs, so the types are plain here. Whatever is missing
// (fabric information, above all) libtorch takes as "this machine has none".
#include <cuda_runtime_api.h>

#include <cstdint>

namespace {
constexpr int success = 0, not_supported = 3;
}

extern "C" {

int nvmlInit_v2() { return success; }

int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  *device = reinterpret_cast<void*>(uintptr_t(1));
  return success;
}

// The list of other processes on the device, for the message of a failed allocation.
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return success;
}

int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = CUDART_VERSION;
  return success;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return not_supported; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return not_supported; }

} // extern "C"
