#include "clocks.h"

#include <algorithm>

namespace trainyard::simulated {

std::recursive_mutex& clock_mutex() {
  static auto* mutex = new std::recursive_mutex(); // leaked: tensors may be freed while the process exits
  return *mutex;
}

void Clock::join(const Clock& other) {
  if (times_.size() < other.times_.size()) {
    times_.resize(other.times_.size());
  }
  for (size_t i = 0; i < other.times_.size(); ++i) {
    times_[i] = std::max(times_[i], other.times_[i]);
  }
}

void Clock::raise(int stream, uint64_t time) {
  if (times_.size() <= static_cast<size_t>(stream)) {
    times_.resize(stream + 1);
  }
  times_[stream] = std::max(times_[stream], time);
}

uint64_t Clock::tick(int stream) {
  raise(stream, 0);
  return ++times_[stream];
}

bool Clock::covers(int stream, uint64_t time) const {
  return static_cast<size_t>(stream) < times_.size() && times_[stream] >= time;
}

bool Clock::covers(const Clock& other) const {
  for (size_t i = 0; i < other.times_.size(); ++i) {
    if (other.times_[i] > 0 && !covers(static_cast<int>(i), other.times_[i])) {
      return false;
    }
  }
  return true;
}

const PastAccess* AccessHistory::conflict(const PastAccess& access, const Clock& known) const {
  for (const auto& past : accesses_) {
    bool ordered = past.stream == access.stream || known.covers(past.stream, past.time);
    bool reads_only = !past.writes && !access.writes;
    if (!ordered && !reads_only && past.overlaps(access.begin, access.end)) {
      return &past;
    }
  }
  return nullptr;
}

void AccessHistory::add(PastAccess access, const Clock& host) {
  auto redundant = [&](const PastAccess& past) {
    // Every launch joins the host's clock, so none can race with what the host knows to be over.
    if (host.covers(past.stream, past.time)) {
      return true;
    }
    // Whatever is ordered after the new access is also ordered after an older one that it encloses, if the new one is
    // ordered after that: always if it writes, and within one stream.
    bool encloses = access.begin <= past.begin && past.end <= access.end;
    return encloses && (access.writes || (!past.writes && past.stream == access.stream));
  };
  accesses_.erase(std::remove_if(accesses_.begin(), accesses_.end(), redundant), accesses_.end());
  accesses_.push_back(std::move(access));
}

} // namespace trainyard::simulated
