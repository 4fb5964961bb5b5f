// Hazards, counters, and host synchronizations.
#pragma once

#include <string>

#include "simulated_accelerator.h"

namespace trainyard::simulated {

const Options& options();
void set_options(const Options& options);

// A hazard found where an exception can leave: recorded, then thrown as c10::Error.
[[noreturn]] void throw_hazard(const std::string& text);

// A hazard found in a deleter or on a stream's thread: recorded, and thrown by the next launch.
void report_hazard(const std::string& text);

// Throws what report_hazard has recorded, once.
void raise_reported_hazard();

void count_kernel(const std::string& op);

// The causes by which host synchronizations are counted.
namespace cause {
inline constexpr const char* kCopyToHost = "copy to host";
inline constexpr const char* kCopyFromHost = "copy from pageable host memory";
inline constexpr const char* kItem = "item";
inline constexpr const char* kDynamicShape = "dynamic shape";
inline constexpr const char* kStream = "stream synchronize";
inline constexpr const char* kEvent = "event synchronize";
inline constexpr const char* kDevice = "device synchronize";
inline constexpr const char* kBarrier = "barrier";
inline constexpr const char* kWorkTimeout = "wait with a timeout";
} // namespace cause

// Call before the host waits. Counts, and throws if host synchronization is forbidden.
void count_host_synchronization(const char* cause, const std::string& op);

} // namespace trainyard::simulated
