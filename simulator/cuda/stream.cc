#include "stream.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "backoff.h"
#include "counters.h"
#include "device.h"
#include "errors.h"
#include "log.h"

namespace simulator {

class Stream {
 public:
  Stream(unsigned number, int device, unsigned flags, int priority) : number(number), device(device), flags(flags), priority(priority) {}
  const unsigned number;
  const int device;
  const unsigned flags;
  const int priority;
  std::deque<std::unique_ptr<Work>> queue; // guarded by Streams::mutex; only the worker removes
};

namespace {

struct Streams {
  std::mutex mutex;
  std::condition_variable work_arrived, work_completed;
  std::unordered_map<Stream*, StreamPointer> known;
  std::vector<StreamPointer> busy; // those whose queue is not empty
  StreamPointer by_default[max_devices];
  unsigned next_number = 1;
  bool worker_runs = false;

  Streams() {
    for (int i = 0; i < max_devices; ++i) by_default[i] = std::make_shared<Stream>(0, i, 0, 0);
  }
};

// Never destroyed: the worker lives until the process ends.
Streams& streams() {
  static Streams& s = *new Streams();
  return s;
}

// --- the worker ----------------------------------------------------------------------------------

// Completes the first work of a queue. False when it cannot be completed yet or there is none.
bool complete_first(Streams& s, Stream& stream) {
  Work* first;
  {
    std::lock_guard lock(s.mutex);
    if (stream.queue.empty()) return false;
    first = stream.queue.front().get();
  }
  if (!first->advance()) return false;
  std::unique_ptr<Work> done; // destroyed without the lock
  std::lock_guard lock(s.mutex);
  done = std::move(stream.queue.front());
  stream.queue.pop_front();
  if (stream.queue.empty()) std::erase_if(s.busy, [&](auto& b) { return b.get() == &stream; });
  return true;
}

void work() {
  auto& s = streams();
  Backoff backoff;
  while (true) {
    std::vector<StreamPointer> busy;
    {
      std::unique_lock lock(s.mutex);
      if (s.busy.empty()) {
        s.work_arrived.wait(lock, [&] { return !s.busy.empty(); });
        backoff.reset();
      }
      busy = s.busy;
    }
    bool progress = false;
    for (auto& stream : busy) {
      while (complete_first(s, *stream)) progress = true;
    }
    if (progress) {
      s.work_completed.notify_all();
      backoff.reset();
    } else {
      backoff.pause();
    }
  }
}

void enqueue(Streams& s, const StreamPointer& stream, std::unique_ptr<Work> work) {
  if (stream->queue.empty()) s.busy.push_back(stream);
  stream->queue.push_back(std::move(work));
  if (!std::exchange(s.worker_runs, true)) std::thread(simulator::work).detach();
  s.work_arrived.notify_one();
}

// --- kinds of work -------------------------------------------------------------------------------

class Action : public Work {
 public:
  explicit Action(std::function<void()> action) : action_(std::move(action)) {}
  bool advance() override {
    action_();
    return true;
  }

 private:
  std::function<void()> action_;
};

class Wait : public Work {
 public:
  explicit Wait(PointPointer point) : point_(std::move(point)) {}
  bool advance() override { return point_->reached; }

 private:
  PointPointer point_;
};

void reach(Point& point) {
  point.nanoseconds = now_nanoseconds();
  point.reached = true;
}

} // namespace

StreamPointer find_stream(cudaStream_t handle) {
  auto& s = streams();
  if (!handle || handle == cudaStreamLegacy || handle == cudaStreamPerThread) return s.by_default[current_device()];
  std::lock_guard lock(s.mutex);
  auto it = s.known.find(reinterpret_cast<Stream*>(handle));
  return it == s.known.end() ? nullptr : it->second;
}

unsigned stream_number(cudaStream_t handle) {
  auto stream = find_stream(handle);
  return stream ? stream->number : ~0u;
}

int stream_device(const StreamPointer& stream) { return stream->device; }

bool is_idle(const StreamPointer& stream) {
  std::lock_guard lock(streams().mutex);
  return stream->queue.empty();
}

void submit(const StreamPointer& stream, std::unique_ptr<Work> work) {
  auto& s = streams();
  std::lock_guard lock(s.mutex);
  enqueue(s, stream, std::move(work));
}

void submit(const StreamPointer& stream, std::function<void()> action) {
  auto& s = streams();
  {
    std::lock_guard lock(s.mutex);
    if (!stream->queue.empty()) return enqueue(s, stream, std::make_unique<Action>(std::move(action)));
  }
  action();
}

PointPointer record(const StreamPointer& stream) {
  auto point = std::make_shared<Point>();
  submit(stream, [point] { reach(*point); });
  return point;
}

void submit_wait(const StreamPointer& stream, PointPointer point) {
  if (!point->reached) submit(stream, std::make_unique<Wait>(std::move(point)));
}

uint64_t wait_for(const PointPointer& point) {
  if (point->reached) return 0;
  uint64_t began = now_nanoseconds();
  auto& s = streams();
  std::unique_lock lock(s.mutex);
  s.work_completed.wait(lock, [&] { return point->reached.load(); });
  return (now_nanoseconds() - began) / 1000;
}

uint64_t wait_for_all_of(const StreamPointer& stream) { return is_idle(stream) ? 0 : wait_for(record(stream)); }

namespace {

struct Event {
  unsigned flags;
  int device;
  std::mutex mutex;
  PointPointer point; // null until recorded

  PointPointer recorded() {
    std::lock_guard lock(mutex);
    return point;
  }
};
Event* event_of(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }

std::vector<StreamPointer> streams_of(int device) {
  auto& s = streams();
  std::lock_guard lock(s.mutex);
  std::vector<StreamPointer> found{s.by_default[device]};
  for (auto& [_, stream] : s.known) {
    if (stream->device == device) found.push_back(stream);
  }
  return found;
}

} // namespace

uint64_t wait_for_device(int device) {
  uint64_t waited = 0;
  for (auto& stream : streams_of(device)) waited += wait_for_all_of(stream);
  return waited;
}

} // namespace simulator

using namespace simulator;

extern "C" {

// --- streams -------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned flags, int priority) {
  auto& s = streams();
  std::lock_guard lock(s.mutex);
  auto stream = std::make_shared<Stream>(s.next_number++, current_device(), flags, priority);
  s.known[stream.get()] = stream;
  *handle = reinterpret_cast<cudaStream_t>(stream.get());
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) { return cudaStreamCreateWithPriority(handle, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  auto& s = streams();
  std::lock_guard lock(s.mutex);
  // Work that is still queued keeps the stream.
  return s.known.erase(reinterpret_cast<Stream*>(handle)) ? cudaSuccess : fail(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  auto stream = find_stream(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  return is_idle(stream) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  auto stream = find_stream(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  log("cudaStreamSynchronize stream %u", stream->number);
  count_synchronization(stream->device, Synchronization::stream, wait_for_all_of(stream));
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  int device = current_device();
  log("cudaDeviceSynchronize device %d", device);
  count_synchronization(device, Synchronization::device, wait_for_device(device));
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  auto stream = find_stream(handle);
  if (!stream || !event) return fail(cudaErrorInvalidResourceHandle);
  log("cudaStreamWaitEvent stream %u event %p", stream->number, static_cast<void*>(event));
  if (auto point = event_of(event)->recorded()) submit_wait(stream, point);
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  auto stream = find_stream(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  *priority = stream->priority;
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  auto stream = find_stream(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  submit(stream, [=] { function(data); });
  return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function, void* data, unsigned) {
  auto stream = find_stream(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  submit(stream, [=] { function(handle, cudaSuccess, data); });
  return cudaSuccess;
}

// --- graphs are not simulated: no stream ever captures -------------------------------------------

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

// --- events --------------------------------------------------------------------------------------

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  *handle = reinterpret_cast<cudaEvent_t>(new Event{flags, current_device(), {}, nullptr});
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, cudaEventDefault); }

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  delete event_of(handle);
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned) {
  auto stream = find_stream(stream_handle);
  auto* event = event_of(handle);
  if (!stream || !event) return fail(cudaErrorInvalidResourceHandle);
  if (stream->device != event->device) return fail(cudaErrorInvalidResourceHandle); // CUDA refuses this, too
  log("cudaEventRecord stream %u event %p", stream->number, static_cast<void*>(event));
  auto point = record(stream);
  std::lock_guard lock(event->mutex);
  event->point = std::move(point);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  auto point = event_of(handle)->recorded();
  return !point || point->reached ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  auto* event = event_of(handle);
  log("cudaEventSynchronize event %p", static_cast<void*>(event));
  auto point = event->recorded();
  count_synchronization(event->device, Synchronization::event, point ? wait_for(point) : 0);
  return cudaSuccess;
}

// Time on the host: a device takes none.
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t first, cudaEvent_t second) {
  auto from = event_of(first)->recorded(), to = event_of(second)->recorded();
  bool timed = !((event_of(first)->flags | event_of(second)->flags) & cudaEventDisableTiming);
  if (!from || !to || !timed) return fail(cudaErrorInvalidResourceHandle);
  if (!from->reached || !to->reached) return cudaErrorNotReady;
  *milliseconds = float(double(int64_t(to->nanoseconds - from->nanoseconds)) / 1e6);
  return cudaSuccess;
}

} // extern "C"
