// Streams, events, and the launch of kernels.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "clocks.h"

namespace trainyard::simulated {

inline constexpr c10::DeviceType kDeviceType = c10::DeviceType::CUDA;

// A queue of tasks and the thread that runs them. The thread starts with the first task and is never joined.
class Stream {
 public:
  Stream(int number, c10::DeviceIndex device, c10::StreamId id) : number(number), device(device), id(id) {}

  const int number; // index in clocks, unique over all devices
  const c10::DeviceIndex device;
  const c10::StreamId id; // 0 is the default stream of its device
  Clock clock;            // guarded by clock_mutex()

  void enqueue(std::function<void()> task);
  // Runs the task inline if the stream is idle, else after what is queued.
  void run_in_order(std::function<void()> task);
  // Waits until what is queued now has run.
  void drain();
  bool idle();
  c10::Stream handle() const { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDeviceType, device), id); }

 private:
  void run_tasks();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  uint64_t queued_ = 0;
  uint64_t finished_ = 0;
  bool started_ = false;
};

// The device and the streams that are current on the calling thread.
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
Stream& current_stream(c10::DeviceIndex device);
Stream& exchange_current_stream(Stream& stream);

Stream& find_stream(const c10::Stream& handle);
Stream& default_stream(c10::DeviceIndex device);
// From a pool of 32 per device, in turn, as CUDA's.
Stream& pool_stream(c10::DeviceIndex device);
// A stream of the caller's own. A returned one is handed out again, which bounds threads and the size of clocks.
Stream& take_stream(c10::DeviceIndex device);
void return_stream(Stream& stream);
// For messages about two streams of one device, or of several.
std::string stream_name(int number, c10::DeviceIndex seen_from);
Stream& stream_by_number(int number);

enum class Run {
  Inline,   // the host needs the result at once
  MayQueue, // on the stream's thread in asynchronous mode
  Queue,    // always on the stream's thread: collectives
};

// Checks the accesses against the clocks, then runs or queues the kernel.
void launch(Stream& stream, const std::string& op, const std::vector<Access>& accesses, std::function<void()> body,
            Run run);

// Records that the stream's last launch wrote memory that was allocated during it.
void record_write(Stream& stream, const std::string& op, const Access& access);

class Event {
 public:
  void record(Stream& stream);
  void block(Stream& stream);
  // Whether what was recorded is over; the host then knows it.
  bool query();
  // The same without the host's knowledge, for the simulator's own housekeeping.
  bool completed() { return completion_->done(); }
  void synchronize(const char* cause);
  static double elapsed_ms(const Event& start, const Event& end);

 private:
  // Lives as long as a queued record or wait refers to it, which may be longer than the event.
  struct Completion {
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t recorded = 0;
    uint64_t completed = 0;
    double completed_at_ms = 0;

    void complete(uint64_t version);
    void wait(uint64_t version);
    uint64_t version();
    bool done();
  };

  bool recorded_ = false; // this and the clock are guarded by clock_mutex()
  Clock clock_;
  std::shared_ptr<Completion> completion_ = std::make_shared<Completion>();
};

// The host has seen that everything in `clock` is over.
void host_learns(const Clock& clock);
const Clock& host_clock();

void synchronize_stream(Stream& stream, const char* cause, const std::string& op);
void synchronize_device(c10::DeviceIndex device);
// After an operator that waited for its own result: the wait was counted before.
void host_waited_for(Stream& stream);

} // namespace trainyard::simulated
