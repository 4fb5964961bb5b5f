#include "known_values.h"

#include <iterator>

namespace simulator {

void KnownValues::forget(uintptr_t start, size_t bytes) {
  uintptr_t end = start + bytes;
  auto it = ranges_.upper_bound(start);
  if (it != ranges_.begin() && std::prev(it)->second.end > start) --it;
  while (it != ranges_.end() && it->first < end) {
    auto [from, range] = *it;
    it = ranges_.erase(it);
    if (from < start) ranges_[from] = {start, range.epoch};
    if (range.end > end) ranges_[end] = range;
  }
}

void KnownValues::write(uintptr_t start, size_t bytes, uint64_t epoch) {
  forget(start, bytes);
  ranges_[start] = {start + bytes, epoch};
  drop_old(epoch);
}

bool KnownValues::known(uintptr_t start, size_t bytes, uint64_t epoch) const {
  auto it = ranges_.upper_bound(start);
  if (it == ranges_.begin()) return false;
  uintptr_t at = start;
  for (--it; it != ranges_.end() && it->first <= at && it->second.end > at && it->second.epoch == epoch; ++it) {
    at = it->second.end;
    if (at >= start + bytes) return true;
  }
  return false;
}

void KnownValues::drop_old(uint64_t epoch) {
  constexpr size_t many = 1 << 16;
  constexpr uint64_t long_ago = 1 << 16; // launches; no copy waits in a stream for that long
  if (ranges_.size() < many) return;
  std::erase_if(ranges_, [&](auto& entry) { return entry.second.epoch + long_ago < epoch; });
}

} // namespace simulator
