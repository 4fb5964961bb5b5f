// The error that the runtime remembers for each thread.
#pragma once
#include <cuda_runtime_api.h>

namespace simulator {

// Remembers an error for cudaGetLastError and returns it. "Not ready" is an answer rather than an error: not remembered.
cudaError_t fail(cudaError_t error);

} // namespace simulator
