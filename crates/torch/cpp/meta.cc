// Meta kernels for operators whose meta kernels exist only in Python. Each allocates what the real kernel allocates
// and computes nothing, so that a dry run measures the same memory.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "bridge.h"

namespace trainyard {
namespace {

using at::Tensor;
using std::optional;
using Tensor2 = std::tuple<Tensor, Tensor>;
using Tensor3 = std::tuple<Tensor, Tensor, Tensor>;

// Flash attention allocates the output, laid out like the queries, and one logsumexp per row; never s*s scores.
Tensor2 flash_attention(
    const Tensor& q, const Tensor&, const Tensor&, double, bool, const optional<Tensor>&, optional<double>) {
  auto wide = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  auto logsumexp = at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(wide)).transpose(1, 2);
  return {at::empty_like(q), logsumexp};
}

// Gradients are always contiguous as [batch, sequence, heads, dim].
Tensor like_attention(const Tensor& x) {
  return at::empty({x.size(0), x.size(2), x.size(1), x.size(3)}, x.options()).transpose(1, 2);
}

Tensor3 flash_attention_backward(
    const Tensor&, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor&, const Tensor&, double, bool,
    const optional<Tensor>&, optional<double>) {
  return {like_attention(q), like_attention(k), like_attention(v)};
}

Tensor embedding_dense_backward(const Tensor& grad, const Tensor&, c10::SymInt num_weights, c10::SymInt, bool) {
  return at::empty({num_weights.expect_int(), grad.size(-1)}, grad.options());
}

at::TensorOptions wider_options(const Tensor& input, const optional<Tensor>& weight, const optional<Tensor>& bias) {
  auto options = input.options();
  for (const auto& parameter : {weight, bias}) {
    if (parameter && parameter->defined()) {
      options = options.dtype(at::promote_types(input.scalar_type(), parameter->scalar_type()));
    }
  }
  return options;
}

// Mean and rstd have the type of the weights where that is wider than the input's.
Tensor3 native_layer_norm(
    const Tensor& input, c10::SymIntArrayRef normalized, const optional<Tensor>& weight, const optional<Tensor>& bias,
    double) {
  auto options = wider_options(input, weight, bias);
  auto rows = input.sizes().vec();
  std::fill(rows.end() - static_cast<int64_t>(normalized.size()), rows.end(), 1);
  return {at::empty(input.sizes(), input.options()), at::empty(rows, options), at::empty(rows, options)};
}

Tensor3 native_layer_norm_backward(
    const Tensor&, const Tensor& input, c10::SymIntArrayRef, const Tensor&, const Tensor&,
    const optional<Tensor>& weight, const optional<Tensor>& bias, std::array<bool, 3> mask) {
  return {
      mask[0] ? at::empty_like(input) : Tensor(),
      mask[1] && weight ? at::empty_like(*weight) : Tensor(),
      mask[2] && bias ? at::empty_like(*bias) : Tensor()};
}

// The statistics of a batch have the type of the weights where that is wider than the input's.
Tensor3 native_batch_norm(
    const Tensor& input, const optional<Tensor>& weight, const optional<Tensor>& bias, const optional<Tensor>&,
    const optional<Tensor>&, bool training, double, double) {
  auto statistics = at::empty({training ? input.size(1) : 0}, wider_options(input, weight, bias));
  return {at::empty_like(input), statistics, at::empty_like(statistics)};
}

Tensor3 native_batch_norm_backward(
    const Tensor&, const Tensor& input, const optional<Tensor>& weight, const optional<Tensor>&,
    const optional<Tensor>&, const optional<Tensor>&, const optional<Tensor>&, bool, double,
    std::array<bool, 3> mask) {
  auto of_channels = [&] {
    return weight && weight->defined() ? at::empty_like(*weight) : at::empty({input.size(1)}, input.options());
  };
  return {
      mask[0] ? at::empty_like(input) : Tensor(), mask[1] ? of_channels() : Tensor(),
      mask[2] ? of_channels() : Tensor()};
}

Tensor2 native_dropout(const Tensor& input, double, optional<bool>) {
  return {at::empty_like(input), at::empty_like(input, input.options().dtype(at::kBool))};
}

Tensor native_dropout_backward(const Tensor& grad, const Tensor&, double) {
  return at::empty_like(grad);
}

Tensor index_select(const Tensor& self, int64_t dim, const Tensor& index) {
  auto shape = self.sizes().vec();
  if (!shape.empty()) {
    shape[at::maybe_wrap_dim(dim, self.dim())] = index.numel();
  }
  return at::empty(shape, self.options());
}

Tensor roll(const Tensor& self, at::IntArrayRef, at::IntArrayRef) {
  return at::empty(self.sizes(), self.options());
}

Tensor relu(const Tensor& self) {
  return at::empty_like(self);
}

Tensor abs(const Tensor& self) {
  return at::empty_like(self);
}

Tensor nan_to_num(const Tensor& self, optional<double>, optional<double>, optional<double>) {
  return at::empty_like(self);
}

Tensor& relu_(Tensor& self) {
  return self;
}

// The number of bins depends on values, which a meta tensor does not have; assume minlength.
Tensor bincount(const Tensor& self, const optional<Tensor>& weights, c10::SymInt minlength) {
  auto options = weights && weights->defined() ? self.options().dtype(at::kDouble) : self.options().dtype(at::kLong);
  return at::empty({minlength.expect_int()}, options);
}

Tensor repeat_interleave(const Tensor& repeats, optional<c10::SymInt> output_size) {
  TORCH_CHECK(output_size.has_value(), "repeat_interleave on meta tensors needs output_size");
  return at::empty({output_size->expect_int()}, repeats.options());
}

void fused_adamw_(
    at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList, double, double,
    double, double, double, bool, bool, const optional<Tensor>&, const optional<Tensor>&) {}

void fused_sgd_(
    at::TensorList, at::TensorList, at::TensorList, double, double, double, double, bool, bool, bool,
    const optional<Tensor>&, const optional<Tensor>&) {}

Tensor convolution(
    const Tensor& input, const Tensor& weight, const optional<Tensor>&, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool transposed, at::IntArrayRef, int64_t) {
  TORCH_CHECK(!transposed, "transposed convolutions have no meta kernel");
  std::vector<int64_t> shape{input.size(0), weight.size(0)};
  for (int64_t i = 0; i + 2 < input.dim(); ++i) {
    auto extent = dilation[i] * (weight.size(i + 2) - 1) + 1;
    shape.push_back((input.size(i + 2) + 2 * padding[i] - extent) / stride[i] + 1);
  }
  return at::empty(shape, input.options());
}

Tensor3 convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, at::OptionalIntArrayRef, at::IntArrayRef,
    at::IntArrayRef, at::IntArrayRef, bool, at::IntArrayRef, int64_t, std::array<bool, 3> mask) {
  return {
      mask[0] ? at::empty_like(input) : Tensor(),
      mask[1] ? at::empty_like(weight) : Tensor(),
      mask[2] ? at::empty({weight.size(0)}, grad.options()) : Tensor()};
}

// A meta tensor has no value. Return one, so that divisions stay finite.
at::Scalar local_scalar_dense(const Tensor&) {
  return 1.0;
}

void amp_check(at::TensorList, Tensor&, const Tensor&) {}

} // namespace

void register_meta_kernels() {
  // Registered on first use, not by a static initializer, which the linker may drop with its object file.
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::Meta, __FILE__, __LINE__);
  static bool done = [] {
    library->impl("_scaled_dot_product_flash_attention_for_cpu", &flash_attention);
    library->impl("_scaled_dot_product_flash_attention_for_cpu_backward", &flash_attention_backward);
    library->impl("embedding_dense_backward", &embedding_dense_backward);
    library->impl("native_layer_norm", &native_layer_norm);
    library->impl("native_layer_norm_backward", &native_layer_norm_backward);
    library->impl("native_batch_norm", &native_batch_norm);
    library->impl("native_batch_norm_backward", &native_batch_norm_backward);
    library->impl("native_dropout", &native_dropout);
    library->impl("native_dropout_backward", &native_dropout_backward);
    library->impl("index_select", &index_select);
    library->impl("roll", &roll);
    library->impl("abs", &abs);
    library->impl("nan_to_num", &nan_to_num);
    library->impl("relu", &relu);
    library->impl("relu_", &relu_);
    library->impl("convolution", &convolution);
    library->impl("convolution_backward", &convolution_backward);
    library->impl("bincount", &bincount);
    library->impl("repeat_interleave.Tensor", &repeat_interleave);
    library->impl("_fused_adamw_", &fused_adamw_);
    library->impl("_fused_sgd_", &fused_sgd_);
    library->impl("_local_scalar_dense", &local_scalar_dense);
    library->impl("_amp_foreach_non_finite_check_and_unscale_", &amp_check);
    return true;
  }();
  (void)done;
}

} // namespace trainyard
