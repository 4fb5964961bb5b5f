#include "work.h"

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include "memory.h"
#include "report.h"

namespace trainyard::simulated {

void Operation::hold(std::vector<at::Tensor> tensors) {
  std::lock_guard<std::mutex> lock(mutex_);
  operands_ = std::move(tensors);
}

void Operation::release_operands(Stream* still_using) {
  std::vector<at::Tensor> released; // freed after the lock: their deleters take others
  std::lock_guard<std::mutex> lock(mutex_);
  released.swap(operands_);
  for (const auto& tensor : released) {
    if (still_using != nullptr) {
      record_stream(tensor.storage().data_ptr(), *still_using);
    }
  }
}

void Operation::fail(std::exception_ptr error) {
  std::lock_guard<std::mutex> lock(mutex_);
  error_ = std::move(error);
}

std::exception_ptr Operation::error() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

StreamWork::StreamWork(int rank, c10d::OpType type, Stream& stream, std::shared_ptr<Operation> operation,
                       std::vector<at::Tensor> outputs, bool blocks_host)
    : Work(rank, type), stream_(stream), operation_(std::move(operation)), outputs_(std::move(outputs)),
      blocks_host_(blocks_host) {}

bool StreamWork::isCompleted() {
  return operation_->end.query();
}

bool StreamWork::isSuccess() const {
  return operation_->error() == nullptr;
}

std::exception_ptr StreamWork::exception() const {
  return operation_->error();
}

void StreamWork::throw_if_failed() const {
  if (auto error = operation_->error()) {
    std::rethrow_exception(error);
  }
}

bool StreamWork::wait(std::chrono::milliseconds timeout) {
  throw_if_failed();
  c10::DeviceGuard guard(c10::Device(kDeviceType, stream_.device));
  auto& current = current_stream(stream_.device);
  operation_->end.block(current);
  operation_->release_operands();
  if (blocks_host_) {
    synchronize_stream(current, cause::kBarrier, "barrier");
    throw_if_failed();
  } else if (timeout != kNoTimeout) {
    operation_->end.synchronize(cause::kWorkTimeout);
    throw_if_failed();
  }
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> StreamWork::getFuture() {
  if (!future_) {
    auto stream = stream_.handle();
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{stream.device()});
    // Completed at once: whoever waits for the future orders its stream after the events that are recorded here.
    c10::StreamGuard guard(stream);
    future_->markCompleted(c10::IValue(outputs_));
  }
  return future_;
}

} // namespace trainyard::simulated
