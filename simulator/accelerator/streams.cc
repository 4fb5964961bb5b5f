#include "streams.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <random>
#include <thread>

#include <c10/util/Exception.h>

#include "memory.h"
#include "pinned.h"
#include "report.h"

namespace trainyard::simulated {
namespace {

constexpr size_t kPoolSize = 32;

// All streams ever made, and those that can be handed out. Guarded by clock_mutex().
struct Streams {
  std::vector<Stream*> by_number;
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, Stream*> by_id;
  std::map<c10::DeviceIndex, std::vector<Stream*>> returned;
  std::map<c10::DeviceIndex, std::vector<Stream*>> pool;
  std::map<c10::DeviceIndex, size_t> pool_turn;
  c10::StreamId next_id = 1;
  Clock host;
};

Streams& streams() {
  static auto* streams = new Streams();
  return *streams;
}

thread_local c10::DeviceIndex thread_device = 0;
thread_local std::map<c10::DeviceIndex, Stream*> thread_streams;

Stream& make_stream(c10::DeviceIndex device, c10::StreamId id) {
  auto& all = streams();
  auto* stream = new Stream(static_cast<int>(all.by_number.size()), device, id);
  all.by_number.push_back(stream);
  all.by_id[{device, id}] = stream;
  return *stream;
}

double now_ms() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

void delay_randomly() {
  if (options().jitter_us > 0) {
    thread_local std::minstd_rand random(std::random_device{}());
    std::this_thread::sleep_for(std::chrono::microseconds(random() % options().jitter_us));
  }
}

} // namespace

// --- the queue ------------------------------------------------------------------------------------
void Stream::enqueue(std::function<void()> task) {
  std::lock_guard<std::mutex> lock(mutex_);
  tasks_.push_back(std::move(task));
  ++queued_;
  if (!started_) {
    started_ = true;
    std::thread([this] { run_tasks(); }).detach();
  }
  changed_.notify_all();
}

void Stream::run_tasks() {
  pthread_setname_np(pthread_self(), ("cuda stream " + std::to_string(id)).substr(0, 15).c_str());
  thread_device = device;
  for (;;) {
    std::function<void()> task;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    delay_randomly();
    try {
      task();
    } catch (const c10::Error& error) {
      report_hazard(error.what_without_backtrace());
    } catch (const std::exception& error) {
      report_hazard(error.what());
    }
    task = nullptr; // frees what the task holds before anyone sees it finished
    std::lock_guard<std::mutex> lock(mutex_);
    ++finished_;
    changed_.notify_all();
  }
}

void Stream::run_in_order(std::function<void()> task) {
  if (idle()) {
    task();
  } else {
    enqueue(std::move(task));
  }
}

void Stream::drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  auto until = queued_;
  changed_.wait(lock, [&] { return finished_ >= until; });
}

bool Stream::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return finished_ == queued_;
}

// --- which stream ---------------------------------------------------------------------------------
c10::DeviceIndex current_device() {
  return thread_device;
}

void set_current_device(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < options().devices, "CUDA error: invalid device ordinal: ",
              static_cast<int>(device), " of ", options().devices, " simulated devices");
  thread_device = device;
}

Stream& default_stream(c10::DeviceIndex device) {
  ClockLock lock(clock_mutex());
  auto found = streams().by_id.find({device, 0});
  return found != streams().by_id.end() ? *found->second : make_stream(device, 0);
}

Stream& find_stream(const c10::Stream& handle) {
  ClockLock lock(clock_mutex());
  if (handle.id() == 0) {
    return default_stream(handle.device_index());
  }
  auto found = streams().by_id.find({handle.device_index(), handle.id()});
  TORCH_CHECK(found != streams().by_id.end(), "no such stream: ", handle);
  return *found->second;
}

Stream& current_stream(c10::DeviceIndex device) {
  auto found = thread_streams.find(device);
  return found == thread_streams.end() ? default_stream(device) : *found->second;
}

Stream& exchange_current_stream(Stream& stream) {
  auto& previous = current_stream(stream.device);
  thread_streams[stream.device] = &stream;
  return previous;
}

Stream& take_stream(c10::DeviceIndex device) {
  ClockLock lock(clock_mutex());
  auto& returned = streams().returned[device];
  if (returned.empty()) {
    return make_stream(device, streams().next_id++);
  }
  auto* stream = returned.back();
  returned.pop_back();
  return *stream;
}

void return_stream(Stream& stream) {
  ClockLock lock(clock_mutex());
  streams().returned[stream.device].push_back(&stream);
}

Stream& pool_stream(c10::DeviceIndex device) {
  ClockLock lock(clock_mutex());
  auto& pool = streams().pool[device];
  if (pool.size() < kPoolSize) {
    pool.push_back(&take_stream(device));
    return *pool.back();
  }
  return *pool[streams().pool_turn[device]++ % kPoolSize];
}

std::string stream_name(int number, c10::DeviceIndex seen_from) {
  ClockLock lock(clock_mutex());
  const auto& stream = *streams().by_number.at(number);
  auto name = "stream " + std::to_string(stream.id);
  return stream.device == seen_from ? name : name + " of cuda:" + std::to_string(stream.device);
}

Stream& stream_by_number(int number) {
  ClockLock lock(clock_mutex());
  return *streams().by_number.at(number);
}

// --- launches -------------------------------------------------------------------------------------
namespace {

void check_launch(Stream& stream, const std::string& op, const std::vector<Access>& accesses) {
  ClockLock lock(clock_mutex());
  raise_reported_hazard();
  count_kernel(op);
  stream.clock.join(streams().host);
  auto time = stream.clock.tick(stream.number);
  // Reads first: a kernel that reads and writes one operand would else drop the older accesses it must be checked with.
  for (bool writes : {false, true}) {
    for (const auto& access : accesses) {
      if (access.writes == writes) {
        check_access(stream, op, access, time);
      }
    }
  }
}

} // namespace

void launch(Stream& stream, const std::string& op, const std::vector<Access>& accesses, std::function<void()> body,
            Run run) {
  check_launch(stream, op, accesses);
  if (run == Run::Queue || (run == Run::MayQueue && options().asynchronous)) {
    stream.enqueue(std::move(body));
  } else {
    stream.drain();
    body();
  }
}

void record_write(Stream& stream, const std::string& op, const Access& access) {
  ClockLock lock(clock_mutex());
  stream.clock.raise(stream.number, 0);
  check_access(stream, op, access, stream.clock.tick(stream.number));
}

// --- events ---------------------------------------------------------------------------------------
void Event::Completion::complete(uint64_t version) {
  std::lock_guard<std::mutex> lock(mutex);
  completed = std::max(completed, version);
  completed_at_ms = now_ms();
  changed.notify_all();
}

void Event::Completion::wait(uint64_t version) {
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return completed >= version; });
}

uint64_t Event::Completion::version() {
  std::lock_guard<std::mutex> lock(mutex);
  return recorded;
}

bool Event::Completion::done() {
  std::lock_guard<std::mutex> lock(mutex);
  return completed >= recorded;
}

void Event::record(Stream& stream) {
  {
    ClockLock lock(clock_mutex());
    stream.clock.join(streams().host);
    clock_ = stream.clock;
    recorded_ = true;
  }
  uint64_t version;
  {
    std::lock_guard<std::mutex> lock(completion_->mutex);
    version = ++completion_->recorded;
  }
  stream.run_in_order([completion = completion_, version] { completion->complete(version); });
}

void Event::block(Stream& stream) {
  {
    ClockLock lock(clock_mutex());
    if (!recorded_) {
      return;
    }
    stream.clock.join(clock_);
  }
  if (!completion_->done()) {
    stream.enqueue([completion = completion_, version = completion_->version()] { completion->wait(version); });
  }
}

bool Event::query() {
  if (!completion_->done()) {
    return false;
  }
  ClockLock lock(clock_mutex());
  if (recorded_) {
    host_learns(clock_);
  }
  return true;
}

void Event::synchronize(const char* cause) {
  {
    ClockLock lock(clock_mutex());
    if (!recorded_) {
      return;
    }
    count_host_synchronization(cause, "Event::synchronize");
  }
  completion_->wait(completion_->version());
  ClockLock lock(clock_mutex());
  host_learns(clock_);
  raise_reported_hazard();
}

double Event::elapsed_ms(const Event& start, const Event& end) {
  return end.completion_->completed_at_ms - start.completion_->completed_at_ms;
}

// --- the host waits -------------------------------------------------------------------------------
const Clock& host_clock() {
  return streams().host;
}

void host_learns(const Clock& clock) {
  ClockLock lock(clock_mutex());
  streams().host.join(clock);
  release_pinned_uses();
  reuse_freed_blocks();
}

void host_waited_for(Stream& stream) {
  Clock seen;
  {
    ClockLock lock(clock_mutex());
    seen = stream.clock; // another thread may launch more while this one waits
  }
  stream.drain();
  host_learns(seen);
  raise_reported_hazard();
}

void synchronize_stream(Stream& stream, const char* cause, const std::string& op) {
  count_host_synchronization(cause, op);
  host_waited_for(stream);
}

void synchronize_device(c10::DeviceIndex device) {
  count_host_synchronization(cause::kDevice, "device synchronize");
  std::vector<Stream*> all;
  {
    ClockLock lock(clock_mutex());
    all = streams().by_number;
  }
  for (auto* stream : all) {
    if (stream->device == device) {
      host_waited_for(*stream);
    }
  }
}

} // namespace trainyard::simulated
