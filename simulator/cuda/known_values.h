// Which bytes of device memory hold a value that a copy wrote, and in which epoch.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>

namespace simulator {

class KnownValues {
 public:
  void write(uintptr_t start, size_t bytes, uint64_t epoch);
  void forget(uintptr_t start, size_t bytes);
  // True where all bytes were written in this epoch.
  bool known(uintptr_t start, size_t bytes, uint64_t epoch) const;

 private:
  struct Range {
    uintptr_t end;
    uint64_t epoch;
  };
  void drop_old(uint64_t epoch);
  std::map<uintptr_t, Range> ranges_; // do not overlap
};

} // namespace simulator
