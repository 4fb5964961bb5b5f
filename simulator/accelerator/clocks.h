// Vector clocks, and the race check over byte ranges that is built on them.
//
// Each stream counts its launches. A clock holds one count per stream: "the launches of stream i up to here are over".
// Recording an event copies its stream's clock, waiting for an event joins that copy into the waiting stream's clock,
// and a host synchronization joins it into the host's. An access is ordered after an older one if its stream's clock
// covers the older launch. Nothing depends on timing, so a missing edge is found whenever its line runs.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace trainyard::simulated {

// Guards clocks, blocks of memory, counters and hazards. Recursive because deleters of tensors take it and may run
// anywhere. Nothing may wait for a stream while holding it.
std::recursive_mutex& clock_mutex();
using ClockLock = std::lock_guard<std::recursive_mutex>;

class Clock {
 public:
  void join(const Clock& other);
  void raise(int stream, uint64_t time);
  uint64_t tick(int stream);
  bool covers(int stream, uint64_t time) const;
  bool covers(const Clock& other) const;
  uint64_t time(int stream) const { return times_.at(stream); }
  bool empty() const { return times_.empty(); }

 private:
  std::vector<uint64_t> times_; // by stream number
};

// What a kernel does to the memory of one operand.
struct Access {
  const void* data = nullptr; // device address
  size_t bytes = 0;           // from the first to the last element, gaps included
  bool writes = false;
  int device = -1; // of the tensor; -1 if unknown
};

// An access that a launch has made.
struct PastAccess {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  bool writes = false;
  int stream = 0;
  uint64_t time = 0;
  std::string op;

  bool overlaps(uintptr_t other_begin, uintptr_t other_end) const { return begin < other_end && other_begin < end; }
};

// The accesses to one block of memory that a later launch could race with.
class AccessHistory {
 public:
  // The first recorded access that `access`, made by a stream with the clock `known`, is not ordered after.
  const PastAccess* conflict(const PastAccess& access, const Clock& known) const;

  // Records an access that has no conflict, and drops those that it makes redundant.
  void add(PastAccess access, const Clock& host);

  const std::vector<PastAccess>& accesses() const { return accesses_; }

 private:
  std::vector<PastAccess> accesses_;
};

} // namespace trainyard::simulated
