// The current device, streams, events and pinned memory, through libtorch's device-independent interface: nothing here
// names a CUDA function, so the same code runs on every device that registers as CUDA.
#include <dlfcn.h>

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "bridge.h"
#include "trainyard-torch/src/bridge.rs.h"

namespace trainyard {
namespace {

c10::impl::VirtualGuardImpl guard() {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA);
}

c10::Device device(int32_t index) {
  return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)};
}

c10::Stream unpack(StreamId stream) {
  return c10::Stream(c10::Stream::UNSAFE, device(stream.device), stream.id);
}

StreamId pack(c10::Stream stream) {
  return StreamId{stream.id(), stream.device_index()};
}

} // namespace

void set_current_device(int32_t index) {
  guard().setDevice(device(index));
}

StreamId current_stream(int32_t index) {
  return pack(guard().getStream(device(index)));
}

StreamId pool_stream(int32_t index) {
  return pack(guard().getStreamFromGlobalPool(device(index)));
}

StreamId exchange_stream(StreamId stream) {
  return pack(guard().exchangeStream(unpack(stream)));
}

namespace {

std::unique_ptr<EventHandle> record(StreamId stream, c10::EventFlag flag) {
  auto event = std::make_unique<EventHandle>(EventHandle{c10::Event(c10::DeviceType::CUDA, flag)});
  event->event.record(unpack(stream));
  return event;
}

} // namespace

std::unique_ptr<EventHandle> record_event(StreamId stream) {
  return record(stream, c10::EventFlag::PYTORCH_DEFAULT);
}

std::unique_ptr<EventHandle> record_timed_event(StreamId stream) {
  // PyTorch's default has no times.
  return record(stream, c10::EventFlag::BACKEND_DEFAULT);
}

double elapsed_ms(const EventHandle& from, const EventHandle& to) {
  return from.event.elapsedTime(to.event);
}

void stream_wait_event(StreamId stream, const EventHandle& event) {
  event.event.block(unpack(stream));
}

bool event_is_done(const EventHandle& event) {
  return event.event.query();
}

void synchronize_event(const EventHandle& event) {
  event.event.synchronize();
}

void record_stream(const AtTensor& tensor, StreamId stream) {
  tensor.record_stream(unpack(stream));
}

void copy_non_blocking(const AtTensor& target, const AtTensor& source) {
  at::NoGradGuard no_grad;
  target.copy_(source, /*non_blocking=*/true);
}

void device_memory(int32_t index, rust::Slice<uint64_t> out) {
  TORCH_CHECK(out.size() == 5, "device_memory needs a buffer of 5 counters");
  auto number = static_cast<c10::DeviceIndex>(index);
  auto stats = at::accelerator::getDeviceStats(number);
  constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  out[0] = static_cast<uint64_t>(stats.allocated_bytes[all].current);
  out[1] = static_cast<uint64_t>(stats.allocated_bytes[all].peak);
  out[2] = static_cast<uint64_t>(stats.reserved_bytes[all].current);
  out[3] = static_cast<uint64_t>(stats.reserved_bytes[all].peak);
  out[4] = at::accelerator::getMemoryInfo(number).second;
}

void reset_peak_device_memory(int32_t index) {
  at::accelerator::resetPeakStats(static_cast<c10::DeviceIndex>(index));
}

bool computes_values() {
  return dlsym(RTLD_DEFAULT, "trainyard_simulated_cuda") == nullptr;
}

std::unique_ptr<AtTensor> empty_pinned(rust::Slice<const int64_t> shape, int32_t scalar_type) {
  auto options = at::TensorOptions().dtype(static_cast<at::ScalarType>(scalar_type)).pinned_memory(true);
  return std::make_unique<at::Tensor>(at::empty(at::IntArrayRef(shape.data(), shape.size()), options));
}

} // namespace trainyard
