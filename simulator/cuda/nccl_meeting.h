// Where the ranks of a communicator meet: shared memory in which every rank has a seat that only it writes.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "nccl_operation.h"

namespace simulator {

// How many operations a rank may be ahead of itself; a launch queue of a device is as long.
constexpr uint64_t ring_size = 1024;
// Buffers up to this size carry values, because programs steer by them.
constexpr size_t small_bytes = 2048;
constexpr uint64_t value_slots = 32;

// A small message on its way.
struct Letter {
  std::atomic<uint32_t> full; // set by the sender, cleared by the receiver
  int to;
  uint64_t number;
  char bytes[small_bytes];
};

struct Seat {
  std::atomic<uint32_t> taken;
  // Operations are counted three times: when the host issued them, when the device has come to them, and when they are
  // complete.
  std::atomic<uint64_t> issued, started, completed;
  std::atomic<uint64_t> started_collectives;
  Operation ring[ring_size];

  std::atomic<uint64_t> values_taken; // collectives with values of which this rank has the result
  char values[value_slots][small_bytes];
  Letter outbox[value_slots];

  // What the rank answered in its last two splits: it can be one ahead of a rank that still reads.
  std::atomic<uint64_t> splits;
  int split_color[2], split_key[2];
};

struct Board {
  std::atomic<uint32_t> arrived;
  std::atomic<uint32_t> failing, failed; // first comes the rank that writes the text, then the text is there
  char failure[1024];
  std::atomic<uint32_t> deadlock_reported;
};

class Meeting {
 public:
  // Null when shared memory cannot be had.
  static std::shared_ptr<Meeting> open(uint64_t id, int ranks);
  ~Meeting();

  const uint64_t id;
  const int ranks;

  Board& board() { return *reinterpret_cast<Board*>(memory_); }
  Seat& seat(int rank);
  // Messages that the device of `rank` has come to, by peer.
  std::atomic<uint64_t>& started_sends(int rank, int peer);
  std::atomic<uint64_t>& started_recvs(int rank, int peer);

  // Removes the name, once everybody is here or nobody will come any more.
  void unlink();

  // The operation at a position of a rank's ring.
  const Operation& at(int rank, uint64_t position) { return seat(rank).ring[position % ring_size]; }
  // A rank's collective, or its message to or from a peer, if it was issued.
  std::optional<Operation> find_collective(int rank, uint64_t number);
  std::optional<Operation> find_message(int rank, Communication kind, int peer, uint64_t number);
  // Whether `rank` reached the other side of an operation of `mine`.
  bool reached(int rank, const Operation& operation, int mine);

  // A name short enough for messages.
  std::string name() const;

 private:
  Meeting(uint64_t id, int ranks, char* memory) : id(id), ranks(ranks), memory_(memory) {}
  char* memory_;
};

} // namespace simulator
