// A launch made inside a library: cuBLAS, cuBLASLt or cuDNN.
#pragma once
#include <cuda_runtime_api.h>

#include "counters.h"
#include "device.h"
#include "log.h"
#include "memory.h"
#include "stream.h"

namespace simulator {

// False where the stream does not exist.
inline bool launch_in_library(const char* what, cudaStream_t stream) {
  log("launch device %d stream %u %s", current_device(), stream_number(stream), what);
  if (!find_stream(stream)) return false;
  note_launch();
  count_library_launch(current_device());
  return true;
}

} // namespace simulator
