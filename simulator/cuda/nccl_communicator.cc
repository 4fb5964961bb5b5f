#include "nccl_communicator.h"

#include <algorithm>
#include <cstring>
#include <deque>

#include "backoff.h"
#include "log.h"
#include "memory.h"
#include "nccl_group.h"
#include "nccl_values.h"

namespace simulator {
namespace {

constexpr uint64_t meeting_timeout = 60'000'000'000; // nanoseconds

// Waits for other ranks. False when it took too long or `stop` says to give up.
template <typename Done, typename Stop>
bool wait_for_ranks(Done done, Stop stop) {
  uint64_t deadline = now_nanoseconds() + meeting_timeout;
  for (Backoff backoff; !done(); backoff.pause()) {
    if (stop() || now_nanoseconds() > deadline) return false;
  }
  return true;
}

uint64_t mix(uint64_t id, uint64_t split, uint64_t color) {
  uint64_t hash = id;
  for (uint64_t word : {split + 1, color + 1}) hash = (hash ^ word) * 0x9e3779b97f4a7c15ull, hash ^= hash >> 29;
  return hash;
}

std::string called(int rank, const Operation& operation) { return "rank " + std::to_string(rank) + " called " + describe(operation); }

} // namespace

// --- meeting the other ranks ---------------------------------------------------------------------

ncclResult_t Communicator::meet(uint64_t id, int ranks, int rank) {
  auto meeting = Meeting::open(id, ranks);
  if (!meeting) {
    set_last_error("cannot create shared memory for a communicator");
    return ncclSystemError;
  }
  meeting_ = meeting;
  rank_ = rank;
  sends_.resize(size_t(ranks));
  recvs_.resize(size_t(ranks));
  if (seat().taken.exchange(1)) {
    set_last_error("two processes joined communicator " + meeting->name() + " as rank " + std::to_string(rank));
    return ncclInvalidUsage;
  }
  auto& board = meeting->board();
  ++board.arrived;
  bool all = wait_for_ranks([&] { return board.arrived >= uint32_t(ranks); }, [&] { return aborted(); });
  if (!all) {
    set_last_error("only " + std::to_string(board.arrived) + " of " + std::to_string(ranks) + " ranks joined communicator " + meeting->name());
    meeting->unlink();
    return ncclRemoteError;
  }
  meeting->unlink(); // everybody has it open; a second rank that does the same finds nothing
  return ncclSuccess;
}

ncclResult_t Communicator::settle(ncclResult_t result) {
  state_ = result;
  return result;
}

ncclResult_t Communicator::join(uint64_t id, int ranks, int rank) {
  ncclResult_t result = meet(id, ranks, rank);
  log("communicator %016llx rank %d of %d on device %d: %s", static_cast<unsigned long long>(id), rank, ranks, device, ncclGetErrorString(result));
  return settle(result);
}

// All ranks of the parent show their color and key; those of one color then meet, ordered by key.
ncclResult_t Communicator::join_split(Communicator& parent, int color, int key, uint64_t split) {
  auto& seat = parent.seat();
  seat.split_color[split % 2] = color;
  seat.split_key[split % 2] = key;
  seat.splits = split + 1;
  auto all_answered = [&] {
    for (int r = 0; r < parent.ranks(); ++r) {
      if (parent.meeting().seat(r).splits <= split) return false;
    }
    return true;
  };
  if (!wait_for_ranks(all_answered, [&] { return aborted() || parent.aborted(); })) {
    set_last_error("not all ranks of communicator " + parent.meeting().name() + " came to split it");
    return settle(ncclRemoteError);
  }
  if (color == NCCL_SPLIT_NOCOLOR) return settle(ncclSuccess);
  std::vector<std::pair<int, int>> members; // key and rank in the parent
  for (int r = 0; r < parent.ranks(); ++r) {
    auto& other = parent.meeting().seat(r);
    if (other.split_color[split % 2] == color) members.emplace_back(other.split_key[split % 2], r);
  }
  std::sort(members.begin(), members.end());
  auto me = std::find(members.begin(), members.end(), std::pair(key, parent.rank()));
  return join(mix(parent.meeting().id, split, uint64_t(color)), int(members.size()), int(me - members.begin()));
}

void Communicator::wait_until_settled() {
  for (Backoff backoff; state_ == ncclInProgress; backoff.pause()) {}
}

// --- issuing -------------------------------------------------------------------------------------

ncclResult_t Communicator::issue(std::vector<Call> calls, const StreamPointer& stream) {
  std::lock_guard lock(mutex_);
  if (state_ != ncclSuccess) return state_;
  std::vector<Call> messages, collectives;
  for (auto& call : calls) (is_message(call.operation.kind) ? messages : collectives).push_back(call);
  if (!messages.empty()) {
    if (auto error = post(std::move(messages), stream)) return error;
  }
  for (auto& call : collectives) {
    if (auto error = post({call}, stream)) return error;
  }
  return ncclSuccess;
}

ncclResult_t Communicator::post(std::vector<Call> group, const StreamPointer& stream) {
  if (!wait_for_room(group.size())) {
    set_last_error("communicator " + meeting_->name() + " was aborted, or a group has too many messages");
    return ncclInvalidUsage;
  }
  give_numbers(group);
  auto& mine = seat();
  uint64_t issued = mine.issued;
  for (auto& call : group) mine.ring[issued++ % ring_size] = call.operation;
  mine.issued = issued;
  // First show, then look: of two ranks that do this at once, at least one sees the other.
  for (auto& call : group) {
    log("communicator %s rank %d: %s", meeting_->name().c_str(), rank_, describe(call.operation).c_str());
    if (auto text = disagreement(call.operation)) return fail(*text);
  }
  submit(stream, std::make_unique<GroupWork>(shared_from_this(), std::move(group), groups_++, epoch()));
  return ncclSuccess;
}

bool Communicator::wait_for_room(size_t operations) {
  if (operations > ring_size) return false;
  auto& mine = seat();
  for (Backoff backoff; mine.issued + operations - mine.completed > ring_size; backoff.pause()) {
    if (aborted()) return false;
  }
  return !aborted();
}

void Communicator::give_numbers(std::vector<Call>& group) {
  for (auto& call : group) {
    Operation& o = call.operation;
    switch (o.kind) {
      case Communication::send: o.number = sends_[size_t(o.other)]++; break;
      case Communication::recv: o.number = recvs_[size_t(o.other)]++; break;
      default:
        o.number = collectives_++;
        if (carries_values(o, ranks())) call.values = with_values_++;
    }
  }
}

std::optional<std::string> Communicator::disagreement(const Operation& mine) {
  auto say = [&](const std::string& what, int other_rank, const Operation& other) {
    std::string first = called(rank_, mine), second = called(other_rank, other);
    if (other_rank < rank_) std::swap(first, second);
    return what + " of communicator " + meeting_->name() + ": " + first + ", " + second;
  };
  std::string number = std::to_string(mine.number + 1);
  if (is_message(mine.kind)) {
    bool sending = mine.kind == Communication::send;
    auto other = meeting_->find_message(mine.other, sending ? Communication::recv : Communication::send, rank_, mine.number);
    if (!other || agree(mine, *other)) return std::nullopt;
    int from = sending ? rank_ : mine.other, to = sending ? mine.other : rank_;
    return say("message " + number + " from rank " + std::to_string(from) + " to rank " + std::to_string(to), mine.other, *other);
  }
  for (int r = 0; r < ranks(); ++r) {
    auto other = r == rank_ ? std::nullopt : meeting_->find_collective(r, mine.number);
    if (other && !agree(mine, *other)) return say("collective " + number, r, *other);
  }
  return std::nullopt;
}

// --- failures ------------------------------------------------------------------------------------

ncclResult_t Communicator::fail(const std::string& text) {
  state_ = ncclInvalidUsage;
  set_last_error(text);
  auto& board = meeting_->board();
  if (!board.failing.exchange(1)) {
    complain(text);
    strncpy(board.failure, text.c_str(), sizeof board.failure - 1);
    board.failed = 1;
  }
  return ncclInvalidUsage;
}

void Communicator::learn_of_failure() {
  auto& board = meeting_->board();
  if (!board.failed || state_ != ncclSuccess) return;
  set_last_error(board.failure);
  state_ = ncclInvalidUsage;
}

namespace {
std::mutex error_mutex;
// Earlier texts stay: callers keep the pointer.
std::deque<std::string>& error_texts() {
  static auto& texts = *new std::deque<std::string>{""};
  return texts;
}
} // namespace

void set_last_error(const std::string& text) {
  std::lock_guard lock(error_mutex);
  if (error_texts().back() != text) error_texts().push_back(text);
}

const char* last_error() {
  std::lock_guard lock(error_mutex);
  return error_texts().back().c_str();
}

// --- operators -----------------------------------------------------------------------------------

ncclRedOp_t Communicator::add_operator(double factor) {
  std::lock_guard lock(mutex_);
  operators_[next_operator_] = factor;
  return ncclRedOp_t(next_operator_++);
}

void Communicator::remove_operator(ncclRedOp_t op) {
  std::lock_guard lock(mutex_);
  operators_.erase(int(op));
}

double Communicator::factor_of(ncclRedOp_t op) {
  std::lock_guard lock(mutex_);
  auto it = operators_.find(int(op));
  return it == operators_.end() ? 1 : it->second;
}

} // namespace simulator
