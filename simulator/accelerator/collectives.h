// What each operation of a group does with its operands, once its turn on a communication stream has come.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "communicator.h"

namespace trainyard::simulated {

using TensorVector = std::vector<at::Tensor>;

// A rank in its group.
struct Member {
  int rank;
  int size;
};

// One operation of the caller.
struct Call {
  c10d::OpType type;
  std::string arguments; // which all ranks must agree on
  TensorVector inputs;
  TensorVector outputs;
  // Gets the operands as CPU tensors on the shadow of their memory.
  std::function<void(Communicator&, const TensorVector& inputs, const TensorVector& outputs)> body;
  std::optional<Communicator::Message> message = std::nullopt; // of a send or receive

  std::string name() const;
  c10::Device device() const { return (inputs.empty() ? outputs : inputs).at(0).device(); }
};

// Throws unless NCCL would take the operands.
void check_operands(const Call& call);

// The call as a task, which does not hold its operands.
std::function<void(Communicator&)> bind(const Call& call);

// Collectives one after the other, then messages all at once, since some may only end after others.
void run_together(Communicator& communicator, const std::vector<std::function<void(Communicator&)>>& collectives,
                  const std::vector<std::function<void(Communicator&)>>& messages);

Call all_reduce_call(Member member, const at::Tensor& tensor, const c10d::ReduceOp& op);
Call reduce_call(Member member, const at::Tensor& tensor, const c10d::ReduceOp& op, int64_t root);
Call broadcast_call(Member member, const at::Tensor& tensor, int64_t root);
Call all_gather_call(Member member, const at::Tensor& output, const at::Tensor& input);
Call all_gather_list_call(Member member, const TensorVector& outputs, const at::Tensor& input);
// The inputs are one tensor with all ranks' parts, or one tensor per rank.
Call reduce_scatter_call(Member member, const at::Tensor& output, const TensorVector& inputs, const c10d::ReduceOp& op);
// Splits are rows per rank; none means equal parts.
Call all_to_all_call(Member member, const at::Tensor& output, const at::Tensor& input,
                     const std::vector<int64_t>& output_splits, const std::vector<int64_t>& input_splits);
Call all_to_all_list_call(Member member, const TensorVector& outputs, const TensorVector& inputs);
// Only the root has outputs to gather, or inputs to scatter.
Call gather_call(const TensorVector& outputs, const at::Tensor& input, int64_t root);
Call scatter_call(const at::Tensor& output, const TensorVector& inputs, int64_t root);
Call message_call(const Communicator::Message& message, const at::Tensor& tensor);

} // namespace trainyard::simulated
