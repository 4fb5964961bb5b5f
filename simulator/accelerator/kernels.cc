#include "kernels.h"

#include <array>
#include <string>
#include <unordered_set>

#include <ATen/core/dispatch/Dispatcher.h>

namespace trainyard::simulated {
namespace {

using c10::DispatchKey;

// Operators that the CUDA build of libtorch has a CUDA kernel for; written by cuda_operators.py.
const std::unordered_set<std::string>& cuda_operators() {
  static const auto* names = new std::unordered_set<std::string>{
#include "cuda_operators.inc"
  };
  return *names;
}

// Reached by operators without a CUDA kernel or composite, and by CUDA's own that no CPU kernel can stand in for.
void reject(const c10::OperatorHandle& op, torch::jit::Stack*) {
  auto name = c10::toString(op.operator_name());
  bool simulation_lacks_it = cuda_operators().count(name) > 0;
  TORCH_CHECK_NOT_IMPLEMENTED(false, "Could not run '", name, "' with arguments from the 'CUDA' backend: ",
                              simulation_lacks_it ? "the simulated accelerator has no kernel for it"
                                                  : "CUDA has no kernel for it");
}

bool fallback_computes(const c10::OperatorHandle& op) {
  if (op.hasKernelForDispatchKey(DispatchKey::CUDA)) {
    return false; // one of the simulator's own
  }
  // A structured operator allocates its result by its meta function and calls its out variant, which can be queued.
  if (op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional)) {
    return false;
  }
  return op.hasKernelForDispatchKey(DispatchKey::CPU) ||
         op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
         op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
}

// Registers a kernel exactly where CUDA has one. With fewer, a composite would take its place and round differently
// than the CPU's kernel; with more, an operator would work here that fails on a GPU.
void register_fallback(torch::Library& aten) {
  for (const auto& name : cuda_operators()) {
    auto dot = name.find('.');
    auto op = c10::Dispatcher::singleton().findOp(
        {name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)});
    if (op && fallback_computes(*op)) {
      aten.impl(name.substr(std::string("aten::").size()).c_str(),
                torch::CppFunction::makeFromBoxedFunction<&run_cpu_kernel>());
    }
  }
}

} // namespace

void register_kernels() {
  // Leaked: a library that is destroyed removes its kernels.
  auto* others = new torch::Library(torch::Library::IMPL, "_", DispatchKey::CUDA, __FILE__, __LINE__);
  others->fallback(torch::CppFunction::makeFromBoxedFunction<&reject>());
  auto* aten = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  register_memory_kernels(*aten);
  register_copy_kernels(*aten);
  register_norm_kernels(*aten);
  register_attention_kernels(*aten);
  register_fallback(*aten);
}

} // namespace trainyard::simulated
