// Observers of memory (every allocation and release on meta and on the GPU, or else the CPU) and of operators (with their input shapes).
#include <algorithm>
#include <array>
#include <iterator>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include "bridge.h"
#include "gpu_library.h"
#include "trainyard-torch/src/bridge.rs.h"

namespace trainyard {
namespace {

constexpr size_t kKinds = 6;
thread_local uint8_t current_kind = kKinds - 1; // "other"

uint64_t now_ns() {
  timespec t{};
  clock_gettime(CLOCK_REALTIME, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000ull + static_cast<uint64_t>(t.tv_nsec);
}

// Allocated bytes by kind, now and at the peak of their sum.
class Counters {
 public:
  void allocated(uint8_t kind, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    allocated_[kind] += bytes;
    total_ += bytes;
    if (total_ > peak_) {
      peak_ = total_;
      at_peak_ = allocated_;
    }
    record_event(kind, static_cast<int64_t>(bytes));
  }

  void released(uint8_t kind, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    allocated_[kind] -= bytes;
    total_ -= bytes;
    record_event(kind, -static_cast<int64_t>(bytes));
  }

  // Throws if an allocation would exceed the limit; called before allocating.
  void check_limit(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK_WITH(OutOfMemoryError, limit_ == 0 || total_ + bytes <= limit_, "cannot allocate ", bytes,
                     " bytes: the memory limit is ", limit_, " bytes and ", total_, " are allocated");
  }

  void set_limit(uint64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    limit_ = bytes;
  }

  void read(uint64_t* out) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::copy(allocated_.begin(), allocated_.end(), out);
    std::copy(at_peak_.begin(), at_peak_.end(), out + kKinds);
    out[2 * kKinds] = total_;
    out[2 * kKinds + 1] = peak_;
  }

  void reset_peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    peak_ = total_;
    at_peak_ = allocated_;
  }

  void record(bool on) {
    std::lock_guard<std::mutex> lock(mutex_);
    recording_ = on;
  }

  rust::Vec<AllocationRecord> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(records_, {});
  }

 private:
  void record_event(uint8_t kind, int64_t bytes) {
    if (recording_) {
      records_.push_back(AllocationRecord{now_ns(), bytes, kind});
    }
  }

  std::mutex mutex_;
  std::array<uint64_t, kKinds> allocated_{}, at_peak_{};
  uint64_t total_ = 0, peak_ = 0, limit_ = 0;
  bool recording_ = false;
  rust::Vec<AllocationRecord> records_;
};

// All devices share one set of counters, because a process trains on one of them, or on none in a dry run. Never destroyed: static
// tensors may be released after static destructors ran.
Counters& counters() {
  static auto* instance = new Counters();
  return *instance;
}

// How a meta allocation, which has no memory, was counted. Its deleter subtracts the same amount.
struct Block {
  size_t bytes;
  uint8_t kind;
};

Block* counted(size_t bytes) {
  auto* block = new Block{bytes, current_kind};
  counters().allocated(block->kind, bytes);
  return block;
}

void release_block(void* context) {
  auto* block = static_cast<Block*>(context);
  counters().released(block->kind, block->bytes);
  delete block;
}

// How each allocation on CPU or GPU was counted, by address. On CPU the DataPtr's context must be the address itself, because some
// kernels (convolutions) allocate raw memory and free it by address alone.
class Blocks {
 public:
  void insert(void* data, size_t bytes) {
    auto kind = current_kind;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      blocks_[data] = Entry{bytes, kind};
    }
    counters().allocated(kind, bytes);
  }

  void erase(void* data) {
    Entry entry{};
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = blocks_.find(data);
      if (found == blocks_.end()) {
        return; // allocated before counting began
      }
      entry = found->second;
      blocks_.erase(found);
    }
    counters().released(entry.kind, entry.bytes);
  }

 private:
  struct Entry {
    size_t bytes;
    uint8_t kind;
  };
  std::mutex mutex_;
  std::unordered_map<void*, Entry> blocks_;
};

Blocks& blocks() {
  static auto* instance = new Blocks();
  return *instance;
}

void release_cpu(void* data) {
  if (data != nullptr) {
    blocks().erase(data);
    c10::free_cpu(data);
  }
}

struct ObservedCpu final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    counters().check_limit(bytes);
    void* data = c10::alloc_cpu(bytes);
    if (data != nullptr) {
      blocks().insert(data, bytes);
    }
    return {data, data, &release_cpu, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release_cpu;
  }
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    default_copy_data(dest, src, count);
  }
};

struct ObservedMeta final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    return {nullptr, counted(bytes), &release_block, c10::Device(c10::kMeta)};
  }
  void copy_data(void*, const void*, std::size_t) const override {}
};

// An operator that has started and not ended.
struct Running : at::ObserverContext {
  uint64_t started_ns;
  rust::Vec<int64_t> shapes;
  uint64_t input_bytes = 0;
  // Compared with outputs, never dereferenced.
  std::vector<const void*> inputs;
  std::vector<const void*> input_storages;
};

const void* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

// Calls `body` for every tensor among the values, and in their lists.
template <typename Values, typename Body>
void for_each_tensor(const Values& values, Body body) {
  auto visit = [&](const at::Tensor& tensor) {
    if (tensor.defined()) {
      body(tensor);
    }
  };
  for (const auto& value : values) {
    if (value.isTensor()) {
      visit(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) {
        visit(tensor);
      }
    }
  }
}

struct Operators {
  std::mutex mutex;
  rust::Vec<OperatorRecord> records;
  at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;
};

Operators& operators() {
  static auto* instance = new Operators();
  return *instance;
}

std::unique_ptr<at::ObserverContext> operator_started(const at::RecordFunction& fn) {
  auto running = std::make_unique<Running>();
  // libtorch asserts if inputs() is called on an operator without inputs.
  auto inputs = fn.num_inputs() > 0 ? fn.inputs() : c10::ArrayRef<const c10::IValue>();
  for_each_tensor(inputs, [&](const at::Tensor& tensor) {
    // A shape is encoded as the number of dims followed by the dims.
    auto sizes = tensor.sizes();
    running->shapes.push_back(static_cast<int64_t>(sizes.size()));
    for (auto size : sizes) {
      running->shapes.push_back(size);
    }
    running->input_bytes += tensor.nbytes();
    running->inputs.push_back(tensor.unsafeGetTensorImpl());
    running->input_storages.push_back(storage_of(tensor));
  });
  running->started_ns = now_ns();
  return running;
}

void operator_ended(const at::RecordFunction& fn, at::ObserverContext* context) {
  auto ended = now_ns();
  auto* running = static_cast<Running*>(context);
  if (running == nullptr) {
    return; // operator_started threw, and libtorch swallowed the exception
  }
  auto contains = [](const std::vector<const void*>& all, const void* one) {
    return one != nullptr && std::find(all.begin(), all.end(), one) != all.end();
  };
  uint64_t output_bytes = 0;
  rust::Vec<int64_t> output_shape;
  bool is_first = true;
  bool is_view = false;
  bool is_unchanged = true;
  for_each_tensor(fn.outputs(), [&](const at::Tensor& tensor) {
    // An operator in place returns its input; a view is another tensor on the storage of an input.
    bool is_input = contains(running->inputs, tensor.unsafeGetTensorImpl());
    is_view |= !is_input && contains(running->input_storages, storage_of(tensor));
    is_unchanged &= is_input;
    if (std::exchange(is_first, false)) {
      std::copy(tensor.sizes().begin(), tensor.sizes().end(), std::back_inserter(output_shape));
    }
    output_bytes += tensor.nbytes();
  });
  if (!is_first && is_unchanged) {
    // A cast to the same type, for example, returns its input. An operator that writes to its input does so, too.
    auto schema = fn.operator_schema();
    is_view |= schema.has_value() && !schema->is_mutable();
  }
  auto& all = operators();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.records.push_back(OperatorRecord{
      rust::String::lossy(fn.name()), std::move(running->shapes), std::move(output_shape),
      is_view ? 0 : running->input_bytes, is_view ? 0 : output_bytes, running->started_ns, ended, fn.threadId()});
}

} // namespace

void observe_memory() {
  static bool installed = [] {
    MemoryObserver observer{
        [](void* address, size_t bytes) { blocks().insert(address, bytes); },
        [](void* address) { blocks().erase(address); }};
    if (!observe_gpu_memory(observer)) {
      c10::SetCPUAllocator(new ObservedCpu(), 100);
    }
    c10::SetAllocator(c10::kMeta, new ObservedMeta(), 100);
    return true;
  }();
  (void)installed;
}

uint8_t set_memory_kind(uint8_t kind) {
  return std::exchange(current_kind, kind);
}

void memory_counters(rust::Slice<uint64_t> out) {
  TORCH_CHECK(out.size() == 2 * kKinds + 2, "memory_counters needs a buffer of ", 2 * kKinds + 2, " counters");
  counters().read(out.data());
}

void reset_memory_peak() {
  counters().reset_peak();
}

void set_memory_limit(uint64_t bytes) {
  counters().set_limit(bytes);
}

void record_allocations(bool on) {
  counters().record(on);
}

rust::Vec<AllocationRecord> take_allocations() {
  return counters().take();
}

void observe_operators(bool on) {
  auto& all = operators();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (on && all.handle == at::INVALID_CALLBACK_HANDLE) {
    all.handle = at::addGlobalCallback(at::RecordFunctionCallback(operator_started, operator_ended)
                                           .needsInputs(true)
                                           .needsOutputs(true)
                                           .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  } else if (!on && all.handle != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(all.handle);
    all.handle = at::INVALID_CALLBACK_HANDLE;
  }
}

rust::Vec<OperatorRecord> take_operators() {
  auto& all = operators();
  std::lock_guard<std::mutex> lock(all.mutex);
  return std::exchange(all.records, {});
}

} // namespace trainyard
