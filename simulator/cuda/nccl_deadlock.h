// Finds ranks that wait for each other in a circle.
#pragma once
#include <optional>
#include <string>

#include "nccl_meeting.h"

namespace simulator {

// Says who waits for whom, if the ranks that `rank` waits for wait in a circle. Such a circle stays: a device comes to its
// next operation only when the one before is complete.
std::optional<std::string> find_deadlock(Meeting& meeting, int rank);

} // namespace simulator
