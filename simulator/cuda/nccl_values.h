// Values of small collectives and messages, which are real. Larger ones move nothing.
#pragma once
#include <vector>

#include "nccl_meeting.h"

namespace simulator {

// All ranks come to the same answer, for it depends only on what they must agree on.
bool carries_values(const Operation& operation, int ranks);

// Multiplies elements by a factor, as an operator made by ncclRedOpCreatePreMulSum does to what each rank brings.
void multiply(char* bytes, const Operation& operation, int ranks, double factor);

// One element as a number; 1 where its type cannot be computed with.
double read_element(const char* bytes, ncclDataType_t type);

// What `rank` receives, from what all ranks brought to a slot. Empty where it receives nothing.
std::vector<char> combine(Meeting& meeting, const Operation& operation, uint64_t slot, int rank);

} // namespace simulator
