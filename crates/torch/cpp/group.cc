// Thin wrappers around c10d's stores and process groups, one function per operation.
#include "bridge.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace trainyard {
namespace {

std::chrono::milliseconds ms(uint64_t value) {
  return std::chrono::milliseconds(value);
}

std::string text(rust::Str s) {
  return std::string(s.data(), s.size());
}

std::unique_ptr<WorkHandle> make_work(c10::intrusive_ptr<c10d::Work> work, uint64_t timeout_ms = 0) {
  return std::make_unique<WorkHandle>(WorkHandle{std::move(work), timeout_ms});
}

c10d::ReduceOp reduce_op(uint8_t op) {
  return c10d::ReduceOp(static_cast<c10d::ReduceOp::RedOpType>(op));
}

std::vector<int64_t> counts(rust::Slice<const int64_t> splits) {
  return {splits.begin(), splits.end()};
}

} // namespace

std::shared_ptr<StoreHandle> tcp_store(rust::Str host, uint16_t port, int32_t listen_fd, uint64_t timeout_ms) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.timeout = ms(timeout_ms);
  options.waitWorkers = false;
  if (listen_fd >= 0) {
    options.isServer = true;
    // Rust bound this socket to the given address; TCPStore itself would listen on every interface.
    options.masterListenFd = listen_fd;
  }
  return std::make_shared<StoreHandle>(StoreHandle{c10::make_intrusive<c10d::TCPStore>(text(host), options)});
}

std::shared_ptr<StoreHandle> prefix_store(rust::Str prefix, const StoreHandle& store) {
  return std::make_shared<StoreHandle>(StoreHandle{c10::make_intrusive<c10d::PrefixStore>(text(prefix), store.store)});
}

void store_set(const StoreHandle& store, rust::Str key, rust::Slice<const uint8_t> value) {
  store.store->set(text(key), std::vector<uint8_t>(value.begin(), value.end()));
}

rust::Vec<uint8_t> store_get(const StoreHandle& store, rust::Str key, uint64_t timeout_ms) {
  store.store->wait({text(key)}, ms(timeout_ms));
  rust::Vec<uint8_t> out;
  for (uint8_t byte : store.store->get(text(key))) {
    out.push_back(byte);
  }
  return out;
}

int64_t store_add(const StoreHandle& store, rust::Str key, int64_t amount) {
  return store.store->add(text(key), amount);
}

void store_wait(const StoreHandle& store, rust::Str key, uint64_t timeout_ms) {
  store.store->wait({text(key)}, ms(timeout_ms));
}

bool store_check(const StoreHandle& store, rust::Str key) {
  return store.store->check({text(key)});
}

std::shared_ptr<GroupHandle> gloo_group(
    const StoreHandle& store, int32_t rank, int32_t size, rust::Str address, uint64_t timeout_ms) {
  auto options = c10d::ProcessGroupGloo::Options::create(ms(timeout_ms));
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(text(address)));
  options->threads = 1; // the group's communication thread issues one collective at a time
  return std::make_shared<GroupHandle>(
      c10::make_intrusive<c10d::ProcessGroupGloo>(store.store, rank, size, options));
}

void set_timeout(const GroupHandle& group, uint64_t timeout_ms) {
  group.backend->setTimeout(ms(timeout_ms));
  if (group.backend->getBackendName() == "gloo") {
    group.message_timeout_ms = timeout_ms;
  }
}

std::unique_ptr<WorkHandle> all_reduce(const GroupHandle& group, const AtTensor& tensor, uint8_t op) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = reduce_op(op);
  return make_work(group.backend->allreduce(tensors, options));
}

std::unique_ptr<WorkHandle> all_gather(const GroupHandle& group, const AtTensor& out, const AtTensor& in) {
  at::Tensor output = out, input = in;
  return make_work(group.backend->_allgather_base(output, input));
}

std::unique_ptr<WorkHandle> reduce_scatter(
    const GroupHandle& group, const AtTensor& out, const AtTensor& in, uint8_t op) {
  at::Tensor output = out, input = in;
  c10d::ReduceScatterOptions options;
  options.reduceOp = reduce_op(op);
  return make_work(group.backend->_reduce_scatter_base(output, input, options));
}

std::unique_ptr<WorkHandle> all_to_all(
    const GroupHandle& group, const AtTensor& out, const AtTensor& in,
    rust::Slice<const int64_t> out_splits, rust::Slice<const int64_t> in_splits) {
  at::Tensor output = out, input = in;
  auto received = counts(out_splits), sent = counts(in_splits);
  return make_work(group.backend->alltoall_base(output, input, received, sent));
}

std::unique_ptr<WorkHandle> broadcast(const GroupHandle& group, const AtTensor& tensor, int32_t root) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  return make_work(group.backend->broadcast(tensors, options));
}

std::unique_ptr<WorkHandle> reduce(const GroupHandle& group, const AtTensor& tensor, int32_t root, uint8_t op) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::ReduceOptions options;
  options.rootRank = root;
  options.reduceOp = reduce_op(op);
  return make_work(group.backend->reduce(tensors, options));
}

std::unique_ptr<WorkHandle> gather(const GroupHandle& group, Addresses outs, const AtTensor& in, int32_t root) {
  std::vector<std::vector<at::Tensor>> outputs;
  if (outs.size() > 0) {
    outputs.push_back(tensors_at(outs));
  }
  std::vector<at::Tensor> inputs{in};
  c10d::GatherOptions options;
  options.rootRank = root;
  return make_work(group.backend->gather(outputs, inputs, options));
}

std::unique_ptr<WorkHandle> scatter(const GroupHandle& group, const AtTensor& out, Addresses ins, int32_t root) {
  std::vector<at::Tensor> outputs{out};
  std::vector<std::vector<at::Tensor>> inputs;
  if (ins.size() > 0) {
    inputs.push_back(tensors_at(ins));
  }
  c10d::ScatterOptions options;
  options.rootRank = root;
  return make_work(group.backend->scatter(outputs, inputs, options));
}

std::unique_ptr<WorkHandle> send(const GroupHandle& group, const AtTensor& tensor, int32_t peer, int32_t tag) {
  std::vector<at::Tensor> tensors{tensor};
  return make_work(group.backend->send(tensors, peer, tag), group.message_timeout_ms);
}

std::unique_ptr<WorkHandle> recv(const GroupHandle& group, const AtTensor& tensor, int32_t peer, int32_t tag) {
  std::vector<at::Tensor> tensors{tensor};
  return make_work(group.backend->recv(tensors, peer, tag), group.message_timeout_ms);
}

void abort_group(const GroupHandle& group) {
  group.backend->abort();
}

void start_coalescing(const GroupHandle& group) {
  group.backend->startCoalescing();
}

std::unique_ptr<WorkHandle> end_coalescing(const GroupHandle& group) {
  return make_work(group.backend->endCoalescing());
}

std::unique_ptr<WorkHandle> barrier(const GroupHandle& group) {
  return make_work(group.backend->barrier());
}

void work_wait(const WorkHandle& work) {
  work.work->wait(ms(work.timeout_ms));
}

bool work_is_done(const WorkHandle& work) {
  return work.work->isCompleted();
}

} // namespace trainyard
