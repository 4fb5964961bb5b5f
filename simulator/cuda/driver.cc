// libcuda: what libtorch asks of the driver beside the runtime, above all virtual memory for expandable segments.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>

#include "device.h"
#include "log.h"
#include "memory.h"
#include "settings.h"
#include "stream.h"

using namespace simulator;

namespace {

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(uintptr_t(0x1000 + device)); }
int device_of(CUcontext context) { return int(reinterpret_cast<uintptr_t>(context) - 0x1000); }

CUresult require(bool good) { return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }

} // namespace

extern "C" {

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY    ? "out of memory (simulated driver)"
          : error == CUDA_ERROR_NOT_SUPPORTED  ? "the simulated driver does not do this"
          : error == CUDA_ERROR_INVALID_VALUE  ? "invalid argument (simulated driver)"
                                               : "an error of the simulated driver";
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char** text) {
  // The driver's codes are the runtime's, for all that this driver returns.
  *text = cudaGetErrorName(cudaError_t(int(error)));
  return CUDA_SUCCESS;
}

// --- devices and contexts ------------------------------------------------------------------------

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return is_device(ordinal) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetCount(int* count) {
  *count = settings().devices;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return require(cudaDeviceGetAttribute(value, cudaDeviceAttr(int(attribute)), device) == cudaSuccess);
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = context_of(current_device());
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) { return require(!context || cudaSetDevice(device_of(context)) == cudaSuccess); }

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = context_of(device);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  auto [place, device] = locate(pointer(address));
  if (place == Place::pageable) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int*>(value) = place == Place::device ? device : current_device(); break;
    case CU_POINTER_ATTRIBUTE_CONTEXT: *static_cast<CUcontext*>(value) = context_of(place == Place::device ? device : current_device()); break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *static_cast<unsigned*>(value) = place == Place::device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *static_cast<CUdeviceptr*>(value) = address; break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
  return CUDA_SUCCESS;
}

// --- virtual memory ------------------------------------------------------------------------------

CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = granularity;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t alignment, CUdeviceptr, unsigned long long) {
  if (!bytes || bytes % granularity) return CUDA_ERROR_INVALID_VALUE;
  *address = reinterpret_cast<CUdeviceptr>(reserve_addresses(bytes, alignment));
  return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) { return require(free_addresses(pointer(address), bytes)); }

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* properties, unsigned long long) {
  if (!bytes || bytes % granularity || properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE || !is_device(properties->location.id)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *handle = create_memory(bytes, properties->location.id);
  return *handle ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { return require(release_memory(handle)); }

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long) {
  return require(offset == 0 && map_memory(pointer(address), bytes, handle));
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) { return require(unmap_memory(pointer(address), bytes)); }

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc*, size_t) { return require(is_allocated(pointer(address), bytes)); }

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  *handle = retain_memory_at(address);
  return require(*handle != 0);
}

CUresult cuMemGetAddressRange(CUdeviceptr* start, size_t* bytes, CUdeviceptr address) {
  auto span = allocation_of(pointer(address));
  if (!span) return CUDA_ERROR_NOT_FOUND;
  if (start) *start = span->start;
  if (bytes) *bytes = span->bytes;
  return CUDA_SUCCESS;
}

// Memory is not shared between processes.
CUresult cuMemExportToShareableHandle(void*, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle*, void*, CUmemAllocationHandleType) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp*, CUmemGenericAllocationHandle) { return CUDA_ERROR_NOT_SUPPORTED; }

// --- values --------------------------------------------------------------------------------------

CUresult cuMemsetD32Async(CUdeviceptr address, unsigned value, size_t count, CUstream handle) {
  auto stream = find_stream(handle);
  if (!stream || !is_allocated(pointer(address), count * sizeof value)) return CUDA_ERROR_INVALID_VALUE;
  submit(stream, [=, at = epoch()] {
    for (size_t i = 0; i < count; ++i) copy_bytes(static_cast<unsigned*>(pointer(address)) + i, &value, sizeof value, at);
  });
  return CUDA_SUCCESS;
}

CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned) { return cuMemsetD32Async(address, value, 1, stream); }

// Kernels of sm_90 take descriptions of tensors; nobody reads them here.
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  memset(map, 0, sizeof *map);
  return CUDA_SUCCESS;
}

} // extern "C"
