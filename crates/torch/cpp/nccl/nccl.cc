// The GPU library: process groups of NCCL.
//
// It is a library of its own, which a program loads if its node has a GPU. So one build of a program serves nodes with
// and without GPUs, and only those with one load libtorch's CUDA libraries.
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

// CUDA's. Its header is in none of the packages of `./setup --cuda`.
extern "C" int cudaProfilerStart();

extern "C" void trainyard_gpu_begin_step(bool profile) {
  if (profile) {
    cudaProfilerStart(); // without a profiler this does nothing, and its failure must not end a job
  }
}

extern "C" void trainyard_gpu_end_step() {}
