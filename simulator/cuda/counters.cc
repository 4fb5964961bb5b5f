#include "counters.h"

#include <cuda_runtime_api.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <deque>
#include <mutex>
#include <optional>
#include <string>

#include "log.h"
#include "memory.h"

namespace simulator {
namespace {

uint64_t read_clock(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return uint64_t(t.tv_sec) * 1'000'000'000u + uint64_t(t.tv_nsec);
}

// Wall time, and the time in which the threads of this process had a core.
struct Moment {
  uint64_t wall = now_nanoseconds(), processor = read_clock(CLOCK_PROCESS_CPUTIME_ID);
};

struct Step {
  Counts counts;
  Moment began;
  std::optional<Moment> ended;
};

struct Counters {
  Counts devices[max_devices];
  std::mutex mutex;
  std::deque<Step> steps;
  std::atomic<Step*> open{nullptr};
  std::atomic<uint64_t> peak_bytes{0}; // on all devices together
  std::atomic<bool> used{false};
  Moment began;
};

Counters& counters() {
  static Counters& c = *new Counters();
  return c;
}

void raise_to(std::atomic<uint64_t>& peak, uint64_t value) {
  uint64_t seen = peak.load();
  while (seen < value && !peak.compare_exchange_weak(seen, value)) {}
}

void end_step(Counters& c) {
  if (Step* step = c.open.exchange(nullptr)) step->ended = Moment();
}

void begin_step() {
  auto& c = counters();
  std::lock_guard lock(c.mutex);
  end_step(c);
  Step& step = c.steps.emplace_back();
  step.counts.peak_bytes = held_by_all_devices();
  c.open = &step;
  c.used = true;
}

// --- the report --------------------------------------------------------------------------------

// Members of a JSON object, separated by commas.
class Object {
 public:
  Object& put(const std::string& key, const std::string& json) {
    text_ += (text_.empty() ? "\"" : ", \"") + key + "\": " + json;
    return *this;
  }
  Object& put(const std::string& key, uint64_t value) { return put(key, std::to_string(value)); }
  std::string str() const { return "{" + text_ + "}"; }

 private:
  std::string text_;
};

std::string tally(const Tally& t) { return Object().put("calls", t.calls).put("bytes", t.bytes).str(); }

template <size_t n>
std::string tallies(const Tally (&all)[n], const char* const (&names)[n]) {
  Object object;
  for (size_t i = 0; i < n; ++i) object.put(names[i], tally(all[i]));
  return object.str();
}

Object members(const Counts& c) {
  Object waits;
  for (size_t i = 0; i < std::size(synchronizations); ++i) waits.put(synchronizations[i], c.synchronized[i].calls);
  return Object()
      .put("launches", c.launches.calls)
      .put("library_launches", c.library_launches.calls)
      .put("copies", tallies(c.copies, copy_kinds))
      .put("memsets", tally(c.memsets))
      .put("synchronizations", waits.str())
      .put("segments_allocated", tally(c.segments_allocated))
      .put("segments_freed", tally(c.segments_freed))
      .put("pinned_allocations", tally(c.pinned_allocations))
      .put("nccl", tallies(c.communicated, communications))
      .put("peak_bytes", c.peak_bytes)
      .put("waiting_microseconds", c.waiting_microseconds);
}

std::string timed(const Counts& c, const Moment& began, const Moment& ended) {
  return members(c)
      .put("host_microseconds", (ended.wall - began.wall) / 1000)
      .put("processor_microseconds", (ended.processor - began.processor) / 1000)
      .str();
}

void add(Tally& sum, const Tally& part) {
  sum.calls += part.calls;
  sum.bytes += part.bytes;
}

template <size_t n>
void add(Tally (&sum)[n], const Tally (&part)[n]) {
  for (size_t i = 0; i < n; ++i) add(sum[i], part[i]);
}

void add(Counts& sum, const Counts& part) {
  add(sum.launches, part.launches);
  add(sum.library_launches, part.library_launches);
  add(sum.memsets, part.memsets);
  add(sum.pinned_allocations, part.pinned_allocations);
  add(sum.segments_allocated, part.segments_allocated);
  add(sum.segments_freed, part.segments_freed);
  add(sum.copies, part.copies);
  add(sum.synchronized, part.synchronized);
  add(sum.communicated, part.communicated);
  sum.waiting_microseconds += part.waiting_microseconds;
}

std::string report() {
  auto& c = counters();
  std::lock_guard lock(c.mutex);
  Moment now;
  std::string devices, steps, names;
  Counts total;
  for (int i = 0; i < settings().devices; ++i) {
    devices += (i ? ",\n  " : "\n  ") + members(c.devices[i]).str();
    add(total, c.devices[i]);
  }
  total.peak_bytes = c.peak_bytes.load();
  for (auto& step : c.steps) steps += (steps.empty() ? "\n  " : ",\n  ") + timed(step.counts, step.began, step.ended.value_or(now));
  for (auto& name : called_but_not_written()) names += (names.empty() ? "\"" : ", \"") + name + "\"";
  return Object()
             .put("rank", uint64_t(settings().rank))
             .put("devices", "[" + devices + "]")
             .put("steps", "[" + steps + "]")
             .put("total", timed(total, c.began, now))
             .put("not_written", "[" + names + "]")
             .str() +
         "\n";
}

// Programs that merely inherit the preloaded libraries (a shell, say) leave no report behind.
__attribute__((destructor)) void write_report() {
  auto& path = settings().report;
  if (path.empty() || !counters().used) return;
  std::string text = report(), unfinished = path + "." + std::to_string(getpid());
  FILE* file = fopen(unfinished.c_str(), "we");
  bool written = file && fwrite(text.data(), 1, text.size(), file) == text.size();
  if (file) written = fclose(file) == 0 && written;
  if (!written || rename(unfinished.c_str(), path.c_str())) complain("cannot write the report " + path);
}

} // namespace

uint64_t now_nanoseconds() {
  return read_clock(CLOCK_MONOTONIC);
}

Counts& device_counts(int device) {
  auto& c = counters();
  c.used.store(true, std::memory_order_relaxed);
  return c.devices[device >= 0 && device < max_devices ? device : 0];
}

Counts* step_counts() {
  Step* step = counters().open;
  return step ? &step->counts : nullptr;
}

void count_launch(int device) {
  count(device, [](Counts& c) { c.launches.add(); });
}

void count_library_launch(int device) {
  count(device, [](Counts& c) {
    c.launches.add();
    c.library_launches.add();
  });
}

void count_communication(int device, Communication kind, uint64_t bytes) {
  count(device, [&](Counts& c) { c.communicated[int(kind)].add(bytes); });
}

void count_synchronization(int device, Synchronization how, uint64_t waited_microseconds) {
  count(device, [&](Counts& c) {
    c.synchronized[int(how)].add();
    c.waiting_microseconds += waited_microseconds;
  });
}

void count_held(int device, uint64_t device_bytes, uint64_t process_bytes) {
  raise_to(device_counts(device).peak_bytes, device_bytes);
  raise_to(counters().peak_bytes, process_bytes);
  if (Counts* step = step_counts()) raise_to(step->peak_bytes, process_bytes);
}

} // namespace simulator

using namespace simulator;

extern "C" {

// PyTorch reaches this as torch.cuda.cudart().cudaProfilerStart(): a program marks its steps without knowing the simulator.
cudaError_t cudaProfilerStart() {
  begin_step();
  return cudaSuccess;
}

cudaError_t cudaProfilerStop() {
  auto& c = counters();
  std::lock_guard lock(c.mutex);
  end_step(c);
  return cudaSuccess;
}

int trainyard_simulated_cuda(void) { return 1; }

} // extern "C"
