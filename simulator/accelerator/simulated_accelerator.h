// A simulated accelerator: registers itself as CUDA with a libtorch whose CUDA libraries are not linked, computes on
// the CPU, and checks what only a GPU would punish: stream order, memory lifetimes, host access, host synchronization.
//
// See README.md for what it proves and what it cannot.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace trainyard::simulated {

struct Options {
  int devices = 8;
  // Kernels run on a thread per stream while the host goes on. Otherwise they run inline; collectives never do.
  bool asynchronous = false;
  // Upper bound of a random delay before each kernel that runs on a stream's thread.
  int jitter_us = 0;
  // Capacity of each device; 0 means no limit.
  uint64_t memory_bytes = 0;

  // Reads TRAINYARD_SIM_GPUS, TRAINYARD_SIM_ASYNC, TRAINYARD_SIM_JITTER_US and TRAINYARD_SIM_MEMORY.
  static Options from_env();
};

// Registers device, kernels, allocators and hooks. Call it first in main: libtorch asks for the hooks of CUDA once,
// and a linker drops static initializers that nothing refers to. Later calls do nothing.
void install(const Options& options = Options::from_env());

// --- what happened --------------------------------------------------------------------------------
struct MemoryCounters {
  uint64_t allocated = 0;
  uint64_t peak = 0;
};

struct Counters {
  uint64_t kernels = 0;
  uint64_t hazards = 0;
  std::map<std::string, uint64_t> kernels_by_operator;
  std::map<std::string, uint64_t> host_synchronizations; // by cause, see HostSynchronization in report.h
  uint64_t steps = 0;                                    // training steps that have begun
  std::map<std::string, uint64_t> synchronizations_in_steps; // by cause and operator, within training steps
  std::vector<MemoryCounters> memory;                    // by device
};

Counters counters();

// Sets every counter to zero, peaks to what is allocated now, and forgets the hazards.
void reset_counters();

// Every hazard found since the last reset, also those that were thrown as errors.
std::vector<std::string> hazards();

// A training step begins or ends: host synchronizations between are counted apart.
void begin_step();
void end_step();

// Writes counters and hazards as JSON.
void write_report(const std::string& path);

// While forbidden, whatever makes the host wait for the device is an error that names the operator. Process wide.
void forbid_host_synchronization(bool forbid);

// --- collectives ----------------------------------------------------------------------------------
struct NcclOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  std::string address = "127.0.0.1"; // of the interface that Gloo listens on
  std::string name;                  // of the group, for messages
};

// A c10d backend with the semantics of ProcessGroupNCCL, carried by Gloo.
c10::intrusive_ptr<c10d::Backend> make_simulated_nccl(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const NcclOptions& options = {});

} // namespace trainyard::simulated
