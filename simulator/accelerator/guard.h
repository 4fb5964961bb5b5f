// How libtorch reaches the device: the device guard (current device, streams, events), CUDA's hooks, and generators.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

namespace trainyard::simulated {

void register_guard();
void register_hooks();

// The default generator of a device. It draws the CPU's random numbers.
at::Generator& default_generator(c10::DeviceIndex device);

} // namespace trainyard::simulated
