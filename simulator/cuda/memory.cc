#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

#include "address_space.h"
#include "counters.h"
#include "host_access.h"
#include "known_values.h"
#include "log.h"
#include "settings.h"

namespace simulator {
namespace {

// Reads of at most this many bytes are values that programs steer by.
constexpr size_t small_read = 64;
constexpr size_t host_page = 4096;

struct Block {
  size_t bytes;
  int device;
  uint64_t charged; // what the device gives up for it; 0 where a handle of created memory is charged
  uint64_t handle;  // of created memory, or 0
};
struct Pinned {
  size_t bytes;
  bool owned;
};
struct Created {
  size_t bytes;
  int device;
  int references; // the program's handles and the mappings
};

struct Memory {
  std::mutex mutex;
  AddressSpace addresses;
  KnownValues values;
  std::map<uintptr_t, Block> blocks;
  std::map<uintptr_t, Pinned> pinned;
  std::unordered_map<uint64_t, Created> created;
  std::map<uintptr_t, size_t> reserved;
  uint64_t next_handle = 1;
  uint64_t held[max_devices] = {};
  uint64_t held_by_all = 0;
  std::atomic<uint64_t> epoch{0};
};

Memory& memory() {
  static Memory& m = *new Memory();
  return m;
}

constexpr size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

template <typename Map>
typename Map::iterator holder(Map& map, uintptr_t address) {
  auto it = map.upper_bound(address);
  if (it == map.begin()) return map.end();
  --it;
  return address < it->first + it->second.bytes ? it : map.end();
}

bool charge(Memory& m, int device, uint64_t bytes) {
  if (m.held[device] + bytes > settings().memory) return false;
  m.held[device] += bytes;
  m.held_by_all += bytes;
  count_held(device, m.held[device], m.held_by_all);
  count(device, [&](Counts& c) { c.segments_allocated.add(bytes); });
  return true;
}

void discharge(Memory& m, int device, uint64_t bytes) {
  m.held[device] -= bytes;
  m.held_by_all -= bytes;
  count(device, [&](Counts& c) { c.segments_freed.add(bytes); });
}

void remove(Memory& m, std::map<uintptr_t, Block>::iterator block) {
  auto [start, b] = *block;
  m.blocks.erase(block);
  m.values.forget(start, b.bytes);
  m.addresses.clear(start, b.bytes);
}

bool drop_reference(Memory& m, uint64_t handle) {
  auto it = m.created.find(handle);
  if (it == m.created.end()) return false;
  if (--it->second.references == 0) {
    discharge(m, it->second.device, it->second.bytes);
    m.created.erase(it);
  }
  return true;
}

bool covered(Memory& m, uintptr_t address, size_t bytes) {
  // Segments that grow consist of many mapped pieces, one after the other.
  for (uintptr_t at = address, end = address + bytes; at < end;) {
    auto it = holder(m.blocks, at);
    if (it == m.blocks.end()) return false;
    at = it->first + it->second.bytes;
  }
  return true;
}

// From device to device, page by page: those never written are zeros on both sides and stay so.
void move_on_devices(Memory& m, uintptr_t to, uintptr_t from, size_t bytes) {
  while (bytes > 0) {
    size_t n = std::min({bytes, AddressSpace::page - from % AddressSpace::page, AddressSpace::page - to % AddressSpace::page});
    if (m.addresses.is_touched(from)) {
      m.addresses.touch(to, n);
      memmove(m.addresses.backing(to), m.addresses.backing(from), n);
    } else if (m.addresses.is_touched(to)) {
      m.addresses.clear(to, n);
    }
    to += n, from += n, bytes -= n;
  }
}

bool ranges_overlap(uintptr_t a, uintptr_t b, size_t bytes) { return a < b + bytes && b < a + bytes; }

} // namespace

Location locate(const void* address) {
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  if (auto it = holder(m.blocks, uintptr_t(address)); it != m.blocks.end()) return {Place::device, it->second.device};
  if (holder(m.pinned, uintptr_t(address)) != m.pinned.end()) return {Place::pinned, -1};
  return {Place::pageable, -1};
}

bool is_allocated(const void* address, size_t bytes) {
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  auto at = uintptr_t(address);
  if (AddressSpace::holds(at)) return covered(m, at, bytes);
  auto it = holder(m.pinned, at);
  return it == m.pinned.end() || at + bytes <= it->first + it->second.bytes;
}

std::optional<Span> allocation_of(const void* address) {
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  auto it = holder(m.blocks, uintptr_t(address));
  if (it == m.blocks.end()) return std::nullopt;
  return Span{it->first, it->second.bytes};
}

void* allocate_on_device(size_t bytes, int device) {
  report_host_access();
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  // Like a driver: large allocations have pages of 2 MiB, small ones share them.
  bool large = bytes >= (1 << 20);
  size_t charged = round_up(std::max<size_t>(bytes, 1), large ? granularity : 512);
  if (!charge(m, device, charged)) return nullptr;
  uintptr_t start = m.addresses.take(round_up(charged, host_page), large ? granularity : host_page);
  if (!start) {
    discharge(m, device, charged);
    return nullptr;
  }
  m.blocks[start] = {round_up(std::max<size_t>(bytes, 1), 512), device, charged, 0};
  log("cudaMalloc device %d, %zu bytes", device, bytes);
  return reinterpret_cast<void*>(start);
}

bool free_on_device(void* address) {
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  auto it = m.blocks.find(uintptr_t(address));
  if (it == m.blocks.end() || it->second.handle) return false;
  Block block = it->second;
  remove(m, it);
  discharge(m, block.device, block.charged);
  m.addresses.give_back(uintptr_t(address), round_up(block.charged, host_page));
  log("cudaFree device %d, %zu bytes", block.device, block.bytes);
  return true;
}

uint64_t held_by_device(int device) {
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  return m.held[device];
}

uint64_t held_by_all_devices() {
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  return m.held_by_all;
}

// --- pinned memory -------------------------------------------------------------------------------

void* allocate_pinned(size_t bytes) {
  size_t length = round_up(std::max<size_t>(bytes, 1), host_page);
  void* p = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  m.pinned[uintptr_t(p)] = {length, true};
  return p;
}

bool free_pinned(void* address) {
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  auto it = m.pinned.find(uintptr_t(address));
  if (it == m.pinned.end() || !it->second.owned) return false;
  munmap(address, it->second.bytes);
  m.pinned.erase(it);
  return true;
}

void register_pinned(void* address, size_t bytes) {
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  m.pinned[uintptr_t(address)] = {bytes, false};
}

bool unregister_pinned(void* address) {
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  return m.pinned.erase(uintptr_t(address)) == 1;
}

// --- virtual memory ------------------------------------------------------------------------------

void* reserve_addresses(size_t bytes, size_t alignment) {
  report_host_access();
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  uintptr_t start = m.addresses.take(bytes, std::max(alignment, granularity));
  if (start) m.reserved[start] = bytes;
  return reinterpret_cast<void*>(start);
}

bool free_addresses(void* address, size_t bytes) {
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  auto it = m.reserved.find(uintptr_t(address));
  if (it == m.reserved.end() || it->second != bytes) return false;
  m.reserved.erase(it);
  m.addresses.give_back(uintptr_t(address), bytes);
  return true;
}

uint64_t create_memory(size_t bytes, int device) {
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  if (!charge(m, device, bytes)) return 0;
  m.created[m.next_handle] = {bytes, device, 1};
  log("cuMemCreate device %d, %zu bytes", device, bytes);
  return m.next_handle++;
}

bool release_memory(uint64_t handle) {
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  return drop_reference(m, handle);
}

bool map_memory(void* address, size_t bytes, uint64_t handle) {
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  auto it = m.created.find(handle);
  if (it == m.created.end() || it->second.bytes != bytes || !AddressSpace::holds(uintptr_t(address))) return false;
  ++it->second.references;
  m.blocks[uintptr_t(address)] = {bytes, it->second.device, 0, handle};
  return true;
}

bool unmap_memory(void* address, size_t bytes) {
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  uintptr_t end = uintptr_t(address) + bytes;
  auto it = m.blocks.find(uintptr_t(address));
  if (it == m.blocks.end() || !it->second.handle) return false;
  while (it != m.blocks.end() && it->first < end) {
    auto next = std::next(it);
    uint64_t handle = it->second.handle;
    remove(m, it);
    drop_reference(m, handle);
    it = next;
  }
  return true;
}

uint64_t retain_memory_at(void* address) {
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  auto it = holder(m.blocks, uintptr_t(address));
  if (it == m.blocks.end() || !it->second.handle) return 0;
  ++m.created[it->second.handle].references;
  return it->second.handle;
}

// --- values --------------------------------------------------------------------------------------

uint64_t epoch() { return memory().epoch; }
void note_launch() { ++memory().epoch; }

void copy_bytes(void* to, const void* from, size_t bytes, uint64_t epoch) {
  if (!bytes || to == from) return;
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  auto target = uintptr_t(to), source = uintptr_t(from);
  bool to_device = AddressSpace::holds(target), from_device = AddressSpace::holds(source);
  bool known = !from_device || m.values.known(source, bytes, epoch);
  if (!known && !to_device && bytes <= small_read) {
    log("%zu unknown bytes read as zeros", bytes);
    memset(to, 0, bytes);
    return;
  }
  if (to_device && from_device && !ranges_overlap(target, source, bytes)) {
    move_on_devices(m, target, source, bytes);
  } else {
    if (to_device) m.addresses.touch(target, bytes);
    memmove(to_device ? AddressSpace::backing(target) : to, from_device ? AddressSpace::backing(source) : from, bytes);
  }
  if (!to_device) return;
  if (known) m.values.write(target, bytes, epoch);
  else m.values.forget(target, bytes);
}

void set_bytes(void* to, int value, size_t bytes, uint64_t epoch) {
  if (!bytes) return;
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  auto target = uintptr_t(to);
  if (!AddressSpace::holds(target)) {
    memset(to, value, bytes);
    return;
  }
  m.values.write(target, bytes, epoch);
  if (value == 0) {
    m.addresses.clear(target, bytes);
    return;
  }
  m.addresses.touch(target, bytes);
  memset(AddressSpace::backing(target), value, bytes);
}

void forget_bytes(const void* address, size_t bytes) {
  if (!bytes) return;
  auto& m = memory();
  std::lock_guard lock(m.mutex);
  m.values.forget(uintptr_t(address), bytes);
}

char* backing(const void* address) {
  auto at = uintptr_t(address);
  return AddressSpace::holds(at) ? AddressSpace::backing(at) : static_cast<char*>(const_cast<void*>(address));
}

std::optional<int> try_device_of(uintptr_t address) {
  auto& m = memory();
  // The thread that faulted may hold the lock itself, so do not insist.
  std::unique_lock lock(m.mutex, std::try_to_lock);
  if (!lock) return std::nullopt;
  auto it = holder(m.blocks, address);
  return it == m.blocks.end() ? std::nullopt : std::optional(it->second.device);
}

} // namespace simulator
