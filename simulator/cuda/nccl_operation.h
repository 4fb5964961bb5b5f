// One operation of a communicator, as ranks show it to each other.
#pragma once
#include <nccl.h>

#include <cstdint>
#include <string>

#include "counters.h"

namespace simulator {

struct Operation {
  Communication kind;
  ncclDataType_t type;
  int reduction; // a ncclRedOp_t; ncclNumOps stands for every operator that a program made itself
  int other;     // the root or the peer; -1 where there is none
  uint64_t count;
  // Which collective of the communicator it is, or which message of this rank to (or from) that peer.
  uint64_t number;
};

constexpr bool is_message(Communication kind) { return kind == Communication::send || kind == Communication::recv; }
bool reduces(Communication kind);

size_t element_bytes(ncclDataType_t type);
// Bytes of the buffers of a rank. They depend on the rank for gather and scatter only in being used or not.
size_t send_bytes(const Operation& operation, int ranks);
size_t recv_bytes(const Operation& operation, int ranks);

// For example "all_reduce(1024 x float32, sum)".
std::string describe(const Operation& operation);

// Whether two ranks' n-th collectives are one and the same, or a message's two ends fit together.
bool agree(const Operation& a, const Operation& b);

} // namespace simulator
