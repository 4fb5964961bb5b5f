// What a program did, counted per device, per step and in total; written as JSON when the process ends.
#pragma once
#include <atomic>
#include <cstdint>
#include <iterator>

#include "settings.h"

namespace simulator {

struct Tally {
  std::atomic<uint64_t> calls{0}, bytes{0};
  void add(uint64_t more_bytes = 0) {
    calls.fetch_add(1, std::memory_order_relaxed);
    bytes.fetch_add(more_bytes, std::memory_order_relaxed);
  }
};

enum class CopyKind { host_to_device_pageable, host_to_device_pinned, device_to_host_pageable, device_to_host_pinned, device_to_device, host_to_host };
constexpr const char* copy_kinds[] = {"host_to_device_pageable", "host_to_device_pinned", "device_to_host_pageable",
                                      "device_to_host_pinned",   "device_to_device",      "host_to_host"};

enum class Synchronization { stream, event, device, blocking_copy };
constexpr const char* synchronizations[] = {"stream", "event", "device", "blocking_copy"};

enum class Communication { all_reduce, reduce, broadcast, all_gather, reduce_scatter, all_to_all, gather, scatter, send, recv };
constexpr const char* communications[] = {"all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "send", "recv"};

struct Counts {
  Tally launches, library_launches, memsets, pinned_allocations;
  Tally segments_allocated, segments_freed;
  Tally copies[std::size(copy_kinds)], synchronized[std::size(synchronizations)], communicated[std::size(communications)];
  std::atomic<uint64_t> peak_bytes{0}, waiting_microseconds{0};
};

// The counts of one device, and those of the step that is open, if one is.
Counts& device_counts(int device);
Counts* step_counts();

// Applies a change to every set of counts that a call on `device` belongs to.
template <typename Change>
void count(int device, Change change) {
  change(device_counts(device));
  if (Counts* step = step_counts()) change(*step);
}

void count_launch(int device);
void count_library_launch(int device);
void count_communication(int device, Communication kind, uint64_t bytes);
void count_synchronization(int device, Synchronization how, uint64_t waited_microseconds);
// The driver now holds `device_bytes` on the device and `process_bytes` on all devices.
void count_held(int device, uint64_t device_bytes, uint64_t process_bytes);

uint64_t now_nanoseconds();

} // namespace simulator
