// Cases of two processes: two_ranks CASE RANK STORE, with a file for the store that both ranks name.
#include <chrono>
#include <csignal>
#include <thread>

#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "cases.h"

namespace {

using Work = c10::intrusive_ptr<c10d::Work>;

int rank;
c10::intrusive_ptr<c10d::Backend> group;

double now_ms() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

void sleep_ms(int ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

Tensor full(std::vector<int64_t> sizes, double value, at::ScalarType type = at::kFloat) {
  return at::full(sizes, value, cuda(rank, type));
}

Work all_reduce(const Tensor& tensor, c10d::ReduceOp op = c10d::ReduceOp::SUM) {
  std::vector<Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  return group->allreduce(tensors, options);
}

Work send(const Tensor& tensor, int tag = 0) {
  std::vector<Tensor> tensors{tensor};
  return group->send(tensors, 1 - rank, tag);
}

Work recv(const Tensor& tensor, int tag = 0) {
  std::vector<Tensor> tensors{tensor};
  return group->recv(tensors, 1 - rank, tag);
}

std::vector<float> values(const Tensor& tensor) {
  auto host = tensor.to(at::kFloat).cpu().reshape(-1).contiguous();
  return {host.const_data_ptr<float>(), host.const_data_ptr<float>() + host.numel()};
}

void expect_values(const Tensor& tensor, const std::vector<float>& expected, const std::string& what) {
  expect(values(tensor) == expected, what);
}

// --- what works -------------------------------------------------------------------------------------
void wait_does_not_block() {
  auto x = full({4}, rank + 1);
  if (rank == 1) {
    sleep_ms(500);
  }
  auto start = now_ms();
  all_reduce(x)->wait();
  auto waited = now_ms() - start;
  auto sum = x.sum().item<float>();
  auto read = now_ms() - start;
  expect(sum == 12, "the values are reduced");
  if (rank == 0) {
    expect(waited < 100 && read > 300, c10::str("wait took ", waited, " ms, reading took ", read, " ms"));
  }
}

void reductions() {
  auto x = full({3}, rank + 1);
  all_reduce(x, c10d::ReduceOp::AVG)->wait();
  expect_values(x, {1.5, 1.5, 1.5}, "average");
  auto half = full({3}, rank + 1, at::kBFloat16);
  all_reduce(half, c10d::ReduceOp::MAX)->wait();
  expect_values(half, {2, 2, 2}, "maximum of bfloat16");
  auto counts = full({2}, rank + 1, at::kLong);
  all_reduce(counts)->wait();
  expect_values(counts, {3, 3}, "integers");
  auto y = full({2}, rank + 1);
  std::vector<Tensor> list{y};
  c10d::ReduceOptions to_last;
  to_last.rootRank = 1;
  group->reduce(list, to_last)->wait();
  expect_values(y, rank == 1 ? std::vector<float>{3, 3} : std::vector<float>{1, 1}, "reduce");
  auto in = full({4}, rank + 1), out = full({2}, 0);
  group->_reduce_scatter_base(out, in)->wait();
  expect_values(out, {3, 3}, "reduce_scatter");
  std::vector<Tensor> outs{out};
  std::vector<std::vector<Tensor>> ins{{full({2}, rank), full({2}, rank + 5)}};
  group->reduce_scatter(outs, ins)->wait();
  expect_values(out, rank == 0 ? std::vector<float>{1, 1} : std::vector<float>{11, 11}, "reduce_scatter of a list");
  std::vector<Tensor> several{full({1}, rank), full({1}, 10 * rank)};
  group->allreduce_coalesced(several)->wait();
  expect_values(several[1], {10}, "allreduce_coalesced");
  std::vector<Tensor> part{out}, whole{in};
  group->reduce_scatter_tensor_coalesced(part, whole)->wait();
  expect_values(out, {3, 3}, "reduce_scatter_tensor_coalesced");
}

void movements() {
  auto in = full({2}, rank + 1), out = full({4}, 0);
  group->_allgather_base(out, in)->wait();
  expect_values(out, {1, 1, 2, 2}, "allgather into a tensor");
  std::vector<std::vector<Tensor>> outs{{full({2}, 0), full({2}, 0)}};
  std::vector<Tensor> ins{in};
  group->allgather(outs, ins)->wait();
  expect_values(outs[0][1], {2, 2}, "allgather into a list");
  std::vector<Tensor> out_list{out}, in_list{in};
  out.zero_();
  group->allgather_into_tensor_coalesced(out_list, in_list)->wait();
  expect_values(out, {1, 1, 2, 2}, "allgather_into_tensor_coalesced");
  std::vector<Tensor> one{full({2}, rank + 1, at::kBool)};
  group->broadcast(one)->wait();
  expect_values(one[0], {1, 1}, "broadcast of booleans");
  // Rank 0 sends one row to itself and two to rank 1; rank 1 sends one to each.
  std::vector<int64_t> sent = rank == 0 ? std::vector<int64_t>{1, 2} : std::vector<int64_t>{1, 1};
  std::vector<int64_t> received = rank == 0 ? std::vector<int64_t>{1, 1} : std::vector<int64_t>{2, 1};
  auto rows = at::arange(rank == 0 ? 3 : 2, cuda(rank)) + 10 * rank, got = full({rank == 0 ? 2 : 3}, 0);
  group->alltoall_base(got, rows, received, sent)->wait();
  expect_values(got, rank == 0 ? std::vector<float>{0, 10} : std::vector<float>{1, 2, 11}, "alltoall_base");
  std::vector<Tensor> to{full({1}, 10 * rank), full({1}, 10 * rank + 1)}, from{full({1}, 0), full({1}, 0)};
  group->alltoall(from, to)->wait();
  expect_values(at::cat(from), {float(rank), float(10 + rank)}, "alltoall");
  std::vector<std::vector<Tensor>> gathered;
  if (rank == 0) {
    gathered.push_back({full({2}, 0), full({2}, 0)});
  }
  group->gather(gathered, ins)->wait();
  if (rank == 0) {
    expect_values(at::cat(gathered[0]), {1, 1, 2, 2}, "gather");
  }
  std::vector<std::vector<Tensor>> parts;
  if (rank == 0) {
    parts.push_back({full({2}, 7), full({2}, 8)});
  }
  std::vector<Tensor> mine{full({2}, 0)};
  group->scatter(mine, parts)->wait();
  expect_values(mine[0], {7.f + rank, 7.f + rank}, "scatter");
}

void exchange_coalesced() {
  for (int step = 0; step < 3; ++step) {
    auto out = full({1 << 16}, 10 * step + rank), in = full({1 << 16}, -1);
    group->startCoalescing();
    send(out);
    recv(in);
    group->endCoalescing()->wait();
    expect(in.sum().item<float>() == (10 * step + 1 - rank) * 65536.f, "both messages arrive");
  }
}

void future_orders_streams() {
  auto x = full({4}, rank + 1);
  all_reduce(x)->getFuture()->wait();
  expect_values(x.mul(10), {30, 30, 30, 30}, "after the future");
}

// Messages match by their order, whatever their tags.
void tags_are_ignored() {
  auto a = full({4}, 1), b = full({4}, 2);
  if (rank == 0) {
    auto first = send(a, 1), second = send(b, 2);
    first->wait();
    second->wait();
    guard_impl().synchronizeDevice(0);
  } else {
    auto first = recv(b, 2), second = recv(a, 1);
    first->wait();
    second->wait();
    expect_values(b, {1, 1, 1, 1}, "the first receive gets the first message");
  }
}

// Dropping a work does not free its operands under the operation.
void dropped_work() {
  if (rank == 1) {
    sleep_ms(200);
  }
  all_reduce(full({1024}, 1));
  auto other = full({1024}, 5);
  all_reduce(other)->wait();
  expect(other.sum().item<float>() == 10240, "later operations run");
}

void barrier_blocks_the_host() {
  if (rank == 1) {
    sleep_ms(300);
  }
  auto start = now_ms();
  group->barrier()->wait();
  if (rank == 0) {
    expect(now_ms() - start > 150, "the host waits");
  }
  auto causes = simulated::counters().host_synchronizations;
  expect(causes["barrier"] == 1, "and it is counted");
}

// Gradients are averaged by hooks on the device thread.
void data_parallel() {
  struct Hook : torch::autograd::PostAccumulateGradHook {
    std::function<void(const Tensor&)> body;
    void operator()(const torch::autograd::Variable& parameter) override { body(parameter); }
  };
  at::manual_seed(3);
  std::vector<Tensor> parameters{(at::randn({16, 8}) * 0.3).to(cuda(rank).device()).requires_grad_(),
                                 (at::randn({4, 16}) * 0.3).to(cuda(rank).device()).requires_grad_()};
  std::vector<Work> works;
  for (auto& parameter : parameters) {
    auto hook = std::make_unique<Hook>();
    hook->body = [&works](const Tensor& p) { works.push_back(all_reduce(p.grad(), c10d::ReduceOp::AVG)); };
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::move(hook));
  }
  at::manual_seed(100 + rank);
  for (int step = 0; step < 5; ++step) {
    auto x = at::randn({16, 8}).to(cuda(rank).device());
    at::gelu(at::linear(x, parameters[0])).matmul(parameters[1].t()).pow(2).mean().backward();
    at::NoGradGuard no_grad;
    for (auto& work : works) {
      work->wait();
    }
    works.clear();
    for (auto& parameter : parameters) {
      parameter.sub_(parameter.grad(), 0.1);
      parameter.mutable_grad().reset();
    }
  }
  auto mine = parameters[0].detach().reshape(-1), both = at::empty({2 * mine.numel()}, mine.options());
  group->_allgather_base(both, mine)->wait();
  auto host = both.cpu();
  expect(at::equal(host.narrow(0, 0, mine.numel()), host.narrow(0, mine.numel(), mine.numel())) &&
             !host.isnan().any().item<bool>(),
         "the ranks agree");
}

// --- what is caught ---------------------------------------------------------------------------------
void missing_wait() {
  auto x = full({4}, rank + 1);
  auto work = all_reduce(x);
  expect_error([&] { x.mul(10); });
  work->wait();
  expect_values(x.mul(10), {30, 30, 30, 30}, "after the wait");
}

void wait_on_another_stream() {
  auto x = full({4}, rank + 1);
  auto work = all_reduce(x);
  {
    c10::StreamGuard guard(new_stream(rank));
    work->wait();
  }
  expect_error([&] { x.mul(10); });
}

void write_under_collective() {
  auto x = full({4}, rank + 1), out = full({8}, 0);
  auto work = group->_allgather_base(out, x);
  expect_error([&] { x.add_(1); });
  work->wait();
}

void cpu_tensor() {
  expect_error([] { all_reduce(at::ones({4})); });
}

void order_differs() {
  auto x = full({4}, 1);
  expect_error([&] {
    if (rank == 0) {
      all_reduce(x)->wait();
    } else {
      std::vector<Tensor> list{x};
      group->broadcast(list)->wait();
    }
    guard_impl().synchronizeDevice(static_cast<c10::DeviceIndex>(rank));
  });
  expect_error([&] { all_reduce(x); });
}

void counts_differ() {
  auto x = full({rank == 0 ? 4 : 8}, 1);
  expect_error([&] {
    all_reduce(x)->wait();
    guard_impl().synchronizeDevice(static_cast<c10::DeviceIndex>(rank));
  });
}

// Both ranks send first: neither receives.
void crossed_sends() {
  auto out = full({4}, rank), in = full({4}, -1);
  auto sending = send(out), receiving = recv(in);
  expect_error([&] {
    sending->wait();
    receiving->wait();
    in.cpu();
  });
}

void message_sizes_differ() {
  auto x = full({rank == 0 ? 4 : 8}, rank);
  expect_error([&] {
    (rank == 0 ? send(x) : recv(x))->wait();
    x.cpu();
  });
}

void forbidden_barrier() {
  group->barrier()->wait();
  auto work = group->barrier();
  simulated::forbid_host_synchronization(true);
  expect_error([&] { work->wait(); });
  simulated::forbid_host_synchronization(false);
}

// Rank 1 never takes part; rank 0 gives up.
void abort_frees_waiters() {
  if (rank == 1) {
    sleep_ms(1500);
    return;
  }
  auto x = full({4}, 1), y = full({4}, 1);
  auto reduced = all_reduce(x), received = recv(y);
  std::thread aborting([] {
    sleep_ms(300);
    group->abort();
  });
  auto start = now_ms();
  guard_impl().synchronizeDevice(0);
  expect(now_ms() - start < 1000, "the host waits no longer than until the abort");
  aborting.join();
  expect(reduced->isCompleted() && !reduced->isSuccess() && reduced->exception() != nullptr, "the collective failed");
  expect_error([&] { received->wait(); });
  expect_error([&] { all_reduce(y); });
}

} // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    return 2;
  }
  rank = std::atoi(argv[2]);
  // As Rust and Python do: a write to a peer that has exited is an error, not the end.
  std::signal(SIGPIPE, SIG_IGN);
  simulated::install();
  guard_impl().setDevice(cuda(rank).device());
  auto store = c10::make_intrusive<c10d::FileStore>(argv[3], 2);
  simulated::NcclOptions options;
  options.timeout = std::chrono::seconds(std::string(argv[1]) == "crossed_sends" ? 1 : 20);
  options.name = "pair";
  group = simulated::make_simulated_nccl(store, rank, 2, options);
  if (std::getenv("CONNECT_EAGERLY") != nullptr) {
    group->eagerConnectSingleDevice(cuda(rank).device());
  }
  // A rank that has caught its hazard must not exit while the other one still connects to it.
  auto wait_for_peer = [&] {
    store->set("done/" + std::to_string(rank), std::vector<uint8_t>{1});
    try {
      store->wait({"done/0", "done/1"}, std::chrono::seconds(20));
    } catch (const std::exception& error) {
      say("the other rank has not ended: ", error.what());
    }
  };
  return run_case(
      {{"wait_does_not_block", wait_does_not_block},
       {"reductions", reductions},
       {"movements", movements},
       {"exchange_coalesced", exchange_coalesced},
       {"future_orders_streams", future_orders_streams},
       {"tags_are_ignored", tags_are_ignored},
       {"dropped_work", dropped_work},
       {"barrier_blocks_the_host", barrier_blocks_the_host},
       {"data_parallel", data_parallel},
       {"missing_wait", missing_wait},
       {"wait_on_another_stream", wait_on_another_stream},
       {"write_under_collective", write_under_collective},
       {"cpu_tensor", cpu_tensor},
       {"order_differs", order_differs},
       {"counts_differ", counts_differ},
       {"crossed_sends", crossed_sends},
       {"message_sizes_differ", message_sizes_differ},
       {"forbidden_barrier", forbidden_barrier},
       {"abort_frees_waiters", abort_frees_waiters}},
      argc, argv, wait_for_peer);
}
