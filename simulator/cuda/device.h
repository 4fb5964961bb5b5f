// The device that is current on the calling thread.
#pragma once

namespace simulator {

int current_device();
bool is_device(int device);

} // namespace simulator
