#include "tensors.h"

#include <cstring>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/DeviceGuard.h>

#include "memory.h"

namespace trainyard::simulated {
namespace {

size_t bytes_spanned(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return 0;
  }
  size_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    last += static_cast<size_t>(tensor.size(i) - 1) * static_cast<size_t>(tensor.stride(i));
  }
  return (last + 1) * tensor.element_size();
}

// Not Tensor::data_ptr, which throws for a storage whose memory was released; the check of accesses explains that.
const char* first_byte(const at::Tensor& tensor) {
  auto* base = static_cast<const char*>(tensor.storage().unsafeGetStorageImpl()->data_ptr().get());
  return base == nullptr ? nullptr : base + tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
}

} // namespace

bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDeviceType;
}

Access access_to(const at::Tensor& tensor, bool writes) {
  if (!tensor.defined()) {
    return {};
  }
  return {first_byte(tensor), bytes_spanned(tensor), writes, tensor.device().index()};
}

at::Tensor cpu_view(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return tensor;
  }
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  // The whole storage, not only the tensor's part: kernels tell overlapping operands by their storages' addresses.
  c10::Storage on_shadow(c10::Storage::use_byte_size_t(), storage->nbytes(),
                         at::DataPtr(shadow(storage->data_ptr().get()), c10::Device(c10::kCPU)),
                         /*allocator=*/nullptr, /*resizable=*/false);
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      std::move(on_shadow), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  at::Tensor view(std::move(impl));
  if (tensor.is_conj()) {
    view._set_conj(true);
  }
  if (tensor.is_neg()) {
    view._set_neg(true);
  }
  return view;
}

at::Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type, c10::Device device) {
  c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      sizes, strides, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), type);
}

at::Tensor to_device(const at::Tensor& cpu, c10::Device device, Stream& stream, const std::string& op) {
  if (!cpu.defined()) {
    return cpu;
  }
  auto result = empty_on_device(cpu.sizes(), cpu.strides(), cpu.scalar_type(), device);
  auto access = writes(result);
  if (access.bytes > 0) {
    record_write(stream, op, access);
    stream.drain(); // new memory may have its poison still queued
    std::memcpy(shadow(access.data), cpu.const_data_ptr(), access.bytes);
  }
  return result;
}

} // namespace trainyard::simulated
