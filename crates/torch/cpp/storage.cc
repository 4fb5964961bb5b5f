// Memory of tensors: given back, taken again, exchanged, without the tensor noticing.
#include <ATen/ATen.h>

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
  // Swapping the pointer, not resizing: on meta a resize bypasses the allocator, so that the release
  // would not be seen. The size stays, which is how restore knows what to take.
  storage->set_data_ptr_noswap(at::DataPtr(nullptr, storage->device()));
}

void restore_storage(const AtTensor& tensor) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::GetAllocator(storage->device_type())->allocate(storage->nbytes()));
}

void exchange_storages(const AtTensor& a, const AtTensor& b) {
  // The pointers change owners; sizes stay with the storages, which may be smaller than the memory.
  auto* first = a.storage().unsafeGetStorageImpl();
  auto* second = b.storage().unsafeGetStorageImpl();
  auto held = first->set_data_ptr(at::DataPtr(nullptr, first->device()));
  first->set_data_ptr_noswap(second->set_data_ptr(std::move(held)));
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

std::unique_ptr<AtTensor> empty_meta(rust::Slice<const int64_t> shape, int32_t scalar_type) {
  auto options = at::TensorOptions().device(at::kMeta).dtype(static_cast<at::ScalarType>(scalar_type));
  return std::make_unique<at::Tensor>(at::empty(at::IntArrayRef(shape.data(), shape.size()), options));
}

} // namespace trainyard
