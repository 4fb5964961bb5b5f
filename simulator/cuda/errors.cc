#include "errors.h"

namespace simulator {
namespace {

thread_local cudaError_t last_error = cudaSuccess;

struct Name {
  int value;
  const char* text;
};
// The build script reads the names out of the installed header.
constexpr Name names[] = {
#include "error_names.inc"
};

} // namespace

cudaError_t fail(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

} // namespace simulator

using namespace simulator;

extern "C" {

cudaError_t cudaGetLastError() {
  auto error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError() { return last_error; }

const char* cudaGetErrorName(cudaError_t error) {
  for (auto& name : names) {
    if (name.value == int(error)) return name.text;
  }
  return "unrecognized error code";
}

// libtorch looks for "out of memory" and the like, so the common ones have words; for others the name says it.
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory (simulated GPU)";
    case cudaErrorInvalidConfiguration: return "invalid configuration of a launch (simulated GPU)";
    case cudaErrorInvalidDevice: return "invalid device ordinal (simulated GPU)";
    case cudaErrorInvalidValue: return "invalid argument (simulated GPU)";
    case cudaErrorInvalidResourceHandle: return "invalid stream or event (simulated GPU)";
    case cudaErrorNotReady: return "device not ready (simulated GPU)";
    case cudaErrorNotSupported: return "the simulated GPU does not do this";
    default: return cudaGetErrorName(error);
  }
}

} // extern "C"
