// The interface of a GPU library, which is loaded at run time.
#pragma once

#include <chrono>
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

} // namespace trainyard

// Creates the process group and connects its ranks. The caller owns the result, one reference of an intrusive pointer.
// Throws if that fails.
extern "C" c10d::Backend* trainyard_gpu_backend(const trainyard::GpuGroup& group);

// A training step begins; with `profile`, CUDA's profilers see it. Does not wait for the device.
extern "C" void trainyard_gpu_begin_step(bool profile);

// The host has queued everything of the step.
extern "C" void trainyard_gpu_end_step();
