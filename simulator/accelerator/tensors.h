// Device tensors as kernels see them: CPU tensors on the shadow of device memory.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "streams.h"

namespace trainyard::simulated {

bool on_device(const at::Tensor& tensor);

// The bytes from the first to the last element; strided views span their gaps.
Access access_to(const at::Tensor& tensor, bool writes);
inline Access reads(const at::Tensor& tensor) { return access_to(tensor, false); }
inline Access writes(const at::Tensor& tensor) { return access_to(tensor, true); }

// A CPU tensor of the same bytes. It does not keep the device tensor's memory, as a kernel does not.
at::Tensor cpu_view(const at::Tensor& tensor);

at::Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type, c10::Device device);

// A device tensor with the values that a kernel left in a CPU tensor of its own.
at::Tensor to_device(const at::Tensor& cpu, c10::Device device, Stream& stream, const std::string& op);

} // namespace trainyard::simulated
