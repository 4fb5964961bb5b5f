#include "nccl_deadlock.h"

#include <algorithm>
#include <vector>

namespace simulator {
namespace {

struct Wait {
  int rank;
  Operation operation;
  int for_rank;
};

// What a rank's device is at and cannot complete.
std::vector<Wait> waits_of(Meeting& meeting, int rank) {
  std::vector<Wait> waits;
  auto& seat = meeting.seat(rank);
  for (uint64_t i = seat.completed, end = seat.started; i < end; ++i) {
    const Operation& o = meeting.at(rank, i);
    for (int other = 0; other < meeting.ranks; ++other) {
      bool takes_part = is_message(o.kind) ? other == o.other : other != rank;
      if (takes_part && !meeting.reached(other, o, rank)) waits.push_back({rank, o, other});
    }
  }
  return waits;
}

// Follows waits from the last one of a path until a rank comes up again; the path then ends with the circle.
bool follow(Meeting& meeting, int rank, std::vector<Wait>& path, std::vector<bool>& seen) {
  seen[size_t(rank)] = true;
  for (auto& wait : waits_of(meeting, rank)) {
    path.push_back(wait);
    auto begin = std::find_if(path.begin(), path.end(), [&](const Wait& w) { return w.rank == wait.for_rank; });
    if (begin != path.end()) {
      path.erase(path.begin(), begin);
      return true;
    }
    if (!seen[size_t(wait.for_rank)] && follow(meeting, wait.for_rank, path, seen)) return true;
    path.pop_back();
  }
  return false;
}

std::vector<uint64_t> progress(Meeting& meeting) {
  std::vector<uint64_t> all;
  for (int r = 0; r < meeting.ranks; ++r) {
    all.push_back(meeting.seat(r).started);
    all.push_back(meeting.seat(r).completed);
  }
  return all;
}

} // namespace

std::optional<std::string> find_deadlock(Meeting& meeting, int rank) {
  auto before = progress(meeting);
  std::vector<Wait> circle;
  std::vector<bool> seen(static_cast<size_t>(meeting.ranks));
  // Ranks move on while this one looks: only what did not change in between is a finding.
  if (!follow(meeting, rank, circle, seen) || progress(meeting) != before) return std::nullopt;
  std::string text = "deadlock in communicator " + meeting.name() + ":";
  for (size_t i = 0; i < circle.size(); ++i) {
    auto& wait = circle[i];
    text += (i ? ", rank " : " rank ") + std::to_string(wait.rank) + " waits in " + describe(wait.operation) + " for rank " + std::to_string(wait.for_rank);
  }
  return text + "; operations that wait for each other belong between ncclGroupStart and ncclGroupEnd";
}

} // namespace simulator
