// Address ranges for device memory: pairs of mappings of equal size, one without access and one with the bytes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace simulator {

// Not thread-safe, but for `holds`, which a signal handler calls.
class AddressSpace {
 public:
  // 0 when the process has no addresses left.
  uintptr_t take(size_t bytes, size_t alignment);
  void give_back(uintptr_t start, size_t bytes);

  static bool holds(uintptr_t address);
  static char* backing(uintptr_t address);

  // Pages of the backing that were ever written. Copies of untouched pages are skipped, so that models of many
  // gigabytes move between buffers without filling the host's memory.
  bool is_touched(uintptr_t address) const;
  void touch(uintptr_t start, size_t bytes);
  // Back to zeros, and the host's memory back to the system.
  void clear(uintptr_t start, size_t bytes);

  static constexpr size_t page = 2 << 20;

 private:
  bool grow(size_t bytes);
  std::map<uintptr_t, size_t> free_;
  std::vector<std::vector<bool>> touched_; // per arena
};

} // namespace simulator
