// What the ranks of a group say to each other: collectives and messages over Gloo, on host memory.
//
// Everything here blocks and runs on the threads of communication streams. Operands are staged copies, because an
// operation that is aborted leaves Gloo's own threads behind for a while, with their buffers.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "simulated_accelerator.h"

namespace trainyard::simulated {

// An operation that ended because this rank aborted the group.
class AbortedError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Communicator {
 public:
  Communicator(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const NcclOptions& options);
  ~Communicator();

  using Start = std::function<c10::intrusive_ptr<c10d::Work>(c10d::ProcessGroupGloo&)>;
  // Starts a collective of Gloo and waits for it. Not for those that Gloo composes of others, whose works never
  // tell that they are completed.
  void run(const Start& start);

  // Throws unless all ranks of the group call the same operation as their next collective.
  void agree(const std::string& operation);

  // NCCL matches the messages of two ranks by their order on a communicator, not by tags. Coalesced messages use the
  // group's communicator; others use one of the two ranks, unless the group was connected eagerly.
  enum class Channel { Group, Pair };
  struct Message {
    bool sends = false;
    int peer = 0;
    Channel channel = Channel::Group;
    uint32_t number = 0; // among those of one direction
  };
  Message next_message(bool sends, int peer, Channel channel);
  // A send returns after the receiver has arrived. `staged` is contiguous.
  void transfer(const Message& message, at::Tensor staged);

  void abort();
  bool aborted() const { return aborted_; }
  // After a failure the ranks no longer agree on what comes next, so nothing more is tried.
  void fail(const std::string& why);
  std::string failure() const;
  void throw_if_unusable() const;

  void set_timeout(std::chrono::milliseconds timeout);
  const std::string& name() const { return name_; }

 private:
  void exchange(bool sends, at::Tensor bytes, int peer, uint32_t tag);

  const int rank_;
  const int size_;
  const std::string name_;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo_;
  std::atomic<bool> aborted_{false};
  std::atomic<int64_t> timeout_ms_;
  uint64_t collectives_ = 0; // agreed on
  mutable std::mutex mutex_; // of what follows, and of calls that start something in Gloo
  std::string failure_;
  std::map<std::tuple<bool, int, Channel>, uint32_t> numbers_;
  std::set<c10d::Work*> transfers_; // under way
};

} // namespace trainyard::simulated
