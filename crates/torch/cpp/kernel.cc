// libtorch operators that tch does not bind.
#include <ATen/ATen.h>

#include "bridge.h"

namespace trainyard {
namespace {

// An optional tensor, passed as a list of zero or one.
std::optional<at::Tensor> optional_at(Addresses addresses) {
  auto tensors = tensors_at(addresses);
  return tensors.empty() ? std::nullopt : std::make_optional(tensors[0]);
}

// Fused kernels do not bump the version counter of the parameters they update; callers rely on it.
void bump_versions(const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    tensor.unsafeGetTensorImpl()->bump_version();
  }
}

} // namespace

void fused_adamw(
    Addresses params, Addresses grads, Addresses exp_avgs, Addresses exp_avg_sqs, Addresses steps,
    Addresses grad_scale, Addresses found_inf, double lr, double beta1, double beta2, double eps, double weight_decay) {
  auto p = tensors_at(params), g = tensors_at(grads), m = tensors_at(exp_avgs), v = tensors_at(exp_avg_sqs);
  auto s = tensors_at(steps);
  auto skip = optional_at(found_inf);
  at::_foreach_add_(s, 1);
  at::_fused_adamw_(p, g, m, v, {}, s, lr, beta1, beta2, weight_decay, eps, /*amsgrad=*/false, /*maximize=*/false,
                    optional_at(grad_scale), skip);
  if (skip.has_value()) {
    at::_foreach_add_(s, *skip, -1); // a skipped step does not count
  }
  bump_versions(p);
}

void fused_sgd(
    Addresses params, Addresses grads, Addresses momenta, Addresses grad_scale, Addresses found_inf,
    double lr, double momentum, double dampening, double weight_decay, bool nesterov, bool first) {
  auto p = tensors_at(params);
  at::_fused_sgd_(p, tensors_at(grads), tensors_at(momenta), weight_decay, momentum, lr, dampening,
                  nesterov, /*maximize=*/false, first, optional_at(grad_scale), optional_at(found_inf));
  bump_versions(p);
}

std::unique_ptr<TensorList> foreach_norm(Addresses tensors) {
  auto out = std::make_unique<TensorList>();
  out->tensors = at::_foreach_norm(tensors_at(tensors), 2);
  return out;
}

void foreach_mul_scalar(Addresses tensors, double factor) {
  at::_foreach_mul_(tensors_at(tensors), factor);
}

void foreach_mul_tensor(Addresses tensors, const AtTensor& factor) {
  at::_foreach_mul_(tensors_at(tensors), factor);
}

void foreach_mul_list(Addresses tensors, Addresses factors) {
  at::_foreach_mul_(tensors_at(tensors), tensors_at(factors));
}

void foreach_add(Addresses tensors, Addresses others, double alpha) {
  at::_foreach_add_(tensors_at(tensors), tensors_at(others), alpha);
}

void foreach_lerp(Addresses tensors, Addresses ends, double weight) {
  at::_foreach_lerp_(tensors_at(tensors), tensors_at(ends), weight);
}

void foreach_addcmul(Addresses tensors, Addresses a, Addresses b, double value) {
  at::_foreach_addcmul_(tensors_at(tensors), tensors_at(a), tensors_at(b), value);
}

void foreach_addcdiv(Addresses tensors, Addresses a, Addresses b, double value) {
  at::_foreach_addcdiv_(tensors_at(tensors), tensors_at(a), tensors_at(b), value);
}

void addcmul(const AtTensor& tensor, const AtTensor& a, const AtTensor& b, double value) {
  tensor.addcmul_(a, b, value);
}

void foreach_copy(Addresses tensors, Addresses sources) {
  at::_foreach_copy_(tensors_at(tensors), tensors_at(sources));
}

std::unique_ptr<TensorList> foreach_sqrt(Addresses tensors) {
  auto out = std::make_unique<TensorList>();
  out->tensors = at::_foreach_sqrt(tensors_at(tensors));
  return out;
}

void foreach_zero(Addresses tensors) {
  at::_foreach_zero_(tensors_at(tensors));
}

std::unique_ptr<AtTensor> rms_norm(const AtTensor& x, const AtTensor& weight, double eps) {
  return std::make_unique<at::Tensor>(at::rms_norm(x, weight.sizes(), weight, eps));
}

void use_deterministic_algorithms(bool on) {
  at::globalContext().setDeterministicAlgorithms(on, /*warn_only=*/false);
}

} // namespace trainyard
