// Turns a fault on a device address into a message before the process dies of it.
#pragma once
#include <cstdint>
#include <optional>

namespace simulator {

// Installs the handler. Called with the first allocation, by when the program has installed handlers of its own.
void report_host_access();

// The device whose memory holds an address, if that can be found out without waiting for a lock.
std::optional<int> try_device_of(uintptr_t address);

} // namespace simulator
