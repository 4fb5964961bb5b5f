#include "collectives.h"

#include <algorithm>
#include <numeric>
#include <thread>

#include <ATen/ATen.h>

#include "tensors.h"

namespace trainyard::simulated {
namespace {

using at::Tensor;
using c10d::OpType;

std::string describe(const Tensor& tensor) {
  return c10::str(tensor.scalar_type(), ", ", tensor.numel(), " elements");
}

const char* name_of(const c10d::ReduceOp& op) {
  static const char* names[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
  return names[op.op_];
}

int64_t sum(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t(0));
}

// --- staging --------------------------------------------------------------------------------------
// Operands are staged flat, because Gloo compares shapes, and as bytes where nothing is computed, because Gloo knows
// fewer types than NCCL.
Tensor stage(const Tensor& on_shadow) {
  return on_shadow.contiguous().view(-1).clone();
}

Tensor stage_bytes(const Tensor& on_shadow) {
  return stage(on_shadow).view(at::kByte);
}

Tensor room_for(const Tensor& on_shadow) {
  return at::empty({static_cast<int64_t>(on_shadow.nbytes())}, at::kByte);
}

void write_result(const Tensor& on_shadow, const Tensor& staged) {
  auto flat = on_shadow.as_strided({on_shadow.numel()}, {1}); // operands are dense, in any memory format
  flat.copy_(staged.view(-1).view(on_shadow.scalar_type()));
}

TensorVector map(const TensorVector& tensors, Tensor (*function)(const Tensor&)) {
  TensorVector results;
  std::transform(tensors.begin(), tensors.end(), std::back_inserter(results), function);
  return results;
}

// Gloo has no average and no reduction of booleans.
struct Reduction {
  explicit Reduction(const c10d::ReduceOp& wanted)
      : averages(wanted.op_ == c10d::ReduceOp::AVG), op(averages ? c10d::ReduceOp(c10d::ReduceOp::SUM) : wanted) {
    TORCH_CHECK_NOT_IMPLEMENTED(wanted.op_ != c10d::ReduceOp::PREMUL_SUM,
                                "simulated accelerator: PREMUL_SUM is not implemented");
  }

  bool averages;
  c10d::ReduceOp op;

  Tensor stage_operand(const Tensor& on_shadow) const {
    auto staged = stage(on_shadow);
    return staged.scalar_type() == at::kBool ? staged.to(at::kByte) : staged;
  }
  Tensor finish(const Tensor& reduced, int size, at::ScalarType type) const {
    return (averages ? reduced / size : reduced).to(type);
  }
  void all_reduce(Communicator& communicator, TensorVector& staged) const {
    c10d::AllreduceOptions options;
    options.reduceOp = op;
    communicator.run([&](auto& gloo) { return gloo.allreduce(staged, options); });
  }
};

} // namespace

// --- calls in general -----------------------------------------------------------------------------
std::string Call::name() const {
  auto name = c10d::opTypeToString(type);
  return message ? c10::str(name, message->sends ? " to rank " : " from rank ", message->peer) : name;
}

void check_operands(const Call& call) {
  for (const auto* operands : {&call.inputs, &call.outputs}) {
    for (const auto& tensor : *operands) {
      TORCH_CHECK(on_device(tensor) && tensor.layout() == at::kStrided,
                  "Tensors must be CUDA and dense, found one on ", tensor.device());
      TORCH_CHECK(tensor.is_contiguous(tensor.suggest_memory_format()), "Tensors must be contiguous");
      TORCH_CHECK(tensor.device() == call.device(), "Tensors of one call must be on one device: ", call.device(),
                  " and ", tensor.device());
    }
  }
}

std::function<void(Communicator&)> bind(const Call& call) {
  auto operation = call.name() + "(" + call.arguments + ")";
  bool collective = !call.message;
  return [operation, collective, inputs = map(call.inputs, cpu_view), outputs = map(call.outputs, cpu_view),
          body = call.body](Communicator& communicator) {
    if (collective) {
      communicator.agree(operation);
    }
    body(communicator, inputs, outputs);
  };
}

void run_together(Communicator& communicator, const std::vector<std::function<void(Communicator&)>>& collectives,
                  const std::vector<std::function<void(Communicator&)>>& messages) {
  for (const auto& collective : collectives) {
    collective(communicator);
  }
  std::vector<std::exception_ptr> errors(messages.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < messages.size(); ++i) {
    threads.emplace_back([&, i] {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      try {
        messages[i](communicator);
      } catch (...) {
        errors[i] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  for (const auto& error : errors) {
    if (error) {
      std::rethrow_exception(error);
    }
  }
}

// --- reductions -----------------------------------------------------------------------------------
Call all_reduce_call(Member member, const Tensor& tensor, const c10d::ReduceOp& op) {
  return {OpType::ALLREDUCE, c10::str(describe(tensor), ", ", name_of(op)), {tensor}, {tensor},
          [reduction = Reduction(op), member](Communicator& communicator, const auto& inputs, const auto& outputs) {
    TensorVector staged{reduction.stage_operand(inputs[0])};
    reduction.all_reduce(communicator, staged);
    write_result(outputs[0], reduction.finish(staged[0], member.size, outputs[0].scalar_type()));
  }};
}

Call reduce_call(Member member, const Tensor& tensor, const c10d::ReduceOp& op, int64_t root) {
  auto arguments = c10::str(describe(tensor), ", ", name_of(op), ", root ", root);
  return {OpType::REDUCE, arguments, {tensor}, member.rank == root ? TensorVector{tensor} : TensorVector{},
          [reduction = Reduction(op), member, root](Communicator& communicator, const auto& inputs,
                                                    const auto& outputs) {
    TensorVector staged{reduction.stage_operand(inputs[0])};
    c10d::ReduceOptions options;
    options.reduceOp = reduction.op;
    options.rootRank = root;
    communicator.run([&](auto& gloo) { return gloo.reduce(staged, options); });
    if (!outputs.empty()) {
      write_result(outputs[0], reduction.finish(staged[0], member.size, outputs[0].scalar_type()));
    }
  }};
}

Call reduce_scatter_call(Member member, const Tensor& output, const TensorVector& inputs, const c10d::ReduceOp& op) {
  int64_t elements = 0;
  for (const auto& input : inputs) {
    elements += input.numel();
  }
  TORCH_CHECK(elements == output.numel() * member.size,
              "input tensor must be the same size as output size times world size");
  return {OpType::_REDUCE_SCATTER_BASE, c10::str(describe(output), ", ", name_of(op)), inputs, {output},
          [reduction = Reduction(op), member](Communicator& communicator, const auto& ins, const auto& outs) {
    TensorVector parts;
    for (const auto& in : ins) {
      parts.push_back(reduction.stage_operand(in));
    }
    TensorVector all{at::cat(parts)};
    reduction.all_reduce(communicator, all); // which Gloo's reduce-scatter does, too
    auto part = all[0].narrow(0, member.rank * outs[0].numel(), outs[0].numel());
    write_result(outs[0], reduction.finish(part, member.size, outs[0].scalar_type()));
  }};
}

// --- movements ------------------------------------------------------------------------------------
Call broadcast_call(Member member, const Tensor& tensor, int64_t root) {
  return {OpType::BROADCAST, c10::str(describe(tensor), ", root ", root), {tensor},
          member.rank == root ? TensorVector{} : TensorVector{tensor},
          [root](Communicator& communicator, const auto& inputs, const auto& outputs) {
    TensorVector staged{stage_bytes(inputs[0])};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    communicator.run([&](auto& gloo) { return gloo.broadcast(staged, options); });
    if (!outputs.empty()) {
      write_result(outputs[0], staged[0]);
    }
  }};
}

Call all_gather_call(Member member, const Tensor& output, const Tensor& input) {
  TORCH_CHECK(output.numel() == input.numel() * member.size,
              "output tensor size must be equal to world_size times input tensor size");
  return {OpType::_ALLGATHER_BASE, describe(input), {input}, {output},
          [](Communicator& communicator, const auto& inputs, const auto& outputs) {
    auto staged = stage_bytes(inputs[0]), all = room_for(outputs[0]);
    communicator.run([&](auto& gloo) { return gloo._allgather_base(all, staged); });
    write_result(outputs[0], all);
  }};
}

Call all_gather_list_call(Member member, const TensorVector& outputs, const Tensor& input) {
  TORCH_CHECK(outputs.size() == static_cast<size_t>(member.size), "allgather needs one output per rank");
  return {OpType::ALLGATHER, describe(input), {input}, outputs,
          [member](Communicator& communicator, const auto& ins, const auto& outs) {
    auto staged = stage_bytes(ins[0]);
    auto all = at::empty({staged.numel() * member.size}, at::kByte);
    communicator.run([&](auto& gloo) { return gloo._allgather_base(all, staged); });
    for (int rank = 0; rank < member.size; ++rank) {
      write_result(outs[rank], all.narrow(0, rank * staged.numel(), staged.numel()));
    }
  }};
}

namespace {

std::vector<int64_t> bytes_per_rank(Member member, const Tensor& tensor, const std::vector<int64_t>& splits) {
  auto rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  auto bytes = static_cast<int64_t>(tensor.nbytes());
  if (splits.empty()) {
    TORCH_CHECK(rows % member.size == 0, "Tensor's dim 0 does not divide equally across group size");
    return std::vector<int64_t>(member.size, bytes / member.size);
  }
  TORCH_CHECK(static_cast<int>(splits.size()) == member.size, "Number of tensor splits not equal to group size");
  TORCH_CHECK(sum(splits) == rows, "Split sizes doesn't match total dim 0 size");
  std::vector<int64_t> result;
  for (auto split : splits) {
    result.push_back(rows == 0 ? 0 : split * (bytes / rows));
  }
  return result;
}

} // namespace

Call all_to_all_call(Member member, const Tensor& output, const Tensor& input,
                     const std::vector<int64_t>& output_splits, const std::vector<int64_t>& input_splits) {
  auto received = bytes_per_rank(member, output, output_splits), sent = bytes_per_rank(member, input, input_splits);
  return {OpType::ALLTOALL_BASE, c10::str(input.scalar_type()), {input}, {output},
          [sent, received](Communicator& communicator, const auto& inputs, const auto& outputs) {
    auto staged = stage_bytes(inputs[0]), all = room_for(outputs[0]);
    auto to = sent, from = received; // Gloo takes them
    communicator.run([&](auto& gloo) { return gloo.alltoall_base(all, staged, from, to); });
    write_result(outputs[0], all);
  }};
}

Call all_to_all_list_call(Member member, const TensorVector& outputs, const TensorVector& inputs) {
  TORCH_CHECK(outputs.size() == static_cast<size_t>(member.size) && inputs.size() == outputs.size(),
              "alltoall needs one input and one output per rank");
  return {OpType::ALLTOALL, c10::str(inputs[0].scalar_type()), inputs, outputs,
          [](Communicator& communicator, const auto& ins, const auto& outs) {
    std::vector<int64_t> sent, received; // Gloo takes them
    for (size_t i = 0; i < ins.size(); ++i) {
      sent.push_back(static_cast<int64_t>(ins[i].nbytes()));
      received.push_back(static_cast<int64_t>(outs[i].nbytes()));
    }
    auto from = at::cat(map(ins, stage_bytes)), to = at::empty({sum(received)}, at::kByte);
    communicator.run([&](auto& gloo) { return gloo.alltoall_base(to, from, received, sent); });
    int64_t begin = 0;
    for (const auto& out : outs) {
      auto bytes = static_cast<int64_t>(out.nbytes());
      write_result(out, to.narrow(0, begin, bytes));
      begin += bytes;
    }
  }};
}

Call gather_call(const TensorVector& outputs, const Tensor& input, int64_t root) {
  return {OpType::GATHER, c10::str(describe(input), ", root ", root), {input}, outputs,
          [root](Communicator& communicator, const auto& ins, const auto& outs) {
    TensorVector staged{stage_bytes(ins[0])};
    std::vector<TensorVector> rooms;
    if (!outs.empty()) {
      rooms.push_back(map(outs, room_for));
    }
    c10d::GatherOptions options;
    options.rootRank = root;
    communicator.run([&](auto& gloo) { return gloo.gather(rooms, staged, options); });
    for (size_t i = 0; i < outs.size(); ++i) {
      write_result(outs[i], rooms[0][i]);
    }
  }};
}

Call scatter_call(const Tensor& output, const TensorVector& inputs, int64_t root) {
  return {OpType::SCATTER, c10::str(describe(output), ", root ", root), inputs, {output},
          [root](Communicator& communicator, const auto& ins, const auto& outs) {
    TensorVector room{room_for(outs[0])};
    std::vector<TensorVector> staged;
    if (!ins.empty()) {
      staged.push_back(map(ins, stage_bytes));
    }
    c10d::ScatterOptions options;
    options.rootRank = root;
    communicator.run([&](auto& gloo) { return gloo.scatter(room, staged, options); });
    write_result(outs[0], room[0]);
  }};
}

Call message_call(const Communicator::Message& message, const Tensor& tensor) {
  TensorVector operand{tensor}, none;
  return {message.sends ? OpType::SEND : OpType::RECV, "", message.sends ? operand : none,
          message.sends ? none : operand,
          [message](Communicator& communicator, const auto& inputs, const auto& outputs) {
    if (message.sends) {
      communicator.transfer(message, stage(inputs[0]));
      return;
    }
    auto room = at::empty({outputs[0].numel()}, outputs[0].options());
    communicator.transfer(message, room);
    write_result(outputs[0], room);
  }, message};
}

} // namespace trainyard::simulated
