#include "communicator.h"

#include <cstring>
#include <thread>

#include <ATen/ATen.h>

namespace trainyard::simulated {
namespace {

constexpr int64_t kDescriptionBytes = 192;
// How long an aborted collective may go unnoticed.
constexpr std::chrono::milliseconds kAbortPoll(50);

at::Tensor pack(const std::string& text) {
  auto bytes = at::zeros({kDescriptionBytes}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), text.data(), std::min<size_t>(text.size(), kDescriptionBytes - 1));
  return bytes;
}

std::string unpack(const at::Tensor& bytes) {
  return static_cast<const char*>(bytes.const_data_ptr());
}

std::string describe(const at::Tensor& tensor) {
  return c10::str(tensor.numel(), " elements of ", tensor.scalar_type());
}

} // namespace

Communicator::Communicator(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const NcclOptions& options)
    : rank_(rank), size_(size), name_(options.name), timeout_ms_(options.timeout.count()) {
  auto gloo = c10d::ProcessGroupGloo::Options::create(options.timeout);
  gloo->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(options.address));
  gloo->threads = 1; // one communication stream runs one collective at a time
  gloo_ = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, gloo);
}

Communicator::~Communicator() {
  if (aborted_ || !failure_.empty()) {
    // Its destructor waits for operations that will only end by their timeout.
    std::thread([gloo = std::move(gloo_)] {}).detach();
  }
}

// --- collectives ----------------------------------------------------------------------------------
void Communicator::run(const Start& start) {
  c10::intrusive_ptr<c10d::Work> work;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    work = start(*gloo_);
  }
  for (;;) {
    if (aborted_) {
      throw AbortedError("the group was aborted");
    }
    try {
      work->wait(kAbortPoll);
      return;
    } catch (const std::exception&) {
      if (work->isCompleted()) {
        // It failed, or it completed after the wait had given up.
        if (auto error = work->exception()) {
          std::rethrow_exception(error);
        }
        return;
      }
    }
  }
}

void Communicator::agree(const std::string& operation) {
  auto mine = pack(operation);
  auto all = at::empty({size_ * kDescriptionBytes}, at::kByte);
  run([&](auto& gloo) { return gloo._allgather_base(all, mine); });
  auto number = collectives_++;
  for (int rank = 0; rank < size_; ++rank) {
    auto theirs = unpack(all.narrow(0, rank * kDescriptionBytes, kDescriptionBytes));
    TORCH_CHECK(theirs == unpack(mine), "collective order differs between ranks: collective ", number, " is ",
                unpack(mine), " on rank ", rank_, " but ", theirs, " on rank ", rank);
  }
}

// --- messages -------------------------------------------------------------------------------------
Communicator::Message Communicator::next_message(bool sends, int peer, Channel channel) {
  TORCH_CHECK(peer >= 0 && peer < size_ && peer != rank_, "no such peer of rank ", rank_, ": ", peer);
  std::lock_guard<std::mutex> lock(mutex_);
  return {sends, peer, channel, numbers_[{sends, peer, channel}]++};
}

void Communicator::transfer(const Message& message, at::Tensor staged) {
  enum Part : uint32_t { kHeader, kVerdict, kData };
  auto tag = [&](Part part) {
    return (message.number % (1u << 27)) << 3 | static_cast<uint32_t>(message.channel) << 2 | part;
  };
  auto mine = describe(staged);
  auto header = pack(mine), verdict = pack("");
  if (message.sends) {
    // The verdict comes once the receiver has reached this message: a send waits for it, as NCCL's may.
    exchange(true, header, message.peer, tag(kHeader));
    exchange(false, verdict, message.peer, tag(kVerdict));
  } else {
    exchange(false, header, message.peer, tag(kHeader));
    if (unpack(header) != mine) {
      verdict = pack(c10::str("rank ", message.peer, " sends ", unpack(header), ", rank ", rank_, " receives ", mine));
    }
    exchange(true, verdict, message.peer, tag(kVerdict));
  }
  auto disagreement = unpack(verdict);
  TORCH_CHECK(disagreement.empty(), "message ", message.number, " between ranks ", rank_, " and ", message.peer,
              " does not match: ", disagreement, "; messages match by their order, tags are ignored");
  exchange(message.sends, staged.reshape(-1).view(at::kByte), message.peer, tag(kData));
}

void Communicator::exchange(bool sends, at::Tensor bytes, int peer, uint32_t tag) {
  std::vector<at::Tensor> list{bytes};
  c10::intrusive_ptr<c10d::Work> work;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (aborted_) {
      throw AbortedError("the group was aborted");
    }
    int gloo_tag = static_cast<int>(tag & 0x7fffffff);
    work = sends ? gloo_->send(list, peer, gloo_tag) : gloo_->recv(list, peer, gloo_tag);
    transfers_.insert(work.get());
  }
  auto finish = [&] {
    std::lock_guard<std::mutex> lock(mutex_);
    transfers_.erase(work.get());
    if (aborted_) {
      throw AbortedError("the group was aborted");
    }
  };
  try {
    work->wait(std::chrono::milliseconds(timeout_ms_));
  } catch (const std::exception&) {
    finish();
    throw;
  }
  finish();
}

// --- failures -------------------------------------------------------------------------------------
void Communicator::abort() {
  std::lock_guard<std::mutex> lock(mutex_);
  aborted_ = true;
  for (auto* work : transfers_) {
    work->abort();
  }
}

void Communicator::fail(const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (failure_.empty()) {
    failure_ = why;
  }
}

std::string Communicator::failure() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

void Communicator::throw_if_unusable() const {
  if (aborted_) {
    throw AbortedError("NCCL communicator was aborted on rank " + std::to_string(rank_));
  }
  auto why = failure();
  TORCH_CHECK(why.empty(), "NCCL communicator of group '", name_, "' failed before on rank ", rank_, ": ", why);
}

void Communicator::set_timeout(std::chrono::milliseconds timeout) {
  timeout_ms_ = timeout.count();
  gloo_->setTimeout(timeout);
}

} // namespace trainyard::simulated
