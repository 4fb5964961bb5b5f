// Cases of one process: values, asynchrony, memory, and one violation per rule.
#include <chrono>
#include <thread>

#include <torch/csrc/autograd/variable.h>
#include <unistd.h>

#include "cases.h"

namespace {

double now_ms() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

// --- values ---------------------------------------------------------------------------------------
struct Hook : torch::autograd::PostAccumulateGradHook {
  std::function<void()> body;
  void operator()(const torch::autograd::Variable&) override { body(); }
};

struct Trained {
  std::vector<Tensor> parameters;
  double loss = 0;
  int hooks = 0;
  int hooks_on_other_threads = 0;
};

// Linear, GELU, layer norm, RMS norm, linear; cross entropy; AdamW with the foreach and fused operators.
Trained train(at::Device device) {
  at::manual_seed(5);
  Trained result;
  auto& p = result.parameters;
  for (auto sizes : std::vector<std::vector<int64_t>>{{16, 8}, {16}, {16}, {16}, {16}, {4, 16}, {4}}) {
    p.push_back((at::randn(sizes) * 0.3).to(device).requires_grad_());
  }
  auto thread = std::this_thread::get_id();
  for (auto& parameter : p) {
    auto hook = std::make_unique<Hook>();
    hook->body = [&result, thread] {
      ++result.hooks;
      result.hooks_on_other_threads += std::this_thread::get_id() != thread;
    };
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::move(hook));
  }
  std::vector<Tensor> exp_avgs, exp_avg_sqs, steps;
  for (const auto& parameter : p) {
    exp_avgs.push_back(at::zeros_like(parameter));
    exp_avg_sqs.push_back(at::zeros_like(parameter));
    steps.push_back(at::zeros({}, parameter.options()));
  }
  auto x = at::randn({32, 8}).to(device);
  auto y = at::randint(4, {32}, at::kLong).to(device);
  for (int step = 0; step < 5; ++step) {
    auto h = at::gelu(at::linear(x, p[0], p[1]));
    h = at::rms_norm(at::layer_norm(h, {16}, p[2], p[3]), {16}, p[4], 1e-5);
    auto loss = at::cross_entropy_loss(at::linear(h, p[5], p[6]), y);
    loss.backward();
    at::NoGradGuard no_grad;
    std::vector<Tensor> grads, values;
    for (auto& parameter : p) {
      grads.push_back(parameter.grad());
      values.push_back(parameter.detach());
    }
    auto norm = at::linalg_vector_norm(at::stack(at::_foreach_norm(grads, 2)));
    at::_foreach_mul_(grads, at::clamp(1.0 / (norm + 1e-6), std::nullopt, 1.0));
    at::_foreach_add_(steps, 1);
    at::_fused_adamw_(values, grads, exp_avgs, exp_avg_sqs, {}, steps, 1e-2, 0.9, 0.99, 0.01, 1e-8, false, false);
    for (auto& parameter : p) {
      parameter.mutable_grad().reset();
    }
    result.loss = loss.item<double>();
  }
  return result;
}

void training_equals_cpu() {
  auto device = train(cuda().device()), cpu = train(at::kCPU);
  bool equal = device.loss == cpu.loss;
  for (size_t i = 0; i < cpu.parameters.size(); ++i) {
    equal &= at::equal(device.parameters[i].detach().cpu(), cpu.parameters[i].detach());
  }
  expect(equal, "parameters and loss equal the CPU's bit for bit");
  expect(device.hooks == 35 && device.hooks_on_other_threads == 35, "hooks run on the device thread");
  expect(cpu.hooks_on_other_threads == 0, "hooks of the CPU run on the calling thread");
  auto kernels = simulated::counters().kernels_by_operator;
  expect(kernels["aten::_fused_rms_norm"] == 5 && kernels["aten::_fused_rms_norm_backward"] == 5, "rms_norm is fused");
  expect(kernels["aten::_foreach_norm.Scalar"] == 5, "a list is one kernel");
}

struct Attention {
  Tensor out, dq, dk, dv;
};

Attention attend(at::Device device, at::ScalarType type, int64_t kv_heads, bool causal) {
  at::manual_seed(3);
  auto make = [&](int64_t heads) { return at::randn({2, heads, 24, 16}).to(type).to(device).requires_grad_(); };
  auto q = make(4), k = make(kv_heads), v = make(kv_heads), grad = make(4).detach();
  auto out = at::scaled_dot_product_attention(q, k, v, {}, 0.0, causal, {}, kv_heads != 4);
  out.backward(grad);
  return {out.detach().cpu(), q.grad().cpu(), k.grad().cpu(), v.grad().cpu()};
}

void attention() {
  auto close = [](const Attention& a, const Attention& b, double tolerance) {
    return at::allclose(a.out, b.out, tolerance, tolerance) && at::allclose(a.dq, b.dq, tolerance, tolerance) &&
           at::allclose(a.dk, b.dk, tolerance, tolerance) && at::allclose(a.dv, b.dv, tolerance, tolerance);
  };
  auto device = cuda().device();
  expect(close(attend(device, at::kFloat, 4, true), attend(at::kCPU, at::kFloat, 4, true), 1e-5), "float");
  expect(close(attend(device, at::kDouble, 4, true), attend(at::kCPU, at::kDouble, 4, true), 1e-9), "double");
  expect(close(attend(device, at::kBFloat16, 4, false), attend(at::kCPU, at::kBFloat16, 4, false), 5e-2), "bfloat16");
  expect(close(attend(device, at::kBFloat16, 2, true), attend(at::kCPU, at::kBFloat16, 2, true), 5e-2), "grouped");
  auto kernels = simulated::counters().kernels_by_operator;
  expect(kernels["aten::_scaled_dot_product_efficient_attention"] == 1, "float takes the efficient kernel");
  expect(kernels["aten::_scaled_dot_product_flash_attention"] == 2, "bfloat16 takes the flash kernel");
  expect(kernels["aten::_scaled_dot_product_flash_attention_backward"] == 2, "and its backward");
  auto q = at::randn({1, 4, 24, 16}).to(cuda(0, at::kHalf));
  auto flash = at::_scaled_dot_product_flash_attention(q, q, q, 0.0, true);
  expect(std::get<1>(flash).sizes() == at::IntArrayRef({1, 4, 24}) && std::get<1>(flash).scalar_type() == at::kFloat,
         "flash returns logsumexp as [batch, heads, rows]");
  auto wide = q.to(at::kFloat);
  auto efficient = at::_scaled_dot_product_efficient_attention(wide, wide, wide, {}, true, 0.0, true);
  expect(std::get<1>(efficient).sizes() == at::IntArrayRef({1, 4, 32}), "efficient pads logsumexp to 32 rows");
}

// Two packed sequences give what each gives alone.
void packed_attention() {
  auto q = at::randn({24, 4, 16}).to(cuda(0, at::kBFloat16));
  auto cumulative = at::tensor({0, 10, 24}, at::kInt).to(cuda().device());
  auto packed = at::_flash_attention_forward(q, q, q, cumulative, cumulative, 14, 14, 0.0, true, false);
  auto one = q.narrow(0, 10, 14).unsqueeze(0);
  auto alone = at::_flash_attention_forward(one, one, one, {}, {}, 14, 14, 0.0, true, false);
  expect(at::equal(std::get<0>(packed).narrow(0, 10, 14), std::get<0>(alone)[0]), "output");
  expect(at::equal(std::get<1>(packed).narrow(1, 10, 14), std::get<1>(alone)[0]), "logsumexp");
  auto grads = at::_flash_attention_backward(
      std::get<0>(packed), q, q, q, std::get<0>(packed), std::get<1>(packed), cumulative, cumulative, 14, 14, 0.0, true,
      std::get<2>(packed), std::get<3>(packed));
  auto alone_grads = at::_flash_attention_backward(
      std::get<0>(alone), one, one, one, std::get<0>(alone), std::get<1>(alone), {}, {}, 14, 14, 0.0, true,
      std::get<2>(alone), std::get<3>(alone));
  expect(at::equal(std::get<0>(grads).narrow(0, 10, 14), std::get<0>(alone_grads)[0]), "gradient of the queries");
  auto wide = one.to(at::kFloat);
  auto efficient = at::_efficient_attention_forward(wide, wide, wide, {}, {}, {}, {}, {}, 0.0, 1, true);
  auto back = at::_efficient_attention_backward(
      wide, wide, wide, wide, {}, std::get<0>(efficient), {}, {}, 14, 14, std::get<1>(efficient), 0.0,
      std::get<2>(efficient), std::get<3>(efficient), 1, false);
  expect(at::allclose(std::get<0>(efficient), std::get<0>(alone).to(at::kFloat), 2e-2, 2e-2) &&
             std::get<0>(back).sizes() == wide.sizes(),
         "the efficient kernel agrees");
}

// Operators of several kinds, forward and backward: structured, composite, with lists, indices and several results.
std::vector<Tensor> run_operators(at::Device device) {
  at::manual_seed(11);
  auto leaf = [&](std::vector<int64_t> sizes) { return at::randn(sizes).to(device).requires_grad_(); };
  auto tokens = at::randint(10, {4, 6}, at::kLong).to(device);
  auto table = leaf({10, 8}), expert = leaf({3, 8, 4});
  auto kernel = leaf({5, 3, 3, 3}), scale = leaf({5}), shift = leaf({5});
  auto mean = at::zeros({5}).to(device), variance = at::ones({5}).to(device);
  auto hidden = at::embedding(table, tokens);
  auto chosen = at::topk(at::softmax(hidden, -1), 2);
  auto mixed = at::einsum("bsd,edf->bsef", {hidden, expert}).sum(2);
  auto gathered = at::gather(hidden, 2, std::get<1>(chosen)) * std::get<0>(chosen);
  auto sorted = std::get<0>(at::sort(hidden.reshape({-1})));
  auto picked = hidden.index({tokens > 4}); // the shape depends on values
  auto added = at::zeros({10, 8}, hidden.options()).index_add(0, tokens.reshape({-1}), hidden.reshape({-1, 8}));
  auto filled = at::masked_fill(hidden, tokens.unsqueeze(-1) == 3, -1.0).cumsum(1);
  auto image = at::randn({2, 3, 8, 8}).to(device);
  auto convolved = at::batch_norm(at::conv2d(image, kernel), scale, shift, mean, variance, true, 0.1, 1e-5, false);
  auto pooled = at::max_pool2d(at::silu(convolved), {2, 2});
  auto parts = at::split(at::cat({mixed, gathered.repeat({1, 1, 2})}, -1), 3, -1);
  auto clipped = at::where(parts[1] > 0, parts[1], 0.5);
  auto loss = at::stack({at::logsumexp(parts[0], -1).sum(), sorted.narrow(0, 3, 20).sum(), picked.pow(2).mean(),
                         added.abs().sum(), filled.tanh().sum(), pooled.norm(), clipped.sum()})
                  .sum();
  loss.backward();
  std::vector<Tensor> results{loss, mean, variance};
  for (const auto& of : {table, kernel, scale, shift, expert}) {
    results.push_back(of.grad());
  }
  return results;
}

void operators_equal_cpu() {
  auto device = run_operators(cuda().device()), cpu = run_operators(at::kCPU);
  bool close = true;
  for (size_t i = 0; i < cpu.size(); ++i) {
    close &= at::allclose(device[i].detach().cpu(), cpu[i].detach(), 1e-5, 1e-5);
  }
  expect(close, "values and gradients agree");
}

void generator() {
  at::manual_seed(1);
  auto first = at::dropout(at::ones({64}, cuda()), 0.5, true).cpu();
  auto drawn = at::rand({1}).item<float>();
  at::manual_seed(1);
  expect(at::rand({1}).item<float>() == drawn, "the device has a generator of its own");
  expect(at::equal(at::dropout(at::ones({64}, cuda()), 0.5, true).cpu(), first), "manual_seed seeds it");
}

// --- asynchrony and memory --------------------------------------------------------------------------
void host_runs_ahead() {
  auto a = at::randn({512, 512}).to(cuda().device());
  auto start = now_ms();
  auto b = a;
  for (int i = 0; i < 20; ++i) {
    b = at::mm(b, a) * 0.03;
  }
  auto queued = now_ms() - start;
  auto value = b.abs().sum().item<float>();
  auto done = now_ms() - start;
  expect(queued < done / 2, c10::str("20 products queued in ", queued, " ms, done after ", done, " ms"));
  expect(value > 0, "the result is a number");
}

void memory_is_counted() {
  simulated::reset_counters();
  auto a = at::empty({1000}, cuda(1));
  { auto b = at::empty({2000}, cuda(1)); }
  auto memory = simulated::counters().memory.at(1);
  expect(memory.allocated == 4096 && memory.peak == 4096 + 8192, "allocated and peak");
  auto* allocator = c10::getDeviceAllocator(at::kCUDA);
  expect(allocator->getDeviceStats(1).allocated_bytes[0].peak == 4096 + 8192, "libtorch's statistics");
  expect(a.device().index() == 1, "on device 1");
  expect(at::empty({100}, cuda()).isnan().all().item<bool>(), "new memory is NaN");
}

void out_of_memory() {
  auto a = at::empty({1 << 18}, cuda());
  expect_error([] { at::empty({1 << 20}, cuda()); });
  auto b = at::empty({1 << 18}, cuda(1));
  expect(b.defined(), "another device has room");
}

// --- order between streams --------------------------------------------------------------------------
void ordered_by_event() {
  auto x = at::ones({1024}, cuda());
  auto side = new_stream();
  order(current_stream(), side);
  c10::StreamGuard guard(side);
  expect((x + 1).sum().item<float>() == 2048, "an event orders the streams");
}

void missing_event() {
  auto x = at::ones({1024}, cuda());
  c10::StreamGuard guard(new_stream());
  expect_error([&] { x.mul(2); });
}

void disjoint_ranges() {
  auto x = at::zeros({1024}, cuda());
  auto side = new_stream();
  order(current_stream(), side);
  x.narrow(0, 0, 512).add_(1);
  {
    c10::StreamGuard guard(side);
    x.narrow(0, 512, 512).add_(2);
  }
  order(side, current_stream());
  expect(x.sum().item<float>() == 1536 && simulated::hazards().empty(), "disjoint parts of one storage do not race");
}

// Another stream reads a tensor, which is then freed.
void free_after_side_read(bool record_stream, bool order_back) {
  auto side = new_stream();
  {
    auto x = at::ones({4096}, cuda());
    order(current_stream(), side);
    {
      c10::StreamGuard guard(side);
      x.sum();
    }
    if (record_stream) {
      x.record_stream(side);
    }
    if (order_back) {
      order(side, current_stream());
    }
  }
  expect_error([] { at::zeros({4096}, cuda()); });
}

// Another stream writes into a tensor that is then freed.
void free_under_writer() {
  auto x = at::empty({4096}, cuda());
  auto side = new_stream();
  order(current_stream(), side);
  {
    c10::StreamGuard guard(side);
    x.fill_(1);
  }
  x.reset();
  expect_error([] { at::zeros({4096}, cuda()); });
}

void recorded_memory_is_kept() {
  auto side = new_stream();
  const void* address = nullptr;
  {
    auto x = at::ones({8192}, cuda());
    address = x.const_data_ptr();
    order(current_stream(), side);
    c10::StreamGuard guard(side);
    x.sum();
    x.record_stream(side);
  }
  auto a = at::empty({8192}, cuda());
  expect(a.const_data_ptr() != address, "not reused before the other stream is over");
  guard_impl().synchronizeStream(side);
  expect(at::empty({8192}, cuda()).const_data_ptr() == address, "reused after");
}

void use_after_release() {
  auto x = at::ones({16}, cuda());
  x.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(at::DataPtr(nullptr, x.device()));
  expect_error([&] { x.add(1); });
}

// A thread that nobody told its device allocates on device 0.
void wrong_device_in_thread() {
  c10::DeviceGuard guard(cuda(1).device());
  auto x = at::ones({16}, cuda(1));
  std::thread([&] {
    auto* storage = x.storage().unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(c10::GetAllocator(at::kCUDA)->allocate(storage->nbytes()));
    expect_error([&] { x.fill_(1); });
  }).join();
}

void two_devices_in_one_kernel() {
  expect_error([] { at::ones({4}, cuda(0)).add(at::ones({4}, cuda(1))); });
}

void cpu_tensor_in_kernel() {
  auto product = at::ones({4}, cuda()) * at::scalar_tensor(2.0f);
  expect(product.sum().item<float>() == 8, "a 0-dimensional CPU tensor is a value");
  expect_error([] { at::ones({4}, cuda()).add(at::ones({4})); });
  std::vector<Tensor> list{at::ones({4}, cuda())};
  expect_error([&] { at::_foreach_mul_(list, at::scalar_tensor(2.0f)); });
}

void operator_without_cuda_kernel() {
  auto q = at::ones({1, 1, 8, 8}, cuda());
  expect_error([&] { at::_scaled_dot_product_flash_attention_for_cpu(q, q, q); });
}

// --- the host ---------------------------------------------------------------------------------------
void host_read() {
  auto x = at::ones({4}, cuda());
  say(*static_cast<const float*>(x.const_data_ptr()));
}

void pinned_too_early() {
  auto host = at::empty({1024}, at::TensorOptions().pinned_memory(true));
  host.copy_(at::ones({1024}, cuda()), /*non_blocking=*/true);
  say(host.sum().item<float>());
}

void pinned_overwritten() {
  auto host = at::ones({1024}, at::TensorOptions().pinned_memory(true));
  auto x = at::empty({1024}, cuda());
  x.copy_(host, /*non_blocking=*/true);
  say(host.sum().item<float>()); // reading is allowed
  host.fill_(2);
}

void pinned_after_event() {
  auto host = at::empty({1024}, at::TensorOptions().pinned_memory(true));
  host.copy_(at::ones({1024}, cuda()), /*non_blocking=*/true);
  c10::Event event(c10::DeviceType::CUDA);
  event.record(current_stream());
  event.synchronize();
  expect(host.sum().item<float>() == 1024, "read after the event");
  expect(at::ones({4}).pin_memory().is_pinned() && !at::ones({4}).is_pinned(), "pin_memory");
}

void forbidden_synchronization() {
  auto x = at::ones({4}, cuda());
  simulated::forbid_host_synchronization(true);
  expect_error([&] { x.sum().item<float>(); });
  expect_error([&] { x.cpu(); });
  expect_error([&] { x.nonzero(); });
  expect_error([&] { x.index({x > 0}); });
  expect_error([&] { guard_impl().synchronizeStream(current_stream()); });
  x.index({at::zeros({2}, cuda(0, at::kLong))});
  simulated::forbid_host_synchronization(false);
  expect(x.sum().item<float>() == 4, "allowed again");
}

void synchronizations_are_counted() {
  auto x = at::ones({4}, cuda());
  simulated::reset_counters();
  x.sum().item<float>();
  x.cpu();
  x.nonzero();
  guard_impl().synchronizeStream(current_stream());
  guard_impl().synchronizeDevice(0);
  for (const auto& [cause, count] : simulated::counters().host_synchronizations) {
    say(cause, ": ", count);
  }
}

} // namespace

int main(int argc, char** argv) {
  simulated::install();
  return run_case(
      {{"training_equals_cpu", training_equals_cpu},
       {"attention", attention},
       {"packed_attention", packed_attention},
       {"operators_equal_cpu", operators_equal_cpu},
       {"generator", generator},
       {"host_runs_ahead", host_runs_ahead},
       {"memory_is_counted", memory_is_counted},
       {"out_of_memory", out_of_memory},
       {"ordered_by_event", ordered_by_event},
       {"missing_event", missing_event},
       {"disjoint_ranges", disjoint_ranges},
       {"missing_record_stream", [] { free_after_side_read(false, false); }},
       {"with_record_stream", [] { free_after_side_read(true, false); }},
       {"ordered_before_free", [] { free_after_side_read(false, true); }},
       {"free_under_writer", free_under_writer},
       {"recorded_memory_is_kept", recorded_memory_is_kept},
       {"use_after_release", use_after_release},
       {"wrong_device_in_thread", wrong_device_in_thread},
       {"two_devices_in_one_kernel", two_devices_in_one_kernel},
       {"cpu_tensor_in_kernel", cpu_tensor_in_kernel},
       {"operator_without_cuda_kernel", operator_without_cuda_kernel},
       {"host_read", host_read},
       {"pinned_too_early", pinned_too_early},
       {"pinned_overwritten", pinned_overwritten},
       {"pinned_after_event", pinned_after_event},
       {"forbidden_synchronization", forbidden_synchronization},
       {"synchronizations_are_counted", synchronizations_are_counted}},
      argc, argv);
}
