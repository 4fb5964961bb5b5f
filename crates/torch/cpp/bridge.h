// The C++ functions that Rust calls (declared again in src/bridge.rs).
//
// A tensor crosses the FFI boundary as a reference to at::Tensor, which is what tch holds a pointer to. A list of
// tensors crosses as a slice of addresses, where 0 means "undefined tensor". Every function may throw: cxx turns
// exceptions into Rust errors, and an error returned by a Rust callback is thrown here.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "rust/cxx.h"

namespace rust::behavior {
// Reports libtorch's message without its C++ backtrace, which does not help users.
template <typename Try, typename Fail>
static void trycatch(Try&& attempt, Fail&& fail) noexcept try {
  attempt();
} catch (const c10::Error& e) {
  fail(e.what_without_backtrace());
} catch (const std::exception& e) {
  fail(e.what());
} catch (...) {
  fail("an exception of unknown type");
}
} // namespace rust::behavior

namespace trainyard {

using AtTensor = at::Tensor;
using Addresses = rust::Slice<const size_t>;

std::vector<at::Tensor> tensors_at(Addresses addresses);
std::unique_ptr<AtTensor> share(const AtTensor& tensor);

// A list of tensors returned to Rust, or filled in by a Rust callback.
struct TensorList {
  std::vector<at::Tensor> tensors;
  size_t len() const { return tensors.size(); }
  std::unique_ptr<AtTensor> take(size_t index);
  void push(const AtTensor& tensor) { tensors.push_back(tensor); }
  void push_undefined() { tensors.emplace_back(); }
};

// --- stores and groups (group.cc) ----------------------------------------------------------------
struct StoreHandle {
  c10::intrusive_ptr<c10d::Store> store;
};
struct GroupHandle {
  explicit GroupHandle(c10::intrusive_ptr<c10d::Backend> backend) : backend(std::move(backend)) {}
  c10::intrusive_ptr<c10d::Backend> backend;
  // Timeout of Gloo's send and recv. Gloo fixes it when the group connects; only a timeout given to wait() overrides
  // it. 0 means the timeout of the connection.
  mutable std::atomic<uint64_t> message_timeout_ms{0};
};
struct WorkHandle {
  c10::intrusive_ptr<c10d::Work> work;
  uint64_t timeout_ms;
};

std::shared_ptr<StoreHandle> tcp_store(rust::Str host, uint16_t port, int32_t listen_fd, uint64_t timeout_ms);
std::shared_ptr<StoreHandle> prefix_store(rust::Str prefix, const StoreHandle& store);
void store_set(const StoreHandle& store, rust::Str key, rust::Slice<const uint8_t> value);
rust::Vec<uint8_t> store_get(const StoreHandle& store, rust::Str key, uint64_t timeout_ms);
int64_t store_add(const StoreHandle& store, rust::Str key, int64_t amount);
void store_wait(const StoreHandle& store, rust::Str key, uint64_t timeout_ms);
bool store_check(const StoreHandle& store, rust::Str key);

std::shared_ptr<GroupHandle> gloo_group(
    const StoreHandle& store, int32_t rank, int32_t size, rust::Str address, uint64_t timeout_ms);
void load_gpu_library(rust::Str path);
void set_gpu_memory_limit(int32_t index, uint64_t bytes);
void begin_step(bool profile);
void end_step();
std::shared_ptr<GroupHandle> gpu_group(
    const StoreHandle& store, int32_t rank, int32_t size, int32_t device, rust::Str name, uint64_t timeout_ms);
void abort_group(const GroupHandle& group);
void set_timeout(const GroupHandle& group, uint64_t timeout_ms);

std::unique_ptr<WorkHandle> all_reduce(const GroupHandle& group, const AtTensor& tensor, uint8_t op);
std::unique_ptr<WorkHandle> all_gather(const GroupHandle& group, const AtTensor& out, const AtTensor& in);
std::unique_ptr<WorkHandle> reduce_scatter(const GroupHandle& group, const AtTensor& out, const AtTensor& in, uint8_t op);
std::unique_ptr<WorkHandle> all_to_all(
    const GroupHandle& group, const AtTensor& out, const AtTensor& in,
    rust::Slice<const int64_t> out_splits, rust::Slice<const int64_t> in_splits);
std::unique_ptr<WorkHandle> broadcast(const GroupHandle& group, const AtTensor& tensor, int32_t root);
std::unique_ptr<WorkHandle> reduce(const GroupHandle& group, const AtTensor& tensor, int32_t root, uint8_t op);
std::unique_ptr<WorkHandle> gather(const GroupHandle& group, Addresses outs, const AtTensor& in, int32_t root);
std::unique_ptr<WorkHandle> scatter(const GroupHandle& group, const AtTensor& out, Addresses ins, int32_t root);
std::unique_ptr<WorkHandle> send(const GroupHandle& group, const AtTensor& tensor, int32_t peer, int32_t tag);
std::unique_ptr<WorkHandle> recv(const GroupHandle& group, const AtTensor& tensor, int32_t peer, int32_t tag);
void start_coalescing(const GroupHandle& group);
std::unique_ptr<WorkHandle> end_coalescing(const GroupHandle& group);
std::unique_ptr<WorkHandle> barrier(const GroupHandle& group);
void work_wait(const WorkHandle& work);
bool work_is_done(const WorkHandle& work);

// --- devices and streams (device.cc) -------------------------------------------------------------
struct StreamId;
struct EventHandle {
  c10::Event event;
};
void set_current_device(int32_t index);
StreamId current_stream(int32_t index);
StreamId pool_stream(int32_t index);
StreamId exchange_stream(StreamId stream);
std::unique_ptr<EventHandle> record_event(StreamId stream);
std::unique_ptr<EventHandle> record_timed_event(StreamId stream);
double elapsed_ms(const EventHandle& from, const EventHandle& to);
void stream_wait_event(StreamId stream, const EventHandle& event);
bool event_is_done(const EventHandle& event);
void synchronize_event(const EventHandle& event);
void record_stream(const AtTensor& tensor, StreamId stream);
void copy_non_blocking(const AtTensor& target, const AtTensor& source);
void device_memory(int32_t index, rust::Slice<uint64_t> out);
void reset_peak_device_memory(int32_t index);
bool computes_values();
std::unique_ptr<AtTensor> empty_pinned(rust::Slice<const int64_t> shape, int32_t scalar_type);

// --- autograd (autograd.cc) ----------------------------------------------------------------------
struct LeafHook;
struct TensorHook;
struct Backward;
struct SavedHooks;
struct HookHandle {
  std::function<void()> remove;
};

std::unique_ptr<HookHandle> add_leaf_hook(const AtTensor& leaf, rust::Box<LeafHook> hook);
std::unique_ptr<HookHandle> add_tensor_hook(const AtTensor& tensor, rust::Box<TensorHook> hook);
void remove_hook(HookHandle& handle);
std::unique_ptr<TensorList> attach_backward(
    Addresses inputs, Addresses outputs, Addresses saved, rust::Box<Backward> backward);
void push_saved_hooks(rust::Box<SavedHooks> hooks);
void pop_saved_hooks();
void set_grad(const AtTensor& leaf, const AtTensor& grad);
void clear_grad(const AtTensor& leaf);
void backward(Addresses tensors, Addresses gradients);
void run_backward_on_calling_thread();
int64_t version(const AtTensor& tensor);
void set_version(const AtTensor& tensor, int64_t version);

// --- storages (storage.cc) -----------------------------------------------------------------------
void rebind(const AtTensor& tensor, const AtTensor& data);
void release_storage(const AtTensor& tensor);
void restore_storage(const AtTensor& tensor);
void swap_storages(const AtTensor& a, const AtTensor& b);
size_t storage_bytes(const AtTensor& tensor);
size_t storage_address(const AtTensor& tensor);
bool is_meta(const AtTensor& tensor);
std::unique_ptr<AtTensor> new_empty(const AtTensor& like, rust::Slice<const int64_t> shape);
std::unique_ptr<AtTensor> new_zeros(const AtTensor& like, rust::Slice<const int64_t> shape);
std::unique_ptr<AtTensor> new_without_storage(const AtTensor& like, rust::Slice<const int64_t> shape);
std::unique_ptr<AtTensor> empty_meta(rust::Slice<const int64_t> shape, int32_t scalar_type);

// --- attention (attention.cc) --------------------------------------------------------------------
std::unique_ptr<AtTensor> attention(const AtTensor& q, const AtTensor& k, const AtTensor& v, bool causal);
std::unique_ptr<TensorList> attention_block(const AtTensor& q, const AtTensor& k, const AtTensor& v, bool causal);
std::unique_ptr<TensorList> attention_block_backward(
    const AtTensor& gradient, const AtTensor& q, const AtTensor& k, const AtTensor& v, const AtTensor& out,
    const AtTensor& lse, bool causal);

// --- operators tch does not bind (kernel.cc) and meta kernels (meta.cc) ---------------------------
void fused_adamw(
    Addresses params, Addresses grads, Addresses exp_avgs, Addresses exp_avg_sqs, Addresses steps,
    Addresses grad_scale, Addresses found_inf, double lr, double beta1, double beta2, double eps, double weight_decay);
void fused_sgd(
    Addresses params, Addresses grads, Addresses momenta, Addresses grad_scale, Addresses found_inf,
    double lr, double momentum, double dampening, double weight_decay, bool nesterov, bool first);
std::unique_ptr<TensorList> foreach_norm(Addresses tensors);
void foreach_mul_scalar(Addresses tensors, double factor);
void foreach_mul_tensor(Addresses tensors, const AtTensor& factor);
void foreach_mul_list(Addresses tensors, Addresses factors);
void foreach_add(Addresses tensors, Addresses others, double alpha);
void foreach_lerp(Addresses tensors, Addresses ends, double weight);
void foreach_addcmul(Addresses tensors, Addresses a, Addresses b, double value);
void foreach_addcdiv(Addresses tensors, Addresses a, Addresses b, double value);
void addcmul(const AtTensor& tensor, const AtTensor& a, const AtTensor& b, double value);
void foreach_copy(Addresses tensors, Addresses sources);
std::unique_ptr<TensorList> foreach_sqrt(Addresses tensors);
void foreach_zero(Addresses tensors);
std::unique_ptr<AtTensor> rms_norm(const AtTensor& x, const AtTensor& weight, double eps);

void register_meta_kernels();

// Whether meta tensors simulate the kernels of a GPU, or else of a CPU.
void simulate_gpu(bool is_on_gpu);
void use_deterministic_algorithms(bool on);

// --- observers (observe.cc) ----------------------------------------------------------------------
void report_uncaught_exceptions();
void throw_in_thread(rust::Str message, bool is_out_of_memory);
void keep_freed_memory();
void observe_memory();
uint8_t set_memory_kind(uint8_t kind);
void memory_counters(rust::Slice<uint64_t> out);
void reset_memory_peak();
void set_memory_limit(uint64_t bytes);
void record_allocations(bool on);
struct AllocationRecord;
rust::Vec<AllocationRecord> take_allocations();
struct OperatorRecord;
void observe_operators(bool on);
rust::Vec<OperatorRecord> take_operators();

} // namespace trainyard
