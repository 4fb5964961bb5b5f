// A communicator as one rank holds it: how it comes to meet the others, and how its operations are issued and checked.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "nccl_meeting.h"
#include "stream.h"

namespace simulator {

// An operation with what only its own rank knows.
struct Call {
  Operation operation;
  const void* send;
  void* recv;
  double factor = 1; // of an operator that the program made
  uint64_t values = 0; // which of the collectives that carry values
};

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  explicit Communicator(int device) : device(device) {}

  // Both return when all ranks have come, or after a minute without success, or when aborted.
  ncclResult_t join(uint64_t id, int ranks, int rank);
  ncclResult_t join_split(Communicator& parent, int color, int key, uint64_t split);
  uint64_t next_split() { return splits_++; }

  void wait_until_settled(); // joined or not
  // In progress, ready, or broken.
  ncclResult_t state() const { return state_; }
  // Everything of this process that waits for the communicator is let go.
  void abort() { aborted_ = true; }
  bool aborted() const { return aborted_; }

  // Checks operations against what other ranks issued, and submits them to a stream. Collectives run one after the other;
  // messages of one call run together.
  ncclResult_t issue(std::vector<Call> calls, const StreamPointer& stream);

  // Another rank found that the ranks do not do the same: this one can go no further either.
  void learn_of_failure();

  ncclRedOp_t add_operator(double factor);
  void remove_operator(ncclRedOp_t op);
  double factor_of(ncclRedOp_t op);

  const int device;
  int rank() const { return rank_; }
  int ranks() const { return meeting_->ranks; }
  Meeting& meeting() { return *meeting_; }
  Seat& seat() { return meeting_->seat(rank_); }
  std::atomic<uint64_t> completed_groups{0};

 private:
  ncclResult_t meet(uint64_t id, int ranks, int rank);
  ncclResult_t settle(ncclResult_t result);
  ncclResult_t post(std::vector<Call> group, const StreamPointer& stream);
  bool wait_for_room(size_t operations);
  void give_numbers(std::vector<Call>& group);
  std::optional<std::string> disagreement(const Operation& operation);
  ncclResult_t fail(const std::string& text);

  std::shared_ptr<Meeting> meeting_;
  int rank_ = -1;
  std::atomic<ncclResult_t> state_{ncclInProgress};
  std::atomic<bool> aborted_{false};
  std::atomic<uint64_t> splits_{0};

  std::mutex mutex_; // guards what follows
  uint64_t groups_ = 0, collectives_ = 0, with_values_ = 0;
  std::vector<uint64_t> sends_, recvs_; // by peer
  std::map<int, double> operators_;
  int next_operator_ = ncclNumOps;
};

// The text that ncclGetLastError gives.
void set_last_error(const std::string& text);
const char* last_error();

} // namespace simulator
