#include "pinned.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>

#include <c10/util/Exception.h>

namespace trainyard::simulated {
namespace {

constexpr size_t kAddresses = size_t(64) << 30;
constexpr size_t kPage = 4096;

struct Use {
  int stream;
  uint64_t time;
  bool writes;
};

struct PinnedBlock {
  char* host = nullptr;
  char* device = nullptr;
  size_t size = 0;
  int protection = PROT_READ | PROT_WRITE; // of the host's view
  bool released = false;
  std::vector<Use> uses;

  void protect(int wanted) {
    if (wanted != protection) {
      TORCH_CHECK(mprotect(host, size, wanted) == 0, "simulated accelerator: mprotect failed");
      protection = wanted;
    }
  }
};

// Guarded by clock_mutex().
struct PinnedMemory {
  AddressRange addresses;
  size_t used_addresses = 0;
  std::map<uintptr_t, PinnedBlock*> blocks; // by the host's address; never unmapped
  std::map<size_t, std::vector<PinnedBlock*>> free;
};

PinnedMemory& pinned() {
  static auto* pinned = new PinnedMemory();
  return *pinned;
}

PinnedBlock* block_at(const void* address) {
  if (!pinned().addresses.contains(address)) {
    return nullptr;
  }
  auto next = pinned().blocks.upper_bound(reinterpret_cast<uintptr_t>(address));
  return next == pinned().blocks.begin() ? nullptr : std::prev(next)->second;
}

// The host may read what the device reads, and may not touch what the device writes.
int allowed(const std::vector<Use>& uses) {
  int protection = PROT_READ | PROT_WRITE;
  for (const auto& use : uses) {
    protection &= use.writes ? PROT_NONE : PROT_READ;
  }
  return protection;
}

PinnedBlock* map_block(size_t size) {
  auto& all = pinned();
  TORCH_CHECK(all.used_addresses + size <= kAddresses, "simulated accelerator: out of pinned memory");
  int fd = static_cast<int>(syscall(SYS_memfd_create, "pinned memory", 0));
  TORCH_CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(size)) == 0, "simulated accelerator: memfd_create failed");
  auto* block = new PinnedBlock();
  block->size = size;
  auto* where = reinterpret_cast<void*>(all.addresses.begin + all.used_addresses);
  void* host = mmap(where, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
  void* device = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd); // the mappings keep the memory
  TORCH_CHECK(host != MAP_FAILED && device != MAP_FAILED, "simulated accelerator: cannot map pinned memory");
  block->host = static_cast<char*>(host);
  block->device = static_cast<char*>(device);
  all.used_addresses += size;
  all.blocks[reinterpret_cast<uintptr_t>(host)] = block;
  return block;
}

void release_block(void* context) {
  ClockLock lock(clock_mutex());
  auto* block = static_cast<PinnedBlock*>(context);
  if (block->uses.empty()) {
    pinned().free[block->size].push_back(block);
  } else {
    block->released = true; // as CUDA's host allocator, which waits for events of the copies
  }
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    ClockLock lock(clock_mutex());
    auto size = (std::max<size_t>(bytes, 1) + kPage - 1) / kPage * kPage;
    auto& free = pinned().free[size];
    PinnedBlock* block;
    if (free.empty()) {
      block = map_block(size);
    } else {
      block = free.back();
      free.pop_back();
    }
    return {block->host, block, &release_block, c10::Device(c10::kCPU)};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

} // namespace

void reserve_pinned_memory() {
  void* begin = mmap(nullptr, kAddresses, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(begin != MAP_FAILED, "simulated accelerator: cannot reserve addresses for pinned memory");
  auto address = reinterpret_cast<uintptr_t>(begin);
  pinned().addresses = {address, address + kAddresses};
}

c10::Allocator* pinned_allocator() {
  static auto* allocator = new PinnedAllocator();
  return allocator;
}

const AddressRange& pinned_addresses() {
  return pinned().addresses;
}

bool is_pinned(const void* address) {
  ClockLock lock(clock_mutex());
  return block_at(address) != nullptr;
}

void* device_view(const void* address) {
  ClockLock lock(clock_mutex());
  auto* block = block_at(address);
  TORCH_INTERNAL_ASSERT(block != nullptr);
  return block->device + (static_cast<const char*>(address) - block->host);
}

void use_pinned(const void* address, Stream& stream, bool writes) {
  ClockLock lock(clock_mutex());
  auto* block = block_at(address);
  TORCH_INTERNAL_ASSERT(block != nullptr);
  block->uses.push_back({stream.number, stream.clock.time(stream.number), writes});
  block->protect(allowed(block->uses));
}

void release_pinned_uses() {
  ClockLock lock(clock_mutex());
  for (auto& [address, block] : pinned().blocks) {
    auto over = [](const Use& use) { return host_clock().covers(use.stream, use.time); };
    block->uses.erase(std::remove_if(block->uses.begin(), block->uses.end(), over), block->uses.end());
    block->protect(allowed(block->uses));
    if (block->released && block->uses.empty()) {
      block->released = false;
      pinned().free[block->size].push_back(block);
    }
  }
}

} // namespace trainyard::simulated
