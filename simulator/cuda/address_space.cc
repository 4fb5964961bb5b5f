#include "address_space.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>

namespace simulator {
namespace {

struct Arena {
  uintptr_t start;
  size_t bytes;
  char* backing;
};

// A signal handler reads these, so they only ever grow and are read without a lock.
constexpr int max_arenas = 64;
Arena arenas[max_arenas];
std::atomic<int> arena_count{0};

int arena_of(uintptr_t address) {
  for (int i = 0; i < arena_count; ++i) {
    if (address - arenas[i].start < arenas[i].bytes) return i;
  }
  return -1;
}

constexpr uintptr_t round_up(uintptr_t value, size_t to) { return (value + to - 1) / to * to; }

void* map(size_t bytes, int protection) {
  void* p = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}

} // namespace

bool AddressSpace::holds(uintptr_t address) { return arena_of(address) >= 0; }

char* AddressSpace::backing(uintptr_t address) {
  auto& arena = arenas[arena_of(address)];
  return arena.backing + (address - arena.start);
}

bool AddressSpace::grow(size_t bytes) {
  if (arena_count == max_arenas) return false;
  // An expandable segment reserves more than a whole device for every stream: be generous, and modest if refused.
  for (size_t size = std::max<size_t>(round_up(bytes, page), 1ull << 40); size >= bytes; size /= 2) {
    void* front = map(size + page, PROT_NONE);
    void* back = front ? map(size, PROT_READ | PROT_WRITE) : nullptr;
    if (!back) {
      if (front) munmap(front, size + page);
      continue;
    }
    madvise(back, size, MADV_DONTDUMP);
    madvise(back, size, MADV_NOHUGEPAGE); // a copy of a few bytes should not cost 2 MiB
    uintptr_t start = round_up(uintptr_t(front), page);
    arenas[arena_count] = {start, size, static_cast<char*>(back)};
    arena_count.fetch_add(1);
    touched_.emplace_back(size / page + 1);
    free_[start] = size;
    return true;
  }
  return false;
}

uintptr_t AddressSpace::take(size_t bytes, size_t alignment) {
  for (auto& [start, size] : free_) {
    uintptr_t from = start, to = start + size, at = round_up(from, alignment);
    if (at + bytes > to) continue;
    free_.erase(from);
    if (at > from) free_[from] = at - from;
    if (at + bytes < to) free_[at + bytes] = to - at - bytes;
    return at;
  }
  return grow(bytes + alignment) ? take(bytes, alignment) : 0;
}

void AddressSpace::give_back(uintptr_t start, size_t bytes) {
  auto next = free_.lower_bound(start);
  // Ranges of one arena join again; those of two arenas may touch by chance and stay apart.
  if (next != free_.end() && start + bytes == next->first && arena_of(start) == arena_of(next->first)) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == start && arena_of(start) == arena_of(before->first)) {
      before->second += bytes;
      return;
    }
  }
  free_[start] = bytes;
}

bool AddressSpace::is_touched(uintptr_t address) const {
  int i = arena_of(address);
  return touched_[i][(address - arenas[i].start) / page];
}

void AddressSpace::touch(uintptr_t start, size_t bytes) {
  int i = arena_of(start);
  size_t first = (start - arenas[i].start) / page, last = (start + bytes - 1 - arenas[i].start) / page;
  for (size_t p = first; p <= last; ++p) touched_[i][p] = true;
}

void AddressSpace::clear(uintptr_t start, size_t bytes) {
  constexpr size_t host_page = 4096;
  uintptr_t end = start + bytes, from = std::min(round_up(start, host_page), end), to = std::max(from, end / host_page * host_page);
  memset(backing(start), 0, from - start);
  if (to > from) madvise(backing(from), to - from, MADV_DONTNEED);
  memset(backing(end - 1) - (end - 1 - to), 0, end - to);
  // Only pages that lie inside as a whole are known to be clean.
  int i = arena_of(start);
  for (size_t p = round_up(start - arenas[i].start, page) / page; (p + 1) * page <= end - arenas[i].start; ++p) touched_[i][p] = false;
}

} // namespace simulator
