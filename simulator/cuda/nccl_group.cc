#include "nccl_group.h"

#include <algorithm>
#include <cstring>

#include "counters.h"
#include "log.h"
#include "memory.h"
#include "nccl_deadlock.h"
#include "nccl_values.h"

namespace simulator {

bool GroupWork::advance() {
  if (communicator_->aborted()) return true;
  if (!started_) {
    if (!can_start()) return false;
    start();
  }
  if (is_complete()) {
    complete();
    return true;
  }
  communicator_->learn_of_failure();
  look_for_deadlock();
  return false;
}

bool GroupWork::can_start() {
  // Also on another stream: a communicator does one thing after the other.
  return communicator_->completed_groups == index_ && room_for_values();
}

void GroupWork::start() {
  started_ = true;
  auto& meeting = communicator_->meeting();
  auto& seat = communicator_->seat();
  int rank = communicator_->rank();
  for (auto& call : calls_) bring_values(call);
  post_letters();
  // What the operations bring is there: others may now take it.
  for (auto& call : calls_) {
    const Operation& o = call.operation;
    switch (o.kind) {
      case Communication::send: ++meeting.started_sends(rank, o.other); break;
      case Communication::recv: ++meeting.started_recvs(rank, o.other); break;
      default: ++seat.started_collectives;
    }
  }
  seat.started += calls_.size();
}

bool GroupWork::is_complete() {
  auto& meeting = communicator_->meeting();
  int rank = communicator_->rank();
  return std::all_of(calls_.begin(), calls_.end(), [&](const Call& call) {
    const Operation& o = call.operation;
    if (is_message(o.kind)) return meeting.reached(o.other, o, rank);
    for (int r = 0; r < meeting.ranks; ++r) {
      if (!meeting.reached(r, o, rank)) return false;
    }
    return true;
  });
}

void GroupWork::complete() {
  for (auto& call : calls_) take_values(call);
  communicator_->seat().completed += calls_.size();
  ++communicator_->completed_groups;
}

void GroupWork::look_for_deadlock() {
  constexpr uint64_t pause = 200'000'000; // nanoseconds: long for a peer that is merely late, short for a person
  uint64_t now = now_nanoseconds();
  if (next_look_ == 0) next_look_ = now + pause;
  if (now < next_look_) return;
  next_look_ = now + pause;
  auto& meeting = communicator_->meeting();
  auto text = find_deadlock(meeting, communicator_->rank());
  if (text && !meeting.board().deadlock_reported.exchange(1)) complain(*text);
}

// --- values --------------------------------------------------------------------------------------

bool GroupWork::room_for_values() {
  auto& meeting = communicator_->meeting();
  const Call& first = calls_.front();
  if (is_message(first.operation.kind)) {
    size_t wanted = 0, free = 0;
    for (auto& call : calls_) wanted += call.operation.kind == Communication::send && carries_values(call.operation, meeting.ranks);
    for (auto& letter : communicator_->seat().outbox) free += !letter.full;
    return free >= std::min<size_t>(wanted, value_slots);
  }
  if (!carries_values(first.operation, meeting.ranks)) return true;
  // The slot must have been read by everybody the last time around.
  for (int r = 0; r < meeting.ranks; ++r) {
    if (meeting.seat(r).values_taken + value_slots <= first.values) return false;
  }
  return true;
}

void GroupWork::bring_values(const Call& call) {
  const Operation& o = call.operation;
  int ranks = communicator_->ranks();
  bool from_root = o.kind == Communication::broadcast || o.kind == Communication::scatter;
  if (is_message(o.kind) || !carries_values(o, ranks) || (from_root && o.other != communicator_->rank())) return;
  char* slot = communicator_->seat().values[call.values % value_slots];
  memcpy(slot, backing(call.send), send_bytes(o, ranks));
  if (call.factor != 1) multiply(slot, o, ranks, call.factor);
}

void GroupWork::take_values(const Call& call) {
  const Operation& o = call.operation;
  if (o.kind == Communication::send) return;
  if (o.kind == Communication::recv) return take_letter(call);
  int ranks = communicator_->ranks();
  if (!carries_values(o, ranks)) {
    bool to_root = o.kind == Communication::reduce || o.kind == Communication::gather;
    if (!to_root || o.other == communicator_->rank()) forget_bytes(call.recv, recv_bytes(o, ranks));
    return;
  }
  auto result = combine(communicator_->meeting(), o, call.values % value_slots, communicator_->rank());
  copy_bytes(call.recv, result.data(), result.size(), epoch_);
  communicator_->seat().values_taken = call.values + 1;
}

void GroupWork::post_letters() {
  auto& outbox = communicator_->seat().outbox;
  auto letter = std::begin(outbox);
  for (auto& call : calls_) {
    const Operation& o = call.operation;
    if (o.kind != Communication::send || !carries_values(o, communicator_->ranks())) continue;
    letter = std::find_if(letter, std::end(outbox), [](const Letter& l) { return !l.full; });
    if (letter == std::end(outbox)) return; // the rest of a very large group goes without values
    letter->to = o.other;
    letter->number = o.number;
    memcpy(letter->bytes, backing(call.send), send_bytes(o, communicator_->ranks()));
    letter->full = 1;
  }
}

void GroupWork::take_letter(const Call& call) {
  const Operation& o = call.operation;
  auto& outbox = communicator_->meeting().seat(o.other).outbox;
  size_t bytes = recv_bytes(o, communicator_->ranks());
  auto letter = std::find_if(std::begin(outbox), std::end(outbox),
                             [&](const Letter& l) { return l.full && l.to == communicator_->rank() && l.number == o.number; });
  if (letter == std::end(outbox)) return forget_bytes(call.recv, bytes);
  copy_bytes(call.recv, letter->bytes, bytes, epoch_);
  letter->full = 0;
}

} // namespace simulator
