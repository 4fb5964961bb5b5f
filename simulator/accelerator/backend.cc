// A c10d backend with NCCL's semantics: communication streams, ordering, held operands, coalescing.
#include <algorithm>
#include <list>
#include <map>
#include <optional>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "collectives.h"
#include "communicator.h"
#include "report.h"
#include "tensors.h"
#include "work.h"

namespace trainyard::simulated {
namespace {

using at::Tensor;
using c10d::OpType;
using Task = std::function<void(Communicator&)>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

const Tensor& only(const TensorVector& tensors) {
  TORCH_CHECK(tensors.size() == 1, "Expected one tensor, found ", tensors.size());
  return tensors[0];
}

const TensorVector& only(const std::vector<TensorVector>& lists) {
  TORCH_CHECK(lists.size() == 1, "Expected one list of tensors, found ", lists.size());
  return lists[0];
}

std::string hint(const std::string& name, const std::string& why) {
  bool message = name.rfind("SEND", 0) == 0 || name.rfind("RECV", 0) == 0;
  bool timed_out = why.find("imed out") != std::string::npos;
  return message && timed_out ? "; messages of one communicator run one after the other, so an exchange between two "
                                "ranks deadlocks unless its messages are coalesced (startCoalescing, endCoalescing)"
                              : "";
}

// Runs on a communication stream's thread. A failure goes to the work and, as NCCL's watchdog would end the process,
// to the next launch of the process.
void run_task(const std::shared_ptr<Communicator>& communicator, const std::string& name, int rank,
              const Task& task, Operation& operation) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto fail = [&](const std::string& why) {
    auto text = c10::str("NCCL operation ", name, " of group '", communicator->name(), "' failed on rank ", rank, ": ",
                         why, hint(name, why));
    communicator->fail(why);
    operation.fail(std::make_exception_ptr(c10::Error(text)));
    report_hazard(text);
  };
  try {
    communicator->throw_if_unusable();
  } catch (const std::exception&) {
    operation.fail(std::current_exception()); // the first failure was reported
    return;
  }
  try {
    task(*communicator);
  } catch (const AbortedError&) {
    operation.fail(std::current_exception()); // the caller wanted it
  } catch (const c10::Error& error) {
    fail(error.what_without_backtrace());
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

class SimulatedNccl final : public c10d::Backend {
 public:
  SimulatedNccl(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const NcclOptions& options)
      : Backend(rank, size), communicator_(std::make_shared<Communicator>(store, rank, size, options)) {}

  ~SimulatedNccl() override {
    for (auto& [key, stream] : streams_) {
      if (stream->idle()) { // one that hangs in an operation must not become another group's
        return_stream(*stream);
      }
    }
  }

  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override { communicator_->set_timeout(timeout); }
  void eagerConnectSingleDevice(at::Device device) override {
    connected_eagerly_ = true;
    stream_of(device.index(), kGroup);
  }
  void abort() override { communicator_->abort(); }
  void shutdown() override { communicator_->abort(); }
  c10d::ErrorType getError() override {
    return communicator_->failure().empty() ? c10d::ErrorType::SUCCESS : c10d::ErrorType::COMM_ERROR;
  }

  // --- collectives --------------------------------------------------------------------------------
  WorkPtr allreduce(TensorVector& tensors, const c10d::AllreduceOptions& options) override {
    return start(all_reduce_call(member(), only(tensors), options.reduceOp));
  }

  WorkPtr allreduce_coalesced(TensorVector& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    std::vector<Call> calls;
    for (const auto& tensor : tensors) {
      calls.push_back(all_reduce_call(member(), tensor, options.reduceOp));
    }
    return start_together(OpType::ALLREDUCE_COALESCED, std::move(calls));
  }

  WorkPtr reduce(TensorVector& tensors, const c10d::ReduceOptions& options) override {
    return start(reduce_call(member(), only(tensors), options.reduceOp, options.rootRank));
  }

  WorkPtr broadcast(TensorVector& tensors, const c10d::BroadcastOptions& options) override {
    return start(broadcast_call(member(), only(tensors), options.rootRank));
  }

  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions&) override {
    return start(all_gather_call(member(), output, input));
  }

  WorkPtr allgather(std::vector<TensorVector>& outputs, TensorVector& inputs, const c10d::AllgatherOptions&) override {
    return start(all_gather_list_call(member(), only(outputs), only(inputs)));
  }

  WorkPtr allgather_into_tensor_coalesced(
      TensorVector& outputs, TensorVector& inputs, const c10d::AllgatherOptions&) override {
    std::vector<Call> calls;
    for (size_t i = 0; i < inputs.size(); ++i) {
      calls.push_back(all_gather_call(member(), outputs.at(i), inputs[i]));
    }
    return start_together(OpType::COALESCED, std::move(calls));
  }

  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return start(reduce_scatter_call(member(), output, {input}, options.reduceOp));
  }

  WorkPtr reduce_scatter(TensorVector& outputs, std::vector<TensorVector>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(only(inputs).size() == static_cast<size_t>(size_), "reduce_scatter needs one input per rank");
    return start(reduce_scatter_call(member(), only(outputs), only(inputs), options.reduceOp));
  }

  WorkPtr reduce_scatter_tensor_coalesced(
      TensorVector& outputs, TensorVector& inputs, const c10d::ReduceScatterOptions& options) override {
    std::vector<Call> calls;
    for (size_t i = 0; i < inputs.size(); ++i) {
      calls.push_back(reduce_scatter_call(member(), outputs.at(i), {inputs[i]}, options.reduceOp));
    }
    return start_together(OpType::REDUCE_SCATTER_TENSOR_COALESCED, std::move(calls));
  }

  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions&) override {
    return start(all_to_all_call(member(), output, input, output_splits, input_splits));
  }

  WorkPtr alltoall(TensorVector& outputs, TensorVector& inputs, const c10d::AllToAllOptions&) override {
    return start(all_to_all_list_call(member(), outputs, inputs));
  }

  WorkPtr gather(std::vector<TensorVector>& outputs, TensorVector& inputs,
                 const c10d::GatherOptions& options) override {
    return start(gather_call(outputs.empty() ? TensorVector{} : only(outputs), only(inputs), options.rootRank));
  }

  WorkPtr scatter(TensorVector& outputs, std::vector<TensorVector>& inputs,
                  const c10d::ScatterOptions& options) override {
    return start(scatter_call(only(outputs), inputs.empty() ? TensorVector{} : only(inputs), options.rootRank));
  }

  // An all-reduce of one element. Waiting for it blocks the host, as with ProcessGroupNCCL.
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    c10::DeviceGuard guard(barrier_device(options));
    auto call = all_reduce_call(member(), at::ones({1}, at::TensorOptions().device(kDeviceType).dtype(at::kFloat)),
                                c10d::ReduceOp::SUM);
    call.type = OpType::BARRIER;
    return start(std::move(call));
  }

  // --- messages -----------------------------------------------------------------------------------
  WorkPtr send(TensorVector& tensors, int peer, int) override { return message(true, only(tensors), peer); }
  WorkPtr recv(TensorVector& tensors, int peer, int) override { return message(false, only(tensors), peer); }

  void startCoalescing() override {
    TORCH_CHECK(!coalesced_, "operations are already being coalesced");
    coalesced_.emplace();
  }

  WorkPtr endCoalescing() override {
    TORCH_CHECK(coalesced_, "endCoalescing without startCoalescing");
    auto calls = std::move(*coalesced_);
    coalesced_.reset();
    if (calls.empty()) {
      return c10::make_intrusive<CoalescedWork>(rank_, OpType::COALESCED);
    }
    return start_together(OpType::COALESCED, std::move(calls));
  }

 private:
  static constexpr int kGroup = -1; // stands for the whole group where a peer is named

  Member member() const { return {rank_, size_}; }

  // As ProcessGroupNCCL guesses: the bound device, the one used before, or rank modulo devices.
  c10::Device barrier_device(const c10d::BarrierOptions& options) {
    if (options.device && options.device->has_index()) {
      return *options.device;
    }
    if (!options.device_ids.empty()) {
      return {kDeviceType, static_cast<c10::DeviceIndex>(options.device_ids[0])};
    }
    if (getBoundDeviceId()) {
      return *getBoundDeviceId();
    }
    std::lock_guard<std::mutex> lock(mutex_);
    auto used = streams_.empty() ? rank_ % simulated::options().devices : streams_.begin()->first.first;
    return {kDeviceType, static_cast<c10::DeviceIndex>(used)};
  }

  WorkPtr message(bool sends, const Tensor& tensor, int peer) {
    using Channel = Communicator::Channel;
    bool on_group = coalesced_.has_value() || connected_eagerly_;
    auto message = communicator_->next_message(sends, peer, on_group ? Channel::Group : Channel::Pair);
    return start(message_call(message, tensor));
  }

  // --- starting -----------------------------------------------------------------------------------
  Stream& stream_of(c10::DeviceIndex device, int peer) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& stream = streams_[{device, peer}];
    if (stream == nullptr) {
      stream = &take_stream(device);
    }
    return *stream;
  }

  void check(const Call& call) const {
    communicator_->throw_if_unusable();
    check_operands(call);
  }

  WorkPtr start(Call call) {
    check(call);
    if (coalesced_) {
      auto type = call.type;
      coalesced_->push_back(std::move(call));
      return c10::make_intrusive<CoalescedWork>(rank_, type);
    }
    bool on_pair = call.message && call.message->channel == Communicator::Channel::Pair;
    auto& stream = stream_of(call.device().index(), on_pair ? call.message->peer : kGroup);
    return launch_on(stream, call.type, call.name(), call.inputs, call.outputs, bind(call));
  }

  WorkPtr start_together(OpType type, std::vector<Call> calls) {
    TORCH_CHECK(!calls.empty(), "no tensors");
    if (coalesced_) { // a coalesced operation between startCoalescing and endCoalescing
      for (auto& call : calls) {
        start(std::move(call));
      }
      return c10::make_intrusive<CoalescedWork>(rank_, type);
    }
    TensorVector inputs, outputs;
    std::vector<Task> collectives, messages;
    std::string names;
    for (const auto& call : calls) {
      check(call);
      inputs.insert(inputs.end(), call.inputs.begin(), call.inputs.end());
      outputs.insert(outputs.end(), call.outputs.begin(), call.outputs.end());
      (call.message ? messages : collectives).push_back(bind(call));
      names += (names.empty() ? "" : ", ") + call.name();
    }
    auto& stream = stream_of(calls[0].device().index(), kGroup);
    return launch_on(stream, type, c10d::opTypeToString(type) + "[" + names + "]", inputs, outputs,
                     [collectives, messages](Communicator& communicator) {
      run_together(communicator, collectives, messages);
    });
  }

  WorkPtr launch_on(Stream& stream, OpType type, const std::string& name, const TensorVector& inputs,
                    const TensorVector& outputs, const Task& task) {
    c10::DeviceGuard guard(c10::Device(kDeviceType, stream.device));
    release_finished();
    Event ready; // the operation comes after what the caller's stream has queued
    ready.record(current_stream(stream.device));
    ready.block(stream);
    std::vector<Access> accesses;
    std::transform(inputs.begin(), inputs.end(), std::back_inserter(accesses), reads);
    std::transform(outputs.begin(), outputs.end(), std::back_inserter(accesses), writes);
    auto operation = std::make_shared<Operation>();
    auto operands = inputs;
    operands.insert(operands.end(), outputs.begin(), outputs.end());
    operation->hold(std::move(operands));
    // The task holds the communicator, because the backend may be destroyed before it runs.
    auto body = [communicator = communicator_, rank = rank_, name, task, operation] {
      run_task(communicator, name, rank, task, *operation);
    };
    launch(stream, name, accesses, std::move(body), Run::Queue);
    operation->end.record(stream);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      started_.push_back({operation, stream});
    }
    return c10::make_intrusive<StreamWork>(rank_, type, stream, operation, outputs, type == OpType::BARRIER);
  }

  // Releases the operands of works that were dropped without a wait. That an operation is over is no knowledge of the
  // caller's: the operands' memory stays reserved until a clock tells it, so that no verdict depends on timing.
  void release_finished() {
    std::lock_guard<std::mutex> lock(mutex_);
    started_.remove_if([](const Started& started) {
      bool over = started.operation->end.completed();
      if (over) {
        started.operation->release_operands(&started.stream);
      }
      return over;
    });
  }

  struct Started {
    std::shared_ptr<Operation> operation;
    Stream& stream;
  };

  const std::shared_ptr<Communicator> communicator_;
  bool connected_eagerly_ = false;
  std::optional<std::vector<Call>> coalesced_;
  std::mutex mutex_; // of what follows
  std::map<std::pair<c10::DeviceIndex, int>, Stream*> streams_; // by device, and peer or kGroup
  std::list<Started> started_;
};

} // namespace

c10::intrusive_ptr<c10d::Backend> make_simulated_nccl(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const NcclOptions& options) {
  return c10::make_intrusive<SimulatedNccl>(store, rank, size, options);
}

} // namespace trainyard::simulated
