// What the environment asks of the simulated devices.
#pragma once
#include <cstdint>
#include <string>

namespace simulator {

// libtorch itself knows no more devices than this in one process.
constexpr int max_devices = 64;

struct Settings {
  int devices;          // TRAINYARD_SIM_GPUS, or fewer where CUDA_VISIBLE_DEVICES says so
  int arch;             // TRAINYARD_SIM_ARCH: 80 for sm_80, 90 for sm_90
  uint64_t memory;      // TRAINYARD_SIM_MEMORY: bytes of each device
  std::string log;      // TRAINYARD_SIM_LOG: path of the call log, or empty
  std::string report;   // TRAINYARD_SIM_REPORT: path of the report, or empty
  int rank;             // RANK, for the report
};

const Settings& settings();

} // namespace simulator
