#include <cstdlib>
#include <mutex>

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include "fault.h"
#include "guard.h"
#include "kernels.h"
#include "memory.h"
#include "pinned.h"
#include "report.h"

namespace trainyard::simulated {
namespace {

constexpr int kMaxDevices = 64;

uint64_t number_from_env(const char* name, uint64_t fallback) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') {
    return fallback;
  }
  char* end = nullptr;
  auto value = std::strtoull(text, &end, 10);
  TORCH_CHECK(*end == '\0', name, " is not a number: ", text);
  return value;
}

} // namespace

Options Options::from_env() {
  Options options;
  options.devices = static_cast<int>(number_from_env("TRAINYARD_SIM_GPUS", options.devices));
  options.asynchronous = number_from_env("TRAINYARD_SIM_ASYNC", 0) != 0;
  options.jitter_us = static_cast<int>(number_from_env("TRAINYARD_SIM_JITTER_US", 0));
  options.memory_bytes = number_from_env("TRAINYARD_SIM_MEMORY", 0);
  return options;
}

void install(const Options& options) {
  static std::once_flag once;
  std::call_once(once, [&] {
    TORCH_CHECK(options.devices > 0 && options.devices <= kMaxDevices, "simulated accelerator: ",
                options.devices, " devices");
    set_options(options);
    reserve_device_memory();
    reserve_pinned_memory();
    install_fault_handler();
    // A higher priority than any allocator that a static initializer may have set.
    c10::SetAllocator(kDeviceType, device_allocator(), /*priority=*/255);
    register_guard();
    register_hooks();
    register_kernels();
  });
}

} // namespace trainyard::simulated
