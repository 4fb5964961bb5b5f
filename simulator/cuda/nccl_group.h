// Operations that a device runs together: one collective, or all messages of one group.
#pragma once
#include <memory>
#include <vector>

#include "nccl_communicator.h"

namespace simulator {

// Reached when the work before it, on its stream and of its communicator, is complete. Complete when every operation in it
// has been reached by the ranks that take part.
class GroupWork : public Work {
 public:
  GroupWork(std::shared_ptr<Communicator> communicator, std::vector<Call> calls, uint64_t index, uint64_t epoch)
      : communicator_(std::move(communicator)), calls_(std::move(calls)), index_(index), epoch_(epoch) {}
  bool advance() override;

 private:
  bool can_start();
  void start();
  bool is_complete();
  void complete();
  void look_for_deadlock();

  bool room_for_values();
  void bring_values(const Call& call);
  void take_values(const Call& call);
  void post_letters();
  void take_letter(const Call& call);

  std::shared_ptr<Communicator> communicator_;
  std::vector<Call> calls_;
  const uint64_t index_, epoch_;
  bool started_ = false;
  uint64_t next_look_ = 0;
};

} // namespace simulator
