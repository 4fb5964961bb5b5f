// Memory of the simulated devices and pinned memory of the host.
//
// A device address lies in a range without access, so that the host faults when it touches it. The bytes are in a second
// mapping of the same size, the backing, which only copies and small collectives use. Pages of both appear when touched:
// devices of 80 GiB cost nothing.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>

namespace simulator {

enum class Place { pageable, pinned, device };
struct Location {
  Place place;
  int device; // -1 on the host
};
Location locate(const void* address);

// False where the bytes go past the end of what was allocated. Pageable memory is the host's own affair.
bool is_allocated(const void* address, size_t bytes);

struct Span {
  uintptr_t start;
  size_t bytes;
};
// The allocation that holds a device address.
std::optional<Span> allocation_of(const void* address);

// Memory as cudaMalloc gives it; null when the device is full.
void* allocate_on_device(size_t bytes, int device);
bool free_on_device(void* address);

uint64_t held_by_device(int device);
uint64_t held_by_all_devices();

void* allocate_pinned(size_t bytes);
bool free_pinned(void* address);
void register_pinned(void* address, size_t bytes);
bool unregister_pinned(void* address);

// Virtual memory, as the allocator's expandable segments use it: addresses and memory are had apart and then joined.
constexpr size_t granularity = 2 << 20;
void* reserve_addresses(size_t bytes, size_t alignment);
bool free_addresses(void* address, size_t bytes);
uint64_t create_memory(size_t bytes, int device); // a handle; 0 when the device is full
bool release_memory(uint64_t handle);
bool map_memory(void* address, size_t bytes, uint64_t handle);
bool unmap_memory(void* address, size_t bytes);
uint64_t retain_memory_at(void* address); // the handle mapped there, held once more; 0 if there is none

// --- values ------------------------------------------------------------------------------------
// Kernels write nothing, so bytes on a device have a known value only from a copy until the next launch. The epoch is the
// number of launches so far; work that is done later than its call carries the epoch of the call.

uint64_t epoch();
void note_launch();

// Copies between any two places. A small read of unknown bytes gives zeros: a size or a flag that a kernel would have
// written is then harmless instead of stale.
void copy_bytes(void* to, const void* from, size_t bytes, uint64_t epoch);
void set_bytes(void* to, int value, size_t bytes, uint64_t epoch);
// The value becomes unknown, as after a collective that the simulator does not compute.
void forget_bytes(const void* address, size_t bytes);
// Where bytes really are. Host memory is where it says.
char* backing(const void* address);

} // namespace simulator
