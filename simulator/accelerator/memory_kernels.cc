// Operators that allocate, resize or view memory and compute nothing.
#include <algorithm>
#include <cstring>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>

#include "kernels.h"
#include "memory.h"
#include "tensors.h"

namespace trainyard::simulated {
namespace {

using at::IntArrayRef;
using at::Tensor;
using std::optional;

const c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

optional<c10::Device> with_index(optional<c10::Device> device) {
  return device && device->has_index() ? device : std::nullopt;
}

Tensor empty(IntArrayRef sizes, optional<at::ScalarType> type, optional<at::Layout>, optional<c10::Device> device,
             optional<bool> pin, optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(with_index(device));
  return at::detail::empty_generic(sizes, device_allocator(), kKeys, c10::dtype_or_default(type), format);
}

Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, optional<at::ScalarType> type, optional<at::Layout>,
                     optional<c10::Device> device, optional<bool>) {
  c10::OptionalDeviceGuard guard(with_index(device));
  return at::detail::empty_strided_generic(sizes, strides, device_allocator(), kKeys, c10::dtype_or_default(type));
}

// Moves a storage to a larger block, on the current stream.
void grow_storage(const Tensor& tensor, size_t bytes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (bytes <= storage->nbytes()) {
    return;
  }
  c10::DeviceGuard guard(tensor.device());
  auto larger = device_allocator()->allocate(bytes);
  const void* from = storage->data_ptr().get();
  if (size_t kept = storage->nbytes(); kept > 0 && from != nullptr) {
    const void* to = larger.get();
    launch(current_stream(tensor.device().index()), "aten::resize_", {{from, kept, false}, {to, kept, true}},
           [=] { std::memcpy(shadow(to), shadow(from), kept); }, Run::MayQueue);
  }
  storage->set_data_ptr_noswap(std::move(larger));
  storage->set_nbytes(bytes);
}

const Tensor& resize_(const Tensor& self, IntArrayRef sizes, optional<at::MemoryFormat> format) {
  if (self.sizes() != sizes) {
    auto bytes = at::detail::computeStorageNbytesContiguous(sizes, self.dtype().itemsize(), self.storage_offset());
    grow_storage(self, bytes);
    self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  }
  if (format) {
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return self;
}

Tensor& set_view_of_storage(Tensor& self, at::Storage source, int64_t offset, IntArrayRef sizes, IntArrayRef strides) {
  at::native::checkSetStorage(self, source, offset, sizes, strides);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(
      sizes, strides.data() == nullptr ? c10::contiguous_strides(sizes) : at::DimVector(strides));
  return self;
}

Tensor& set_to_storage(Tensor& self, at::Storage source) {
  return at::native::set_(self, std::move(source));
}

Tensor& set_to_tensor(Tensor& self, const Tensor& source) {
  return at::native::set_tensor_(self, source);
}

Tensor& set_to_nothing(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  at::Storage nothing(c10::Storage::use_byte_size_t(), 0, device_allocator(), /*resizable=*/true);
  self.set_(std::move(nothing), 0, {0}, {});
  return self;
}

bool is_set_to(const Tensor& self, const Tensor& source) {
  return self.storage().unsafeGetStorageImpl() == source.storage().unsafeGetStorageImpl() &&
         self.storage_offset() == source.storage_offset() && self.sizes() == source.sizes() &&
         self.strides() == source.strides();
}

void record_stream_of_tensor(Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), find_stream(stream));
}

} // namespace

void register_memory_kernels(torch::Library& aten) {
  aten.impl("empty.memory_format", &empty);
  aten.impl("empty_strided", &empty_strided);
  aten.impl("resize_", &resize_);
  aten.impl("set_", &set_to_nothing);
  aten.impl("set_.source_Storage", &set_to_storage);
  aten.impl("set_.source_Storage_storage_offset", &set_view_of_storage);
  aten.impl("set_.source_Tensor", &set_to_tensor);
  aten.impl("is_set_to", &is_set_to);
  aten.impl("record_stream", &record_stream_of_tensor);
  // Views only compute sizes and strides: libtorch's own code serves every device.
  aten.impl("as_strided", static_cast<Tensor (*)(const Tensor&, IntArrayRef, IntArrayRef, optional<int64_t>)>(
                              &at::native::as_strided_tensorimpl));
  aten.impl("view", static_cast<Tensor (*)(const Tensor&, IntArrayRef)>(&at::native::view));
  aten.impl("_reshape_alias",
            static_cast<Tensor (*)(const Tensor&, IntArrayRef, IntArrayRef)>(&at::native::_reshape_alias));
  aten.impl("unfold", &at::native::unfold);
  aten.impl("view_as_real", &at::native::view_as_real);
  aten.impl("view_as_complex", &at::native::view_as_complex);
}

} // namespace trainyard::simulated
