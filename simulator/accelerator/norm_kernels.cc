// RMS norm. On CUDA it is one kernel with a backward of its own; the CPU decomposes it and differentiates the parts.
// Both kernels here compute what the CPU's decomposition computes, in the same order, so that values agree bit for bit.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <c10/core/DeviceGuard.h>

#include "kernels.h"
#include "tensors.h"

namespace trainyard::simulated {
namespace {

using at::Tensor;
using std::optional;

std::tuple<Tensor, Tensor> fused_rms_norm(
    const Tensor& input, at::IntArrayRef normalized, const optional<Tensor>& weight, optional<double> eps) {
  constexpr const char* kOp = "aten::_fused_rms_norm";
  c10::DeviceGuard guard(input.device());
  auto& stream = current_stream(input.device().index());
  Tensor out, rstd;
  auto x = cpu_view(input), w = cpu_view(weight.value_or(Tensor()));
  launch(stream, kOp, {reads(input), reads(weight.value_or(Tensor()))}, [&] {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    std::tie(out, rstd) = at::_fused_rms_norm(x, normalized, w.defined() ? optional<Tensor>(w) : std::nullopt, eps);
  }, Run::Inline);
  return {to_device(out, input.device(), stream, kOp), to_device(rstd, input.device(), stream, kOp)};
}

// What autograd does with x * rsqrt(mean(x^2) + eps) * w, step by step.
std::tuple<Tensor, Tensor> rms_norm_backward(
    const Tensor& grad, const Tensor& input, at::IntArrayRef normalized, const Tensor& rstd, const Tensor& weight,
    std::array<bool, 2> mask) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto wide = at::toOpMathType(input.scalar_type());
  auto x = input.to(wide), g = grad.to(wide);
  std::vector<int64_t> dims;
  int64_t count = 1;
  for (size_t i = 0; i < normalized.size(); ++i) {
    dims.push_back(input.dim() - 1 - static_cast<int64_t>(i));
    count *= normalized[i];
  }
  Tensor grad_weight, grad_input;
  if (mask[1] && weight.defined()) {
    grad_weight = (g * (x * rstd)).sum_to_size(weight.sizes()).to(weight.scalar_type());
  }
  if (mask[0]) {
    auto g_scaled = weight.defined() ? g * weight : g;
    auto g_rstd = (g_scaled * x).sum(dims, /*keepdim=*/true);
    auto g_mean = -0.5 * g_rstd * rstd.pow(3);
    auto g_square = g_mean.expand(x.sizes()) / count;
    grad_input = (g_scaled * rstd + g_square * (x * 2)).to(input.scalar_type());
  }
  return {grad_input, grad_weight};
}

std::tuple<Tensor, Tensor> fused_rms_norm_backward(
    const Tensor& grad, const Tensor& input, at::IntArrayRef normalized, const Tensor& rstd,
    const optional<Tensor>& weight, std::array<bool, 2> mask) {
  constexpr const char* kOp = "aten::_fused_rms_norm_backward";
  c10::DeviceGuard guard(input.device());
  auto& stream = current_stream(input.device().index());
  auto w = weight.value_or(Tensor());
  Tensor grad_input, grad_weight;
  launch(stream, kOp, {reads(grad), reads(input), reads(rstd), reads(w)}, [&] {
    std::tie(grad_input, grad_weight) =
        rms_norm_backward(cpu_view(grad), cpu_view(input), normalized, cpu_view(rstd), cpu_view(w), mask);
  }, Run::Inline);
  return {to_device(grad_input, input.device(), stream, kOp), to_device(grad_weight, input.device(), stream, kOp)};
}

} // namespace

void register_norm_kernels(torch::Library& aten) {
  aten.impl("_fused_rms_norm", &fused_rms_norm);
  aten.impl("_fused_rms_norm_backward", &fused_rms_norm_backward);
}

} // namespace trainyard::simulated
