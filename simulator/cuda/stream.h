// Streams as queues of work.
//
// Kernels and most copies are complete when they are issued, so a stream is nearly always empty. Work of a communicator
// waits for other processes: it and everything issued after it on that stream queue up, and a thread of the simulator,
// which stands for the devices, works through the queues in order.
#pragma once
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

namespace simulator {

class Work {
 public:
  virtual ~Work() = default;
  // Does what can be done now and returns true once all is done. Called again and again by one thread.
  virtual bool advance() = 0;
};

class Stream;
using StreamPointer = std::shared_ptr<Stream>;

// The stream behind a handle, or null. The null handle is the default stream of the current device.
StreamPointer find_stream(cudaStream_t handle);
unsigned stream_number(cudaStream_t handle); // for the log
int stream_device(const StreamPointer& stream);
bool is_idle(const StreamPointer& stream);

void submit(const StreamPointer& stream, std::unique_ptr<Work> work);
// Runs at once on an idle stream, else in its turn.
void submit(const StreamPointer& stream, std::function<void()> action);

// A point in a stream that is reached when all work before it is complete.
struct Point {
  std::atomic<bool> reached{false};
  std::atomic<uint64_t> nanoseconds{0};
};
using PointPointer = std::shared_ptr<Point>;
PointPointer record(const StreamPointer& stream);
void submit_wait(const StreamPointer& stream, PointPointer point); // later work of the stream waits for the point
// Blocks the calling thread; returns for how many microseconds.
uint64_t wait_for(const PointPointer& point);
uint64_t wait_for_all_of(const StreamPointer& stream);
uint64_t wait_for_device(int device);

} // namespace simulator
