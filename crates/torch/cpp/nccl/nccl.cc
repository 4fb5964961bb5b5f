// The GPU library: process groups of NCCL, and the memory of CUDA's caching allocator.
//
// It is a library of its own, which a program loads if its node has a GPU. So one build of a program serves nodes with
// and without GPUs, and only those with one load libtorch's CUDA libraries.
#include <algorithm>

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "../gpu_library.h"

extern "C" c10d::Backend* trainyard_gpu_backend(const trainyard::GpuGroup& group) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = group.timeout;
  options->group_name = group.name;
  auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(group.store, group.rank, group.size, options);
  // Connects now, while all ranks of the group are here: connecting at the first collective would block the host in
  // the middle of a step, and coalesced messages between some of the ranks would wait for the others.
  backend->setBoundDeviceId(group.device);
  backend->eagerConnectSingleDevice(group.device);
  return backend.release();
}

// libtorch makes its allocators of GPU memory when a program first uses a GPU.
static void make_allocators() {
  at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
}

extern "C" void trainyard_gpu_observe_memory(const trainyard::MemoryObserver& observer) {
  make_allocators();
  using c10::CachingDeviceAllocator::TraceEntry;
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([observer](const TraceEntry& entry) {
    auto* address = reinterpret_cast<void*>(entry.addr_);
    if (entry.action_ == TraceEntry::ALLOC) {
      observer.allocated(address, entry.size_);
    } else if (entry.action_ == TraceEntry::FREE_COMPLETED) {
      // Not when the release is requested: until then another stream may use the memory.
      observer.released(address);
    }
  });
}

extern "C" void trainyard_gpu_limit_memory(c10::Device device, uint64_t bytes) {
  make_allocators();
  auto total = static_cast<double>(at::accelerator::getMemoryInfo(device.index()).second);
  auto fraction = bytes == 0 ? 1.0 : std::min(1.0, static_cast<double>(bytes) / total);
  c10::cuda::CUDACachingAllocator::setMemoryFraction(fraction, device.index());
}

// CUDA's. Its header is in none of the packages of `./setup --cuda`.
extern "C" int cudaProfilerStart();

extern "C" void trainyard_gpu_begin_step(bool profile) {
  if (profile) {
    cudaProfilerStart(); // without a profiler this does nothing, and its failure must not end a job
  }
}

extern "C" void trainyard_gpu_end_step() {}
