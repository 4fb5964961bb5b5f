// Copies between devices and between host and device, and what reads a value back.
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include "kernels.h"
#include "memory.h"
#include "pinned.h"
#include "report.h"
#include "tensors.h"

namespace trainyard::simulated {
namespace {

using at::Tensor;

constexpr const char* kCopy = "aten::copy_";

std::function<void()> cpu_copy(const Tensor& to, const Tensor& from) {
  return [to, from] {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    to.copy_(from);
  };
}

// A pinned tensor as copies see it, through the mapping that is never protected.
Tensor through_device_view(const Tensor& pinned) {
  return at::from_blob(device_view(pinned.const_data_ptr()), pinned.sizes(), pinned.strides(),
                       at::TensorOptions().dtype(pinned.scalar_type()));
}

void copy_on_device(const Tensor& to, const Tensor& from) {
  auto& stream = current_stream(from.device().index());
  auto& to_stream = current_stream(to.device().index());
  bool two_devices = to.device() != from.device();
  auto order = [&](Stream& first, Stream& second) {
    Event event;
    event.record(first);
    event.block(second);
  };
  // As CUDA: the copy runs on the source's stream, between what the destination's has and will have queued.
  if (two_devices) {
    order(to_stream, stream);
  }
  launch(stream, kCopy, {reads(from), writes(to)}, cpu_copy(cpu_view(to), cpu_view(from)), Run::MayQueue);
  if (two_devices) {
    order(stream, to_stream);
  }
}

void copy_from_host(const Tensor& to, const Tensor& from, bool non_blocking) {
  auto& stream = current_stream(to.device().index());
  auto on_shadow = cpu_view(to);
  if (non_blocking && is_pinned(from.const_data_ptr())) {
    launch(stream, kCopy, {writes(to)}, cpu_copy(on_shadow, through_device_view(from)), Run::MayQueue);
    use_pinned(from.const_data_ptr(), stream, /*writes=*/false);
    return;
  }
  if (non_blocking) {
    // CUDA stages pageable memory before the call returns.
    auto staged = options().asynchronous ? from.clone() : from;
    launch(stream, kCopy, {writes(to)}, cpu_copy(on_shadow, staged), Run::MayQueue);
    return;
  }
  count_host_synchronization(cause::kCopyFromHost, kCopy);
  launch(stream, kCopy, {writes(to)}, cpu_copy(on_shadow, from), Run::Inline);
  host_waited_for(stream);
}

void copy_to_host(const Tensor& to, const Tensor& from, bool non_blocking) {
  auto& stream = current_stream(from.device().index());
  auto on_shadow = cpu_view(from);
  if (non_blocking && is_pinned(to.const_data_ptr())) {
    launch(stream, kCopy, {reads(from)}, cpu_copy(through_device_view(to), on_shadow), Run::MayQueue);
    use_pinned(to.const_data_ptr(), stream, /*writes=*/true);
    return;
  }
  count_host_synchronization(cause::kCopyToHost, kCopy);
  launch(stream, kCopy, {reads(from)}, cpu_copy(to, on_shadow), Run::Inline);
  host_waited_for(stream);
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_same(source) || self.numel() == 0) {
    return self;
  }
  auto from = source.expand(self.sizes());
  c10::DeviceGuard guard(on_device(self) ? self.device() : from.device());
  if (on_device(self) && on_device(from)) {
    copy_on_device(self, from);
  } else if (on_device(self)) {
    copy_from_host(self, from, non_blocking);
  } else {
    copy_to_host(self, from, non_blocking);
  }
  return self;
}

// On CUDA a list that mixes devices is copied tensor by tensor; the other operators on lists refuse it.
void foreach_copy_(at::TensorList self, at::TensorList sources, bool non_blocking) {
  TORCH_CHECK(self.size() == sources.size(), "_foreach_copy_: lists of ", self.size(), " and ", sources.size());
  for (size_t i = 0; i < self.size(); ++i) {
    auto to = self[i];
    copy_(to, sources[i], non_blocking);
  }
}

at::Scalar local_scalar_dense(const Tensor& self) {
  constexpr const char* kOp = "aten::_local_scalar_dense";
  c10::DeviceGuard guard(self.device());
  auto& stream = current_stream(self.device().index());
  count_host_synchronization(cause::kItem, kOp);
  at::Scalar value;
  launch(stream, kOp, {reads(self)}, [&, view = cpu_view(self)] { value = view.item(); }, Run::Inline);
  host_waited_for(stream);
  return value;
}

} // namespace

void register_copy_kernels(torch::Library& aten) {
  aten.impl("copy_", &copy_);
  aten.impl("_foreach_copy_", &foreach_copy_);
  aten.impl("_local_scalar_dense", &local_scalar_dense);
}

} // namespace trainyard::simulated
