// Device memory: addresses that the host cannot touch, blocks that remember who uses them, and the allocator.
//
// A device address lies in a reserved range that is never mapped, so a host access is a SIGSEGV. Kernels reach the
// same bytes through a second mapping, the shadow, at a constant distance: no protection changes per kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <c10/core/CachingDeviceAllocator.h>

#include "clocks.h"
#include "gpu_library.h"
#include "simulated_accelerator.h"
#include "streams.h"

namespace trainyard::simulated {

struct AddressRange {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  bool contains(const void* address) const {
    auto value = reinterpret_cast<uintptr_t>(address);
    return begin <= value && value < end;
  }
};

// Reserves the address ranges; called once by install.
void reserve_device_memory();

c10::DeviceAllocator* device_allocator();

const AddressRange& device_addresses();
c10::DeviceIndex device_of_address(const void* address);

// Where kernels find the bytes of a device address.
void* shadow(const void* address);

// Throws a hazard if a launch may not make this access, else records it. Needs clock_mutex().
void check_access(Stream& stream, const std::string& op, const Access& access, uint64_t time);

// The block stays reserved until what the stream has launched by the time of its release is over.
void record_stream(const c10::DataPtr& pointer, Stream& stream);

// Makes released blocks available that waited for other streams and that the host now knows to be unused.
void reuse_freed_blocks();

// As CUDA's allocator: the observer is told of every allocation and release, and `bytes` may be reserved at most.
void observe_memory(const MemoryObserver& observer);
void limit_memory(int device, uint64_t bytes);

MemoryCounters memory_counters(int device);
void reset_memory_peak(int device);

} // namespace trainyard::simulated
