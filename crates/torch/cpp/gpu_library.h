// The interface of a GPU library, which is loaded at run time.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace trainyard {

// A process group to create.
struct GpuGroup {
  c10::intrusive_ptr<c10d::Store> store;
  int rank;
  int size;
  c10::Device device;
  std::string name;
  std::chrono::milliseconds timeout;
};

// Is told of every allocation and release, by the thread that makes it and while the allocator is locked: it must not
// use GPU memory itself.
struct MemoryObserver {
  void (*allocated)(void* address, size_t bytes);
  void (*released)(void* address);
};

// Observes the memory of all GPUs with the GPU library; false if none is loaded.
bool observe_gpu_memory(const MemoryObserver& observer);

} // namespace trainyard

// Creates the process group and connects its ranks. The caller owns the result, one reference of an intrusive pointer.
// Throws if that fails.
extern "C" c10d::Backend* trainyard_gpu_backend(const trainyard::GpuGroup& group);

// Observes the memory of all GPUs, for the rest of the process.
extern "C" void trainyard_gpu_observe_memory(const trainyard::MemoryObserver& observer);

// Limits what the allocator of a GPU may reserve; no bytes mean no limit.
extern "C" void trainyard_gpu_limit_memory(c10::Device device, uint64_t bytes);

// A training step begins; with `profile`, CUDA's profilers see it. Does not wait for the device.
extern "C" void trainyard_gpu_begin_step(bool profile);

// The host has queued everything of the step.
extern "C" void trainyard_gpu_end_step();
