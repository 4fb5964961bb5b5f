// Attention as CUDA has it: the choice between flash, memory-efficient and math kernels, and the first two computed by
// the CPU's flash kernel. Without dropout.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/DeviceGuard.h>

#include "kernels.h"
#include "memory.h"
#include "tensors.h"

namespace trainyard::simulated {
namespace {

using at::Tensor;
using std::optional;
using Tensor3 = std::tuple<Tensor, Tensor, Tensor>;
using Tensor4 = std::tuple<Tensor, Tensor, Tensor, Tensor>;

constexpr int64_t kRowsOfLogsumexp = 32; // the memory-efficient kernel pads its log-sum-exp to a multiple of these

bool is_half(const Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

void check_flash_type(const Tensor& q) {
  TORCH_CHECK(is_half(q), "FlashAttention only support fp16 and bf16 data type");
}

void check_no_dropout(double dropout) {
  TORCH_CHECK_NOT_IMPLEMENTED(dropout == 0.0, "simulated accelerator: attention with dropout is not implemented");
}

// --- the choice -----------------------------------------------------------------------------------
bool flash_serves(const Tensor& q, const Tensor& k, const Tensor& v, bool masked, bool causal) {
  // With unequal lengths flash would align the causal mask to the last key, math aligns it to the first.
  bool aligned = !causal || q.size(2) == k.size(2);
  bool one_width = q.size(3) == k.size(3) && k.size(3) == v.size(3) && q.size(3) <= 256;
  return at::globalContext().userEnabledFlashSDP() && is_half(q) && !masked && aligned && one_width;
}

bool efficient_serves(const Tensor& q, const Tensor& k, const Tensor& v) {
  bool one_head_count = q.size(1) == k.size(1) && k.size(1) == v.size(1); // no grouped-query attention
  int64_t multiple = is_half(q) ? 8 : 4;
  bool aligned = q.size(3) % multiple == 0 && v.size(3) % multiple == 0;
  return at::globalContext().userEnabledMemEfficientSDP() && (is_half(q) || q.scalar_type() == at::kFloat) &&
         one_head_count && aligned;
}

int64_t choose(const Tensor& q, const Tensor& k, const Tensor& v, const optional<Tensor>& mask, double, bool causal,
               optional<double>, bool) {
  bool masked = mask && mask->defined();
  if (q.dim() == 4 && flash_serves(q, k, v, masked, causal)) {
    return static_cast<int64_t>(sdp::SDPBackend::flash_attention);
  }
  if (q.dim() == 4 && efficient_serves(q, k, v)) {
    return static_cast<int64_t>(sdp::SDPBackend::efficient_attention);
  }
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

// --- on CPU tensors of [batch, heads, sequence, width] ---------------------------------------------
Tensor repeat_heads(const Tensor& x, const Tensor& q) {
  auto groups = q.size(1) / x.size(1);
  if (groups == 1) {
    return x;
  }
  return x.unsqueeze(2).expand({x.size(0), x.size(1), groups, x.size(2), x.size(3)}).flatten(1, 2);
}

Tensor sum_heads(const Tensor& grad, const Tensor& x) {
  auto groups = grad.size(1) / x.size(1);
  return groups == 1 ? grad : grad.unflatten(1, {x.size(1), groups}).sum(2);
}

// The memory order of CUDA's results: [batch, sequence, heads, width].
Tensor in_cuda_order(const Tensor& x) {
  return x.transpose(1, 2).contiguous().transpose(1, 2);
}

struct Mask {
  bool causal = false; // from the first key
  optional<Tensor> bias;
};

// A causal mask that is aligned to the last key.
Mask causal_to_last(const Tensor& q, const Tensor& k) {
  auto rows = q.size(2), columns = k.size(2);
  if (rows == columns) {
    return {true, std::nullopt};
  }
  auto bias = at::full({rows, columns}, -std::numeric_limits<float>::infinity(), at::kFloat).triu_(columns - rows + 1);
  return {false, bias.to(q.scalar_type()).view({1, 1, rows, columns})};
}

std::tuple<Tensor, Tensor> forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const Mask& mask, optional<double> scale) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto [out, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
      q, repeat_heads(k, q), repeat_heads(v, q), 0.0, mask.causal, mask.bias, scale);
  return {in_cuda_order(out), logsumexp.contiguous()};
}

Tensor3 backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                 const Tensor& logsumexp, const Mask& mask, optional<double> scale) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad, q, repeat_heads(k, q), repeat_heads(v, q), out, logsumexp, 0.0, mask.causal, mask.bias, scale);
  return {in_cuda_order(dq), in_cuda_order(sum_heads(dk, k)), in_cuda_order(sum_heads(dv, v))};
}

// Runs a body that fills CPU tensors, then moves these to the device.
template <size_t N>
std::array<Tensor, N> run(const char* op, at::TensorList operands,
                          const std::function<std::array<Tensor, N>(const std::vector<Tensor>&)>& body) {
  auto device = operands[0].device();
  c10::DeviceGuard guard(device);
  auto& stream = current_stream(device.index());
  std::vector<Access> accesses;
  std::vector<Tensor> views;
  for (const auto& operand : operands) {
    TORCH_CHECK(!operand.defined() || operand.device() == device, "Expected all tensors to be on the same device, but "
                "found at least two devices, ", device, " and ", operand.device(), "! (in ", op, ")");
    accesses.push_back(reads(operand));
    views.push_back(cpu_view(operand));
  }
  std::array<Tensor, N> results;
  launch(stream, op, accesses, [&] { results = body(views); }, Run::Inline);
  for (auto& result : results) {
    result = to_device(result, device, stream, op);
  }
  return results;
}

// --- scaled_dot_product_attention's kernels --------------------------------------------------------
using SdpFlash = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

SdpFlash sdp_flash(const Tensor& q, const Tensor& k, const Tensor& v, double dropout, bool causal, bool,
                   optional<double> scale) {
  check_flash_type(q);
  check_no_dropout(dropout);
  auto [out, logsumexp] = run<2>("aten::_scaled_dot_product_flash_attention", {q, k, v}, [&](const auto& x) {
    auto [o, l] = forward(x[0], x[1], x[2], causal ? causal_to_last(x[0], x[1]) : Mask{}, scale);
    return std::array<Tensor, 2>{o, l};
  });
  auto random_state = at::empty({2}, q.options().dtype(at::kUInt64));
  auto unused = at::empty({}, q.options().dtype(at::kUInt64));
  return {out, logsumexp, Tensor(), Tensor(), q.size(2), k.size(2), random_state, unused, at::empty({0}, q.options())};
}

Tensor3 sdp_flash_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& logsumexp,
    const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double, bool causal, const Tensor&, const Tensor&,
    optional<double> scale) {
  auto [dq, dk, dv] = run<3>("aten::_scaled_dot_product_flash_attention_backward", {q, k, v, grad, out, logsumexp},
                             [&](const auto& x) {
    auto mask = causal ? causal_to_last(x[0], x[1]) : Mask{};
    auto [a, b, c] = backward(x[3], x[0], x[1], x[2], x[4], x[5], mask, scale);
    return std::array<Tensor, 3>{a, b, c};
  });
  return {dq, dk, dv};
}

Tensor pad_logsumexp(const Tensor& logsumexp, bool wanted) {
  auto rows = logsumexp.size(2);
  if (!wanted) {
    return logsumexp.narrow(2, 0, 0).contiguous();
  }
  auto padding = (kRowsOfLogsumexp - rows % kRowsOfLogsumexp) % kRowsOfLogsumexp;
  return at::constant_pad_nd(logsumexp, {0, padding}, std::numeric_limits<float>::infinity()).contiguous();
}

optional<Tensor> bias_of(const Tensor& bias) {
  return bias.defined() ? optional<Tensor>(bias) : std::nullopt;
}

Tensor4 sdp_efficient(const Tensor& q, const Tensor& k, const Tensor& v, const optional<Tensor>& bias,
                      bool with_logsumexp, double dropout, bool causal, optional<double> scale) {
  check_no_dropout(dropout);
  auto [out, logsumexp] = run<2>("aten::_scaled_dot_product_efficient_attention",
                                 {q, k, v, bias.value_or(Tensor())}, [&](const auto& x) {
    auto [o, l] = forward(x[0], x[1], x[2], {causal, bias_of(x[3])}, scale);
    return std::array<Tensor, 2>{o, pad_logsumexp(l, with_logsumexp)};
  });
  auto random_state = at::empty({}, q.options().dtype(at::kLong));
  return {out, logsumexp, random_state, random_state};
}

Tensor4 sdp_efficient_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias, const Tensor& out,
    const Tensor& logsumexp, const Tensor&, const Tensor&, double, std::array<bool, 4> wanted, bool causal,
    optional<double> scale) {
  TORCH_CHECK_NOT_IMPLEMENTED(!wanted[3] || !bias.defined(),
                              "simulated accelerator: the gradient of an attention bias is not implemented");
  if (!grad.defined()) {
    return {};
  }
  auto [dq, dk, dv] = run<3>("aten::_scaled_dot_product_efficient_attention_backward",
                             {q, k, v, grad, out, logsumexp, bias}, [&](const auto& x) {
    auto rows = x[5].narrow(2, 0, x[0].size(2));
    auto [a, b, c] = backward(x[3], x[0], x[1], x[2], x[4], rows, {causal, bias_of(x[6])}, scale);
    return std::array<Tensor, 3>{a, b, c};
  });
  return {dq, dk, dv, Tensor()};
}

// --- the kernels beneath, on [batch, sequence, heads, width] or packed sequences [total, heads, width] ---
struct Packed { // where each sequence begins; empty for one batch of equal lengths
  std::vector<int64_t> q, k;
  bool empty() const { return q.empty(); }
  size_t count() const { return q.size() - 1; }
};

std::vector<int64_t> offsets(const Tensor& cumulative) {
  if (!cumulative.defined()) {
    return {};
  }
  auto wide = cumulative.to(at::kLong).contiguous();
  return {wide.const_data_ptr<int64_t>(), wide.const_data_ptr<int64_t>() + wide.numel()};
}

Tensor sequence(const Tensor& packed, const std::vector<int64_t>& begins, size_t i) {
  return packed.narrow(0, begins[i], begins[i + 1] - begins[i]).transpose(0, 1).unsqueeze(0);
}

Tensor as_packed(const Tensor& one) { // [1, heads, sequence, width] to [sequence, heads, width]
  return one.squeeze(0).transpose(0, 1);
}

using ChooseMask = std::function<Mask(const Tensor& q, const Tensor& k)>;

// The output, and the log-sum-exp as [batch, heads, rows] or, if packed, [heads, total].
std::array<Tensor, 2> flash_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Packed& packed,
                                    const ChooseMask& mask, optional<double> scale) {
  if (packed.empty()) {
    auto qt = q.transpose(1, 2), kt = k.transpose(1, 2), vt = v.transpose(1, 2);
    auto [out, logsumexp] = forward(qt, kt, vt, mask(qt, kt), scale);
    return {out.transpose(1, 2).contiguous(), logsumexp};
  }
  std::vector<Tensor> outs, rows;
  for (size_t i = 0; i < packed.count(); ++i) {
    auto qi = sequence(q, packed.q, i), ki = sequence(k, packed.k, i), vi = sequence(v, packed.k, i);
    auto [out, logsumexp] = forward(qi, ki, vi, mask(qi, ki), scale);
    outs.push_back(as_packed(out));
    rows.push_back(logsumexp.squeeze(0));
  }
  return {at::cat(outs).contiguous(), at::cat(rows, 1).contiguous()};
}

std::array<Tensor, 3> flash_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& logsumexp,
    const Packed& packed, const ChooseMask& mask, optional<double> scale) {
  auto t = [](const Tensor& x) { return x.transpose(1, 2); };
  if (packed.empty()) {
    auto [dq, dk, dv] = backward(t(grad), t(q), t(k), t(v), t(out), logsumexp, mask(t(q), t(k)), scale);
    return {t(dq).contiguous(), t(dk).contiguous(), t(dv).contiguous()};
  }
  std::vector<Tensor> dqs, dks, dvs;
  for (size_t i = 0; i < packed.count(); ++i) {
    auto qi = sequence(q, packed.q, i), ki = sequence(k, packed.k, i), vi = sequence(v, packed.k, i);
    auto rows = logsumexp.narrow(1, packed.q[i], packed.q[i + 1] - packed.q[i]).unsqueeze(0);
    auto [dq, dk, dv] = backward(sequence(grad, packed.q, i), qi, ki, vi, sequence(out, packed.q, i), rows,
                                 mask(qi, ki), scale);
    dqs.push_back(as_packed(dq));
    dks.push_back(as_packed(dk));
    dvs.push_back(as_packed(dv));
  }
  return {at::cat(dqs).contiguous(), at::cat(dks).contiguous(), at::cat(dvs).contiguous()};
}

ChooseMask flash_mask(bool causal) {
  return [causal](const Tensor& q, const Tensor& k) { return causal ? causal_to_last(q, k) : Mask{}; };
}

void check_plain_flash(optional<c10::SymInt> left, optional<c10::SymInt> right) {
  bool unlimited = (!left || *left == -1) && (!right || *right == -1);
  TORCH_CHECK_NOT_IMPLEMENTED(unlimited, "simulated accelerator: attention windows are not implemented");
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> flash_attention_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const optional<Tensor>& cum_q, const optional<Tensor>& cum_k,
    c10::SymInt, c10::SymInt, double dropout, bool causal, bool, optional<double> scale, optional<c10::SymInt> left,
    optional<c10::SymInt> right, const optional<Tensor>& used, const optional<Tensor>& alibi,
    const optional<Tensor>& block_table, optional<int64_t>) {
  check_flash_type(q);
  check_no_dropout(dropout);
  check_plain_flash(left, right);
  TORCH_CHECK_NOT_IMPLEMENTED(!used && !alibi && !block_table, "simulated accelerator: flash attention with seqused_k, "
                              "alibi_slopes or block_table is not implemented");
  auto [out, logsumexp] = run<2>("aten::_flash_attention_forward",
                                 {q, k, v, cum_q.value_or(Tensor()), cum_k.value_or(Tensor())}, [&](const auto& x) {
    return flash_forward(x[0], x[1], x[2], {offsets(x[3]), offsets(x[4])}, flash_mask(causal), scale);
  });
  auto random_state = at::empty({2}, q.options().dtype(at::kUInt64));
  auto unused = at::empty({}, q.options().dtype(at::kUInt64));
  return {out, logsumexp, random_state, unused, at::empty({0}, q.options())};
}

Tensor3 flash_attention_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& logsumexp,
    const Tensor& cum_q, const Tensor& cum_k, c10::SymInt, c10::SymInt, double, bool causal, const Tensor&,
    const Tensor&, optional<double> scale, optional<c10::SymInt> left, optional<c10::SymInt> right) {
  check_plain_flash(left, right);
  auto [dq, dk, dv] = run<3>("aten::_flash_attention_backward", {q, k, v, grad, out, logsumexp, cum_q, cum_k},
                             [&](const auto& x) {
    Packed packed{offsets(x[6]), offsets(x[7])};
    return flash_backward(x[3], x[0], x[1], x[2], x[4], x[5], packed, flash_mask(causal), scale);
  });
  return {dq, dk, dv};
}

// 0: no mask, 1: causal from the first key, 2: causal to the last key.
ChooseMask efficient_mask(int64_t kind, const Tensor& bias) {
  return [kind, bias](const Tensor& q, const Tensor& k) {
    return kind == 2 ? causal_to_last(q, k) : Mask{kind == 1, bias_of(bias)};
  };
}

void check_plain_efficient(const optional<Tensor>& cumulative, const optional<Tensor>& used,
                           optional<int64_t> window) {
  TORCH_CHECK_NOT_IMPLEMENTED(!(cumulative && cumulative->defined()) && !(used && used->defined()) && !window,
                              "simulated accelerator: efficient attention with packed sequences or windows is not "
                              "implemented");
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt> efficient_attention_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const optional<Tensor>& bias, const optional<Tensor>& cum_q,
    const optional<Tensor>&, optional<c10::SymInt>, optional<c10::SymInt>, double dropout, int64_t mask_kind,
    bool with_logsumexp, optional<double> scale, const optional<Tensor>& used, optional<int64_t> window) {
  check_no_dropout(dropout);
  check_plain_efficient(cum_q, used, window);
  auto [out, logsumexp] = run<2>("aten::_efficient_attention_forward", {q, k, v, bias.value_or(Tensor())},
                                 [&](const auto& x) {
    auto results = flash_forward(x[0], x[1], x[2], {}, efficient_mask(mask_kind, x[3]), scale);
    return std::array<Tensor, 2>{results[0], pad_logsumexp(results[1], with_logsumexp)};
  });
  auto random_state = at::empty({}, q.options().dtype(at::kLong));
  return {out, logsumexp, random_state, random_state, q.size(1), k.size(1)};
}

Tensor4 efficient_attention_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const optional<Tensor>& bias,
    const Tensor& out, const optional<Tensor>& cum_q, const optional<Tensor>&, c10::SymInt, c10::SymInt,
    const Tensor& logsumexp, double, const Tensor&, const Tensor&, int64_t mask_kind, bool bias_requires_grad,
    optional<double> scale, optional<int64_t>, optional<int64_t> window, bool) {
  check_plain_efficient(cum_q, std::nullopt, window);
  TORCH_CHECK_NOT_IMPLEMENTED(!bias_requires_grad,
                              "simulated accelerator: the gradient of an attention bias is not implemented");
  auto [dq, dk, dv] = run<3>("aten::_efficient_attention_backward",
                             {q, k, v, grad, out, logsumexp, bias.value_or(Tensor())}, [&](const auto& x) {
    auto rows = x[5].narrow(2, 0, x[0].size(1));
    return flash_backward(x[3], x[0], x[1], x[2], x[4], rows, {}, efficient_mask(mask_kind, x[6]), scale);
  });
  return {dq, dk, dv, Tensor()};
}

} // namespace

void register_attention_kernels(torch::Library& aten) {
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose);
  aten.impl("_fused_sdp_choice", &choose);
  aten.impl("_scaled_dot_product_flash_attention", &sdp_flash);
  aten.impl("_scaled_dot_product_flash_attention_backward", &sdp_flash_backward);
  aten.impl("_scaled_dot_product_efficient_attention", &sdp_efficient);
  aten.impl("_scaled_dot_product_efficient_attention_backward", &sdp_efficient_backward);
  aten.impl("_flash_attention_forward", &flash_attention_forward);
  aten.impl("_flash_attention_backward", &flash_attention_backward);
  aten.impl("_efficient_attention_forward", &efficient_attention_forward);
  aten.impl("_efficient_attention_backward", &efficient_attention_backward);
}

} // namespace trainyard::simulated
