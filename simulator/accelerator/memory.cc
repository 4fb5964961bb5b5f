#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <set>

#include <c10/util/Exception.h>

#include "report.h"

namespace trainyard::simulated {
namespace {

constexpr size_t kBytesPerDevice = size_t(64) << 30; // of address space
constexpr size_t kSmallRounding = 512;               // as CUDA's allocator
constexpr size_t kLargeRounding = size_t(2) << 20;
constexpr size_t kLargeBlock = size_t(1) << 20;
constexpr unsigned char kPoison = 0xFF; // NaN in every floating-point type, -1 in every signed integer type

struct Block {
  uintptr_t begin = 0;
  size_t requested = 0;
  size_t size = 0;     // requested, rounded: what counts as allocated
  size_t capacity = 0; // size, rounded so that freed blocks fit later requests
  c10::DeviceIndex device = 0;
  int stream = 0; // that it was allocated on
  uint64_t number = 0;
  std::set<int> recorded_streams;
  AccessHistory history;
};

// A free block belongs to the stream it was allocated on: only that stream's order makes reuse safe.
struct FreeBlocks {
  std::map<std::pair<int, size_t>, std::vector<uintptr_t>> by_stream_and_capacity;
};

// A released block that other streams were still using.
struct DelayedBlock {
  uintptr_t begin;
  size_t capacity;
  int stream;
  Clock until;
};

struct DeviceMemory {
  uint64_t limit = 0; // in bytes; 0: the memory of the device
  size_t used_addresses = 0;
  FreeBlocks free;
  std::vector<DelayedBlock> delayed;
  c10::CachingAllocator::Stat allocated;
  c10::CachingAllocator::Stat reserved;
  c10::CachingAllocator::Stat requested;
  c10::CachingAllocator::Stat allocations;
  int64_t out_of_memory = 0;
};

// Guarded by clock_mutex().
struct Memory {
  AddressRange addresses;
  ptrdiff_t shadow_distance = 0;
  std::vector<DeviceMemory> devices;
  std::map<uintptr_t, Block*> blocks; // live, by address
  uint64_t next_number = 0;
  std::optional<MemoryObserver> observer;
};

Memory& memory() {
  static auto* memory = new Memory();
  return *memory;
}

char* map_range(size_t bytes, int protection) {
  void* address = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(address != MAP_FAILED, "simulated accelerator: cannot reserve ", bytes, " bytes of address space");
  return static_cast<char*>(address);
}

size_t round_up(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

Block* block_at(const void* address) {
  auto value = reinterpret_cast<uintptr_t>(address);
  auto next = memory().blocks.upper_bound(value);
  if (next == memory().blocks.begin()) {
    return nullptr;
  }
  auto* block = std::prev(next)->second;
  return value < block->begin + block->capacity ? block : nullptr;
}

std::string describe(const Block& block) {
  return c10::str("block ", block.number, " (", block.requested, " bytes, allocated on ",
                  stream_name(block.stream, block.device), ")");
}

// Overwrites memory in the order of the stream that owns it.
void poison(uintptr_t begin, size_t bytes, Stream& owner) {
  auto* bytes_of_block = shadow(reinterpret_cast<void*>(begin));
  owner.run_in_order([=] { std::memset(bytes_of_block, kPoison, bytes); });
}

} // namespace

// --- addresses ------------------------------------------------------------------------------------
void reserve_device_memory() {
  auto& all = memory();
  size_t bytes = kBytesPerDevice * options().devices;
  auto* addresses = map_range(bytes, PROT_NONE);
  auto* shadow = map_range(bytes, PROT_READ | PROT_WRITE);
  all.addresses = {reinterpret_cast<uintptr_t>(addresses), reinterpret_cast<uintptr_t>(addresses) + bytes};
  all.shadow_distance = shadow - addresses;
  all.devices.resize(options().devices);
}

const AddressRange& device_addresses() {
  return memory().addresses;
}

c10::DeviceIndex device_of_address(const void* address) {
  auto offset = reinterpret_cast<uintptr_t>(address) - memory().addresses.begin;
  return static_cast<c10::DeviceIndex>(offset / kBytesPerDevice);
}

void* shadow(const void* address) {
  if (address == nullptr) {
    return nullptr;
  }
  TORCH_INTERNAL_ASSERT(memory().addresses.contains(address));
  return static_cast<char*>(const_cast<void*>(address)) + memory().shadow_distance;
}

// --- access ---------------------------------------------------------------------------------------
void check_access(Stream& stream, const std::string& op, const Access& access, uint64_t time) {
  if (access.bytes == 0) {
    return;
  }
  const char* verb = access.writes ? " writes " : " reads ";
  auto where = op + " on " + stream_name(stream.number, stream.device);
  auto* block = block_at(access.data);
  if (block == nullptr) {
    throw_hazard(c10::str("use after free: ", where, verb, access.bytes, " bytes of cuda:",
                          static_cast<int>(stream.device), " that were freed or never allocated"));
  }
  if (access.device >= 0 && access.device != block->device) {
    throw_hazard(c10::str("wrong device: ", where, verb, "a tensor of cuda:", access.device, " whose memory, ",
                          describe(*block), ", belongs to cuda:", static_cast<int>(block->device),
                          "; it was allocated without a device guard"));
  }
  auto begin = reinterpret_cast<uintptr_t>(access.data);
  PastAccess now{begin, begin + access.bytes, access.writes, stream.number, time, op};
  if (const auto* past = block->history.conflict(now, stream.clock)) {
    auto other = stream_name(past->stream, stream.device);
    throw_hazard(c10::str("stream race on cuda:", static_cast<int>(block->device), ": ", where, verb, access.bytes,
                          " bytes that ", past->op, " on ", other, past->writes ? " writes" : " reads", ", in ",
                          describe(*block), "; no event orders ", stream_name(stream.number, stream.device), " after ",
                          other));
  }
  block->history.add(std::move(now), host_clock());
}

void record_stream(const c10::DataPtr& pointer, Stream& stream) {
  ClockLock lock(clock_mutex());
  if (auto* block = block_at(pointer.get())) {
    block->recorded_streams.insert(stream.number);
  }
}

// --- release --------------------------------------------------------------------------------------
namespace {

void make_available(c10::DeviceIndex device, uintptr_t begin, size_t capacity, int stream) {
  memory().devices[device].free.by_stream_and_capacity[{stream, capacity}].push_back(begin);
}

// The accesses of other streams that the owner is not ordered after; of those, the hazards are reported.
Clock remaining_uses(const Block& block) {
  Clock known = stream_by_number(block.stream).clock;
  known.join(host_clock());
  Clock until;
  for (const auto& past : block.history.accesses()) {
    if (past.stream == block.stream || known.covers(past.stream, past.time)) {
      continue;
    }
    if (block.recorded_streams.count(past.stream) > 0) {
      until.raise(past.stream, past.time);
      continue;
    }
    auto user = stream_name(past.stream, block.device), owner = stream_name(block.stream, block.device);
    report_hazard(c10::str("freed while in use on cuda:", static_cast<int>(block.device), ": ", describe(block),
                           " is freed while ", past.op, " on ", user, " may still ", past.writes ? "write" : "read",
                           " it; record_stream is missing, and no event orders ", owner, " after ", user));
  }
  return until;
}

void release_block(void* context) {
  ClockLock lock(clock_mutex());
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  auto& device = memory().devices[block->device];
  device.allocated.decrease(block->size);
  device.requested.decrease(block->requested);
  device.allocations.decrease(1);
  if (const auto& observer = memory().observer) {
    observer->released(reinterpret_cast<void*>(block->begin));
  }
  auto until = remaining_uses(*block);
  memory().blocks.erase(block->begin);
  if (!until.empty()) {
    device.delayed.push_back({block->begin, block->capacity, block->stream, until});
    return;
  }
  poison(block->begin, block->requested, stream_by_number(block->stream));
  make_available(block->device, block->begin, block->capacity, block->stream);
}

} // namespace

void reuse_freed_blocks() {
  ClockLock lock(clock_mutex());
  for (size_t device = 0; device < memory().devices.size(); ++device) {
    auto& delayed = memory().devices[device].delayed;
    auto over = [&](const DelayedBlock& block) {
      if (!host_clock().covers(block.until)) {
        return false;
      }
      poison(block.begin, block.capacity, stream_by_number(block.stream));
      make_available(static_cast<c10::DeviceIndex>(device), block.begin, block.capacity, block.stream);
      return true;
    };
    delayed.erase(std::remove_if(delayed.begin(), delayed.end(), over), delayed.end());
  }
}

// --- allocation -----------------------------------------------------------------------------------
namespace {

void check_capacity(DeviceMemory& memory, int device, size_t bytes, size_t size) {
  auto capacity = memory.limit != 0 ? memory.limit : options().memory_bytes;
  auto held = static_cast<uint64_t>(memory.allocated.current);
  if (capacity != 0 && held + size > capacity) {
    ++memory.out_of_memory;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", bytes, " bytes. GPU ", device,
                     " has a total capacity of ", capacity, " bytes of which ", capacity - held, " bytes are free.");
  }
}

uintptr_t take_addresses(DeviceMemory& memory_of_device, int device, int stream, size_t capacity) {
  auto& available = memory_of_device.free.by_stream_and_capacity[{stream, capacity}];
  if (!available.empty()) {
    auto begin = available.back(); // freed last: the one that a caching allocator hands out
    available.pop_back();
    return begin;
  }
  TORCH_CHECK_WITH(OutOfMemoryError, memory_of_device.used_addresses + capacity <= kBytesPerDevice,
                   "simulated accelerator: the address space of GPU ", device, " is exhausted");
  auto begin = memory().addresses.begin + device * kBytesPerDevice + memory_of_device.used_addresses;
  memory_of_device.used_addresses += capacity;
  memory_of_device.reserved.increase(capacity);
  poison(begin, capacity, stream_by_number(stream));
  return begin;
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    auto device = current_device();
    c10::Device result_device(kDeviceType, device);
    if (bytes == 0) {
      return {nullptr, result_device};
    }
    auto& stream = current_stream(device);
    ClockLock lock(clock_mutex());
    raise_reported_hazard();
    auto& memory_of_device = memory().devices.at(device);
    auto size = round_up(bytes, kSmallRounding);
    auto capacity = size < kLargeBlock ? size : round_up(size, kLargeRounding);
    check_capacity(memory_of_device, device, bytes, size);
    auto begin = take_addresses(memory_of_device, device, stream.number, capacity);
    auto* block = new Block{begin, bytes, size, capacity, device, stream.number, memory().next_number++, {}, {}};
    memory().blocks[begin] = block;
    memory_of_device.allocated.increase(size);
    memory_of_device.requested.increase(bytes);
    memory_of_device.allocations.increase(1);
    if (const auto& observer = memory().observer) {
      observer->allocated(reinterpret_cast<void*>(begin), bytes);
    }
    return {reinterpret_cast<void*>(begin), block, &release_block, result_device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    auto& stream = current_stream(device_of_address(to));
    launch(stream, "Allocator::copy_data", {{from, bytes, false}, {to, bytes, true}},
           [=] { std::memcpy(shadow(to), shadow(from), bytes); }, Run::MayQueue);
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    record_stream(pointer, find_stream(stream));
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    ClockLock lock(clock_mutex());
    const auto& from = memory().devices.at(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    stats.allocated_bytes[kAll] = stats.active_bytes[kAll] = from.allocated;
    stats.reserved_bytes[kAll] = from.reserved;
    stats.requested_bytes[kAll] = from.requested;
    stats.allocation[kAll] = stats.active[kAll] = from.allocations;
    stats.num_ooms = from.out_of_memory;
    return stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    ClockLock lock(clock_mutex());
    auto& of = memory().devices.at(device);
    for (auto* stat : {&of.allocated, &of.reserved, &of.requested, &of.allocations}) {
      stat->reset_accumulated();
    }
    of.out_of_memory = 0;
  }

  void resetPeakStats(c10::DeviceIndex device) override { reset_memory_peak(device); }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    ClockLock lock(clock_mutex());
    size_t total = options().memory_bytes != 0 ? options().memory_bytes : kBytesPerDevice;
    return {total - static_cast<size_t>(memory().devices.at(device).allocated.current), total};
  }
};

} // namespace

c10::DeviceAllocator* device_allocator() {
  static auto* allocator = new DeviceAllocator();
  return allocator;
}

void observe_memory(const MemoryObserver& observer) {
  ClockLock lock(clock_mutex());
  memory().observer = observer;
}

void limit_memory(int device, uint64_t bytes) {
  ClockLock lock(clock_mutex());
  memory().devices.at(device).limit = bytes;
}

MemoryCounters memory_counters(int device) {
  ClockLock lock(clock_mutex());
  const auto& allocated = memory().devices.at(device).allocated;
  return {static_cast<uint64_t>(allocated.current), static_cast<uint64_t>(allocated.peak)};
}

void reset_memory_peak(int device) {
  ClockLock lock(clock_mutex());
  auto& of = memory().devices.at(device);
  for (auto* stat : {&of.allocated, &of.reserved, &of.requested, &of.allocations}) {
    stat->reset_peak();
  }
}

} // namespace trainyard::simulated
