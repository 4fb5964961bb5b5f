// Autograd hooks and functions whose bodies are Rust closures.
#include <atomic>

#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "bridge.h"
#include "trainyard-torch/src/bridge.rs.h"

namespace trainyard {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// std::function must be copyable, and a rust::Box is not.
template <typename T>
std::shared_ptr<rust::Box<T>> shared(rust::Box<T> box) {
  return std::make_shared<rust::Box<T>>(std::move(box));
}

std::vector<size_t> addresses(const std::vector<at::Tensor>& tensors) {
  std::vector<size_t> out;
  out.reserve(tensors.size());
  for (const auto& t : tensors) {
    out.push_back(t.defined() ? reinterpret_cast<size_t>(&t) : 0);
  }
  return out;
}

Addresses slice(const std::vector<size_t>& v) {
  return Addresses(v.data(), v.size());
}

// An autograd node whose backward is a Rust closure. Its saved tensors go through SavedVariable, so that version
// checks and saved-tensor hooks apply to them.
struct RustNode : Node {
  rust::Box<Backward> backward;
  std::vector<SavedVariable> saved;
  size_t num_tensors;
  bool released = false;

  RustNode(rust::Box<Backward> b, size_t n) : backward(std::move(b)), num_tensors(n) {}

  std::string name() const override { return "TrainyardFunction"; }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!released, "backward reached a function whose saved tensors were already freed; ",
                "keep the graph to run backward a second time");
    std::vector<at::Tensor> unpacked;
    unpacked.reserve(saved.size());
    auto self = getptr();
    for (auto& s : saved) {
      unpacked.push_back(s.unpack(self));
    }
    TensorList out;
    auto saved_at = addresses(unpacked), grads_at = addresses(grads);
    run_backward(*backward, slice(saved_at), slice(grads_at), out);
    TORCH_CHECK(out.tensors.size() == num_tensors, "backward returned ", out.tensors.size(), " gradients for ",
                num_tensors, " inputs");
    return std::move(out.tensors);
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    released = true;
    for (auto& s : saved) {
      s.reset_data();
    }
    release_backward(*backward);
  }
};

// Saved-tensor hooks that call the innermost Rust hooks of this thread.
struct RustSavedHooks : torch::autograd::SavedVariableHooks {
  std::shared_ptr<rust::Box<SavedHooks>> hooks;
  std::optional<uint64_t> id; // empty if packing failed: nothing to release

  explicit RustSavedHooks(std::shared_ptr<rust::Box<SavedHooks>> h) : hooks(std::move(h)) {}
  ~RustSavedHooks() override {
    if (id) {
      drop_saved(**hooks, *id);
    }
  }
  void call_pack_hook(const at::Tensor& tensor) override { id = pack_saved(**hooks, tensor.detach()); }
  at::Tensor call_unpack_hook() override { return *unpack_saved(**hooks, id.value()); }
  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data() const override {
    return std::nullopt;
  }
};

thread_local std::vector<std::shared_ptr<rust::Box<SavedHooks>>> saved_hooks;

// libtorch asks the autograd engine for default saved-tensor hooks, and only the Python engine returns any. This
// engine returns the Rust hooks.
struct HookedEngine : torch::autograd::Engine {
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (saved_hooks.empty()) {
      return nullptr;
    }
    return std::make_unique<RustSavedHooks>(saved_hooks.back());
  }
};

torch::autograd::Engine& hooked_engine() {
  // Never destroyed: engine threads may outlive static destructors.
  static auto* engine = new HookedEngine();
  return *engine;
}

} // namespace

std::unique_ptr<HookHandle> add_leaf_hook(const AtTensor& leaf, rust::Box<LeafHook> hook) {
  TORCH_CHECK(leaf.is_leaf() && leaf.requires_grad(), "a post-accumulate hook needs a leaf tensor that requires grad");
  // The leaf holds its gradient accumulator weakly; the handle keeps it alive.
  auto accumulator = torch::autograd::impl::grad_accumulator(leaf);
  auto body = shared(std::move(hook));
  // A strong reference to the leaf would be a cycle: leaf -> accumulator -> hook -> leaf.
  c10::weak_intrusive_ptr<c10::TensorImpl> weak(leaf.getIntrusivePtr());
  auto key = accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
      [body, weak](const variable_list& outputs, const variable_list&) {
        if (auto impl = weak.lock()) {
          run_leaf_hook(**body, at::Tensor(std::move(impl)));
        }
        return outputs;
      }));
  return std::make_unique<HookHandle>(HookHandle{[accumulator, key] { accumulator->del_post_hook(key); }});
}

std::unique_ptr<HookHandle> add_tensor_hook(const AtTensor& tensor, rust::Box<TensorHook> hook) {
  // The graph may outlive the tensor and keeps the hook then, so removing the hook also clears its body.
  using Body = std::shared_ptr<rust::Box<TensorHook>>;
  auto slot = std::make_shared<std::atomic<Body>>(shared(std::move(hook)));
  auto position = tensor.register_hook([slot](const at::Tensor& grad) -> at::Tensor {
    auto body = slot->load();
    auto replacement = body ? run_tensor_hook(**body, grad) : nullptr;
    return replacement ? *replacement : at::Tensor();
  });
  c10::weak_intrusive_ptr<c10::TensorImpl> weak(tensor.getIntrusivePtr());
  return std::make_unique<HookHandle>(HookHandle{[slot, weak, position] {
    slot->store(nullptr);
    if (auto impl = weak.lock()) {
      at::Tensor(std::move(impl)).remove_hook(position);
    }
  }});
}

void remove_hook(HookHandle& handle) {
  if (handle.remove) {
    handle.remove();
    handle.remove = nullptr;
  }
}

std::unique_ptr<TensorList> attach_backward(
    Addresses inputs, Addresses outputs, Addresses saved, rust::Box<Backward> backward) {
  auto ins = tensors_at(inputs), outs = tensors_at(outputs), kept = tensors_at(saved);
  auto result = std::make_unique<TensorList>();
  if (!torch::autograd::GradMode::is_enabled() || !torch::autograd::compute_requires_grad(ins)) {
    result->tensors = std::move(outs);
    return result;
  }
  auto node = c10::make_intrusive<RustNode>(std::move(backward), ins.size());
  node->set_next_edges(torch::autograd::collect_next_edges(ins));
  std::vector<std::pair<at::TensorImpl*, at::Tensor>> fresh;
  for (auto& out : outs) {
    // Each output must be a separate variable, even if it shares memory with an input.
    at::Tensor variable = out.detach();
    torch::autograd::set_history(variable, node);
    fresh.emplace_back(out.unsafeGetTensorImpl(), variable);
    result->tensors.push_back(variable);
  }
  for (auto& tensor : kept) {
    auto made = std::find_if(fresh.begin(), fresh.end(),
                             [&](const auto& f) { return f.first == tensor.unsafeGetTensorImpl(); });
    bool is_output = made != fresh.end();
    node->saved.emplace_back(is_output ? made->second : tensor, is_output);
  }
  return result;
}

void push_saved_hooks(rust::Box<SavedHooks> hooks) {
  static bool installed = [] {
    torch::autograd::set_default_engine_stub(hooked_engine);
    return true;
  }();
  (void)installed;
  saved_hooks.push_back(shared(std::move(hooks)));
}

void pop_saved_hooks() {
  saved_hooks.pop_back();
}

void set_grad(const AtTensor& leaf, const AtTensor& grad) {
  leaf.mutable_grad() = grad;
}

void clear_grad(const AtTensor& leaf) {
  leaf.mutable_grad().reset();
}

void backward(Addresses tensors, Addresses gradients) {
  torch::autograd::backward(tensors_at(tensors), tensors_at(gradients));
}

void run_backward_on_calling_thread() {
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
}

int64_t version(const AtTensor& tensor) {
  return static_cast<int64_t>(tensor._version());
}

void set_version(const AtTensor& tensor, int64_t version) {
  auto counter = tensor.unsafeGetTensorImpl()->version_counter(); // shares the count
  counter.set_version(version);
}

} // namespace trainyard
