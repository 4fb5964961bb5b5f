#include "nccl_meeting.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>

namespace simulator {
namespace {

constexpr size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }
size_t counters_bytes(int ranks) { return aligned(sizeof(std::atomic<uint64_t>) * size_t(ranks)); }
size_t seat_bytes(int ranks) { return aligned(sizeof(Seat)) + 2 * counters_bytes(ranks); }
size_t total_bytes(int ranks) { return aligned(sizeof(Board)) + seat_bytes(ranks) * size_t(ranks); }

std::string path_of(uint64_t id) {
  char path[64];
  snprintf(path, sizeof path, "/trainyard-nccl-%016llx", static_cast<unsigned long long>(id));
  return path;
}

// Searches a ring from its newest entry backwards.
template <typename Wanted>
std::optional<Operation> find(Meeting& meeting, int rank, Wanted wanted) {
  uint64_t issued = meeting.seat(rank).issued;
  for (uint64_t back = 1; back <= issued && back <= ring_size; ++back) {
    const Operation& operation = meeting.at(rank, issued - back);
    if (wanted(operation)) return operation;
  }
  return std::nullopt;
}

} // namespace

std::shared_ptr<Meeting> Meeting::open(uint64_t id, int ranks) {
  int file = shm_open(path_of(id).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) return nullptr;
  // All ranks ask for the same size, and new memory is zero, which is how everything here begins.
  bool sized = ftruncate(file, off_t(total_bytes(ranks))) == 0;
  void* memory = sized ? mmap(nullptr, total_bytes(ranks), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
  close(file);
  if (memory == MAP_FAILED) return nullptr;
  return std::shared_ptr<Meeting>(new Meeting(id, ranks, static_cast<char*>(memory)));
}

Meeting::~Meeting() { munmap(memory_, total_bytes(ranks)); }

void Meeting::unlink() { shm_unlink(path_of(id).c_str()); }

Seat& Meeting::seat(int rank) { return *reinterpret_cast<Seat*>(memory_ + aligned(sizeof(Board)) + seat_bytes(ranks) * size_t(rank)); }

std::atomic<uint64_t>& Meeting::started_sends(int rank, int peer) {
  auto* after = reinterpret_cast<char*>(&seat(rank)) + aligned(sizeof(Seat));
  return reinterpret_cast<std::atomic<uint64_t>*>(after)[peer];
}

std::atomic<uint64_t>& Meeting::started_recvs(int rank, int peer) {
  auto* after = reinterpret_cast<char*>(&seat(rank)) + aligned(sizeof(Seat)) + counters_bytes(ranks);
  return reinterpret_cast<std::atomic<uint64_t>*>(after)[peer];
}

std::optional<Operation> Meeting::find_collective(int rank, uint64_t number) {
  return find(*this, rank, [&](const Operation& o) { return !is_message(o.kind) && o.number == number; });
}

std::optional<Operation> Meeting::find_message(int rank, Communication kind, int peer, uint64_t number) {
  return find(*this, rank, [&](const Operation& o) { return o.kind == kind && o.other == peer && o.number == number; });
}

bool Meeting::reached(int rank, const Operation& operation, int mine) {
  switch (operation.kind) {
    case Communication::send: return started_recvs(rank, mine) > operation.number;
    case Communication::recv: return started_sends(rank, mine) > operation.number;
    default: return seat(rank).started_collectives > operation.number;
  }
}

std::string Meeting::name() const {
  char text[16];
  snprintf(text, sizeof text, "%08llx", static_cast<unsigned long long>(id >> 32));
  return text;
}

} // namespace simulator
