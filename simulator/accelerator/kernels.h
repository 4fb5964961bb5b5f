// What is registered for the dispatch key CUDA.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

namespace trainyard::simulated {

void register_kernels();

// Kernels that are not run by the fallback, one function per file.
void register_memory_kernels(torch::Library& aten);    // memory_kernels.cc
void register_copy_kernels(torch::Library& aten);      // copy_kernels.cc
void register_norm_kernels(torch::Library& aten);      // norm_kernels.cc
void register_attention_kernels(torch::Library& aten); // attention.cc

// Runs the CPU kernel of any operator on the shadow of its device operands (fallback.cc).
void run_cpu_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

} // namespace trainyard::simulated
