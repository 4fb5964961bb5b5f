// The handle of an operation on a communication stream.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "streams.h"

namespace trainyard::simulated {

// What the work, its group and the stream's task share.
struct Operation {
  Event end;

  // The operands, held until the work is waited for, or else until the group sees that the operation is over. A free
  // before that could hand their memory out again under the operation.
  void hold(std::vector<at::Tensor> tensors);
  // With a stream, their memory is not reused before what was launched on it is known to be over.
  void release_operands(Stream* still_using = nullptr);

  void fail(std::exception_ptr error);
  std::exception_ptr error() const;

 private:
  mutable std::mutex mutex_;
  std::vector<at::Tensor> operands_;
  std::exception_ptr error_;
};

class StreamWork final : public c10d::Work {
 public:
  StreamWork(int rank, c10d::OpType type, Stream& stream, std::shared_ptr<Operation> operation,
             std::vector<at::Tensor> outputs, bool blocks_host);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override { return outputs_; }

  // Orders the current stream after the operation and returns at once. Waiting for a barrier, and waiting with a
  // timeout, block the host too.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  void throw_if_failed() const;

  Stream& stream_;
  const std::shared_ptr<Operation> operation_;
  std::vector<at::Tensor> outputs_;
  const bool blocks_host_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// What an operation returns while operations are coalesced. Only the work of endCoalescing stands for it: waiting for
// this one orders nothing.
class CoalescedWork final : public c10d::Work {
 public:
  using c10d::Work::Work;
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
};

} // namespace trainyard::simulated
