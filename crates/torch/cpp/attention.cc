// Attention: over all keys, and over a block of keys with the log-sum-exp that merging blocks needs.
//
// The kernel is chosen by device and type, as libtorch's own dispatcher does: the flash kernel on CPU; on a GPU
// flash for half types, memory-efficient for float32, and plain products for float64, for which CUDA has no other kernel.
// On meta, the flash kernel of CPU stands for the kernels of GPUs too.
#include <atomic>

#include <ATen/ATen.h>

#include "bridge.h"

namespace trainyard {
namespace {

// [batch, heads, ...] to [batch, heads * groups, ...], each head repeated in place.
at::Tensor repeat_heads(const at::Tensor& x, int64_t groups) {
  if (groups == 1) {
    return x;
  }
  return x.unsqueeze(2).expand({x.size(0), x.size(1), groups, x.size(2), x.size(3)}).flatten(1, 2);
}

std::atomic<bool> simulates_gpu{true};

enum class Kernel { CpuFlash, Flash, Efficient, Math };

Kernel kernel_for(const at::Tensor& q) {
  if (q.is_cpu() || q.is_meta()) {
    return Kernel::CpuFlash;
  }
  switch (q.scalar_type()) {
    case at::kHalf:
    case at::kBFloat16:
      return Kernel::Flash;
    case at::kFloat:
      return Kernel::Efficient;
    default:
      return Kernel::Math;
  }
}

double scale_of(const at::Tensor& q) {
  return 1.0 / std::sqrt(static_cast<double>(q.size(3)));
}

// The scores of all pairs, those of later keys at minus infinity.
at::Tensor scores_of(const at::Tensor& q, const at::Tensor& k, bool causal) {
  auto scores = at::matmul(q, k.transpose(2, 3)).mul(scale_of(q));
  if (causal) {
    auto later = at::ones({q.size(2), k.size(2)}, q.options().dtype(at::kBool)).triu(1);
    scores = scores.masked_fill(later, -std::numeric_limits<double>::infinity());
  }
  return scores;
}

// The seed and offset of dropout, which is never applied here.
at::Tensor no_seed(const at::Tensor& q) {
  return at::zeros({}, q.options().dtype(at::kLong));
}

// The memory-efficient kernel pads the log-sum-exp to a multiple of 32 queries, and expects it so.
constexpr int64_t kQueryAlignment = 32;

at::Tensor padded_lse(const at::Tensor& lse) {
  int64_t length = lse.size(2), rounded = (length + kQueryAlignment - 1) / kQueryAlignment * kQueryAlignment;
  return at::constant_pad_nd(lse, {0, rounded - length}, 0.0).contiguous();
}

std::unique_ptr<TensorList> listed(std::vector<at::Tensor> tensors) {
  auto out = std::make_unique<TensorList>();
  out->tensors = std::move(tensors);
  return out;
}

} // namespace

void simulate_gpu(bool is_on_gpu) {
  simulates_gpu = is_on_gpu;
}

std::unique_ptr<AtTensor> attention(const AtTensor& q, const AtTensor& k, const AtTensor& v, bool causal) {
  int64_t heads = q.size(1), groups = k.size(1) == 0 ? 0 : heads / k.size(1);
  TORCH_CHECK(k.size(1) * groups == heads,
              "attention: ", heads, " query heads cannot be grouped over ", k.size(1), " KV heads");
  auto kernel = kernel_for(q);
  if (kernel == Kernel::Flash) {
    return std::make_unique<at::Tensor>(at::scaled_dot_product_attention(
        q, k, v, /*attn_mask=*/{}, /*dropout=*/0.0, causal, /*scale=*/{}, /*enable_gqa=*/groups > 1));
  }
  // The other kernels need as many KV heads as query heads; the dispatcher would fall back to one that allocates s*s
  // scores.
  if (q.is_meta() && simulates_gpu && at::isReducedFloatingType(q.scalar_type())) {
    groups = 1; // a GPU's flash kernel reads each KV head for several query heads
  }
  auto keys = repeat_heads(k, groups), values = repeat_heads(v, groups);
  if (kernel != Kernel::CpuFlash) {
    return std::make_unique<at::Tensor>(at::scaled_dot_product_attention(q, keys, values, {}, 0.0, causal));
  }
  // Called directly: on meta, the dispatcher would choose the math kernel.
  auto [out, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(q, keys, values, /*dropout=*/0.0, causal);
  return std::make_unique<at::Tensor>(out);
}

std::unique_ptr<TensorList> attention_block(const AtTensor& q, const AtTensor& k, const AtTensor& v, bool causal) {
  switch (kernel_for(q)) {
    case Kernel::CpuFlash: {
      auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, /*dropout=*/0.0, causal);
      return listed({out, lse});
    }
    case Kernel::Flash: {
      auto found = at::_scaled_dot_product_flash_attention(q, k, v, /*dropout=*/0.0, causal, /*debug_mask=*/false);
      return listed({std::get<0>(found), std::get<1>(found)});
    }
    case Kernel::Efficient: {
      auto found = at::_scaled_dot_product_efficient_attention(
          q, k, v, /*attn_bias=*/{}, /*compute_log_sumexp=*/true, /*dropout=*/0.0, causal);
      return listed({std::get<0>(found), std::get<1>(found).narrow(2, 0, q.size(2)).contiguous()});
    }
    case Kernel::Math: {
      auto scores = scores_of(q, k, causal);
      return listed({at::matmul(at::softmax(scores, -1), v), at::logsumexp(scores, -1)});
    }
  }
  TORCH_CHECK(false, "attention_block: unknown kernel");
}

std::unique_ptr<TensorList> attention_block_backward(
    const AtTensor& gradient, const AtTensor& q, const AtTensor& k, const AtTensor& v, const AtTensor& out,
    const AtTensor& lse, bool causal) {
  switch (kernel_for(q)) {
    case Kernel::CpuFlash: {
      auto [d_q, d_k, d_v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
          gradient, q, k, v, out, lse, /*dropout=*/0.0, causal);
      return listed({d_q, d_k, d_v});
    }
    case Kernel::Flash: {
      auto [d_q, d_k, d_v] = at::_scaled_dot_product_flash_attention_backward(
          gradient, q, k, v, out, lse.contiguous(), /*cum_seq_q=*/{}, /*cum_seq_k=*/{}, q.size(2), k.size(2),
          /*dropout=*/0.0, causal, no_seed(q), no_seed(q));
      return listed({d_q, d_k, d_v});
    }
    case Kernel::Efficient: {
      auto found = at::_scaled_dot_product_efficient_attention_backward(
          gradient, q, k, v, /*attn_bias=*/{}, out, padded_lse(lse), no_seed(q), no_seed(q), /*dropout=*/0.0,
          {true, true, true, false}, causal);
      return listed({std::get<0>(found), std::get<1>(found), std::get<2>(found)});
    }
    case Kernel::Math: {
      auto weights = (scores_of(q, k, causal) - lse.unsqueeze(-1)).exp();
      auto d_weights = at::matmul(gradient, v.transpose(2, 3));
      auto delta = (gradient * out).sum(-1, /*keepdim=*/true);
      auto d_scores = (weights * (d_weights - delta)).mul(scale_of(q));
      return listed({at::matmul(d_scores, k), at::matmul(d_scores.transpose(2, 3), q),
                     at::matmul(weights.transpose(2, 3), gradient)});
    }
  }
  TORCH_CHECK(false, "attention_block_backward: unknown kernel");
}

} // namespace trainyard
