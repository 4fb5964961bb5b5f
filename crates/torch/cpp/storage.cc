// Releases, restores and swaps the memory behind a tensor. The tensor's shape, type and autograd state stay.
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include "bridge.h"

namespace trainyard {

std::vector<at::Tensor> tensors_at(Addresses addresses) {
  std::vector<at::Tensor> out;
  out.reserve(addresses.size());
  for (size_t address : addresses) {
    out.push_back(address == 0 ? at::Tensor() : *reinterpret_cast<const at::Tensor*>(address));
  }
  return out;
}

std::unique_ptr<AtTensor> share(const AtTensor& tensor) {
  return std::make_unique<at::Tensor>(tensor);
}

std::unique_ptr<AtTensor> TensorList::take(size_t index) {
  return std::make_unique<at::Tensor>(std::move(tensors.at(index)));
}

void rebind(const AtTensor& tensor, const AtTensor& data) {
  tensor.unsafeGetTensorImpl()->set_storage_and_dtype(data.storage(), data.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(data.sizes(), data.strides(), data.storage_offset());
}

void release_storage(const AtTensor& tensor) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  // Replace the pointer instead of resizing to 0: on meta a resize bypasses the allocator, and the observer would not
  // count the release. The storage keeps its size, which restore_storage reads.
  storage->set_data_ptr_noswap(at::DataPtr(nullptr, storage->device()));
}

void restore_storage(const AtTensor& tensor) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  // The allocator uses the current device, which may be another one on this thread.
  c10::OptionalDeviceGuard guard(storage->device());
  storage->set_data_ptr_noswap(c10::GetAllocator(storage->device_type())->allocate(storage->nbytes()));
}

void swap_storages(const AtTensor& a, const AtTensor& b) {
  // Only the pointers move. Each storage keeps its size, which may be smaller than the memory it receives.
  auto* first = a.storage().unsafeGetStorageImpl();
  auto* second = b.storage().unsafeGetStorageImpl();
  auto memory = first->set_data_ptr(at::DataPtr(nullptr, first->device()));
  first->set_data_ptr_noswap(second->set_data_ptr(std::move(memory)));
}

size_t storage_bytes(const AtTensor& tensor) {
  return tensor.storage().nbytes();
}

size_t storage_address(const AtTensor& tensor) {
  return reinterpret_cast<size_t>(tensor.storage().unsafeGetStorageImpl());
}

bool is_meta(const AtTensor& tensor) {
  return tensor.is_meta();
}

std::unique_ptr<AtTensor> new_empty(const AtTensor& like, rust::Slice<const int64_t> shape) {
  return std::make_unique<at::Tensor>(like.new_empty(at::IntArrayRef(shape.data(), shape.size())));
}

std::unique_ptr<AtTensor> new_zeros(const AtTensor& like, rust::Slice<const int64_t> shape) {
  return std::make_unique<at::Tensor>(like.new_zeros(at::IntArrayRef(shape.data(), shape.size())));
}

std::unique_ptr<AtTensor> new_without_storage(const AtTensor& like, rust::Slice<const int64_t> shape) {
  auto tensor = like.new_empty({0});
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(at::IntArrayRef(shape.data(), shape.size()));
  // As after release_storage: no memory, and the size that restore_storage reads.
  tensor.storage().unsafeGetStorageImpl()->set_nbytes(tensor.numel() * tensor.element_size());
  return std::make_unique<at::Tensor>(std::move(tensor));
}

std::unique_ptr<AtTensor> empty_meta(rust::Slice<const int64_t> shape, int32_t scalar_type) {
  auto options = at::TensorOptions().device(at::kMeta).dtype(static_cast<at::ScalarType>(scalar_type));
  return std::make_unique<at::Tensor>(at::empty(at::IntArrayRef(shape.data(), shape.size()), options));
}

} // namespace trainyard
