// Allocations and copies, as the runtime offers them.
#include <cuda_runtime_api.h>

#include <cstring>
#include <vector>

#include "counters.h"
#include "device.h"
#include "errors.h"
#include "log.h"
#include "memory.h"
#include "stream.h"

namespace simulator {
namespace {

CopyKind kind_of(Place to, Place from) {
  if (to == Place::device) {
    return from == Place::device     ? CopyKind::device_to_device
           : from == Place::pinned   ? CopyKind::host_to_device_pinned
                                     : CopyKind::host_to_device_pageable;
  }
  if (from != Place::device) return CopyKind::host_to_host;
  return to == Place::pinned ? CopyKind::device_to_host_pinned : CopyKind::device_to_host_pageable;
}

// A program that states the direction wrongly has mixed up its pointers.
bool agrees(cudaMemcpyKind stated, CopyKind kind) {
  switch (stated) {
    case cudaMemcpyHostToHost: return kind == CopyKind::host_to_host;
    case cudaMemcpyHostToDevice: return kind == CopyKind::host_to_device_pageable || kind == CopyKind::host_to_device_pinned;
    case cudaMemcpyDeviceToHost: return kind == CopyKind::device_to_host_pageable || kind == CopyKind::device_to_host_pinned;
    case cudaMemcpyDeviceToDevice: return kind == CopyKind::device_to_device;
    default: return true;
  }
}

// Rows of equal length; a plain copy is one row.
struct Copy {
  char* to;
  const char* from;
  size_t row_bytes, rows = 1, to_pitch = 0, from_pitch = 0;

  size_t span(size_t pitch) const { return (rows - 1) * pitch + row_bytes; }
  void run(uint64_t epoch) const {
    for (size_t i = 0; i < rows; ++i) copy_bytes(to + i * to_pitch, from + i * from_pitch, row_bytes, epoch);
  }
};

// The driver has read pageable memory when the call returns: small copies go through a buffer of its own.
constexpr size_t staging_limit = 64 << 10;

void submit_staged(const StreamPointer& stream, const Copy& copy, uint64_t at) {
  std::vector<char> staged(copy.from, copy.from + copy.row_bytes);
  submit(stream, [copy, at, staged = std::move(staged)] { copy_bytes(copy.to, staged.data(), staged.size(), at); });
}

void wait_and_run(const StreamPointer& stream, const Copy& copy, uint64_t at) {
  count_synchronization(stream_device(stream), Synchronization::blocking_copy, wait_for_all_of(stream));
  copy.run(at);
}

void run_in_order(const StreamPointer& stream, const Copy& copy, CopyKind kind, bool blocking) {
  uint64_t at = epoch();
  if (blocking || kind == CopyKind::device_to_host_pageable) {
    wait_and_run(stream, copy, at);
  } else if (kind == CopyKind::host_to_device_pageable && !is_idle(stream)) {
    if (copy.rows == 1 && copy.row_bytes <= staging_limit) submit_staged(stream, copy, at);
    else wait_and_run(stream, copy, at);
  } else {
    submit(stream, [copy, at] { copy.run(at); });
  }
}

cudaError_t copy(const char* function, const Copy& copy, cudaMemcpyKind stated, cudaStream_t handle, bool blocking) {
  auto stream = find_stream(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  if (!copy.row_bytes || !copy.rows) return cudaSuccess;
  Location to = locate(copy.to), from = locate(copy.from);
  CopyKind kind = kind_of(to.place, from.place);
  size_t bytes = copy.row_bytes * copy.rows;
  bool valid = agrees(stated, kind) && is_allocated(copy.to, copy.span(copy.to_pitch)) && is_allocated(copy.from, copy.span(copy.from_pitch));
  log("%s%s device %d stream %u %zu bytes %s", valid ? "" : "refused ", function, current_device(), stream_number(handle), bytes, copy_kinds[int(kind)]);
  if (!valid) return fail(cudaErrorInvalidValue);
  int device = from.place == Place::device ? from.device : to.place == Place::device ? to.device : current_device();
  count(device, [&](Counts& c) { c.copies[int(kind)].add(bytes); });
  run_in_order(stream, copy, kind, blocking);
  return cudaSuccess;
}

Copy one_row(void* to, const void* from, size_t bytes) { return {static_cast<char*>(to), static_cast<const char*>(from), bytes}; }

} // namespace
} // namespace simulator

using namespace simulator;

extern "C" {

// --- allocation ----------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** address, size_t bytes) {
  *address = bytes ? allocate_on_device(bytes, current_device()) : nullptr;
  return *address || !bytes ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void* address) {
  if (!address) return cudaSuccess;
  auto owner = locate(address);
  if (owner.place != Place::device) return fail(cudaErrorInvalidValue);
  wait_for_device(owner.device); // the driver does so before it takes memory back
  return free_on_device(address) ? cudaSuccess : fail(cudaErrorInvalidValue);
}

cudaError_t cudaMallocAsync(void** address, size_t bytes, cudaStream_t) { return cudaMalloc(address, bytes); }

cudaError_t cudaFreeAsync(void* address, cudaStream_t handle) {
  auto stream = find_stream(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  if (address) submit(stream, [=] { free_on_device(address); });
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
  *address = allocate_pinned(bytes);
  if (!*address) return fail(cudaErrorMemoryAllocation);
  log("cudaHostAlloc %zu bytes", bytes);
  count(current_device(), [&](Counts& c) { c.pinned_allocations.add(bytes); });
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* address) { return !address || free_pinned(address) ? cudaSuccess : fail(cudaErrorInvalidValue); }

cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
  register_pinned(address, bytes);
  count(current_device(), [&](Counts& c) { c.pinned_allocations.add(bytes); });
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* address) { return unregister_pinned(address) ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered); }

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  *attributes = {};
  auto [place, device] = locate(address);
  auto* pointer = const_cast<void*>(address);
  constexpr int no_device = -2;
  switch (place) {
    case Place::device:
      attributes->type = cudaMemoryTypeDevice;
      attributes->device = device;
      attributes->devicePointer = pointer;
      break;
    case Place::pinned:
      attributes->type = cudaMemoryTypeHost;
      attributes->device = current_device();
      attributes->devicePointer = attributes->hostPointer = pointer;
      break;
    case Place::pageable:
      attributes->type = cudaMemoryTypeUnregistered;
      attributes->device = no_device;
      attributes->hostPointer = pointer;
  }
  return cudaSuccess;
}

// --- copies --------------------------------------------------------------------------------------

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return copy("cudaMemcpyAsync", one_row(to, from, bytes), kind, stream, false);
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return copy("cudaMemcpy", one_row(to, from, bytes), kind, nullptr, true);
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return copy("cudaMemcpyPeerAsync", one_row(to, from, bytes), cudaMemcpyDeviceToDevice, stream, false);
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
  Copy rows{static_cast<char*>(to), static_cast<const char*>(from), width, height, to_pitch, from_pitch};
  return copy("cudaMemcpy2DAsync", rows, kind, stream, false);
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t handle) {
  auto stream = find_stream(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  if (!is_allocated(to, bytes)) return fail(cudaErrorInvalidValue);
  log("cudaMemsetAsync device %d stream %u %zu bytes", current_device(), stream_number(handle), bytes);
  count(current_device(), [&](Counts& c) { c.memsets.add(bytes); });
  submit(stream, [=, at = epoch()] { set_bytes(to, value, bytes, at); });
  return cudaSuccess;
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, nullptr); }

// --- pools: cudaMallocAsync works as cudaMalloc does, so a pool has nothing to tell --------------

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  *pool = reinterpret_cast<cudaMemPool_t>(uintptr_t(0x1000 + device));
  return is_device(device) ? cudaSuccess : fail(cudaErrorInvalidDevice);
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  memset(value, 0, sizeof(uint64_t));
  return cudaSuccess;
}

} // extern "C"
