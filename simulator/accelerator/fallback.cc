// The boxed kernel of most operators: runs the CPU's kernel on the shadow of the operands, without copies.
#include <map>
#include <set>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>

#include "guard.h"
#include "kernels.h"
#include "memory.h"
#include "report.h"
#include "tensors.h"

namespace trainyard::simulated {
namespace {

using at::Tensor;
using torch::jit::Stack;

bool starts_with(const std::string& text, const char* prefix) {
  return text.rfind(prefix, 0) == 0;
}

// Operators that index by masks or by host tensors.
bool takes_indices(const std::string& name) {
  static const std::set<std::string> names{
      "aten::index.Tensor",    "aten::index.Tensor_out", "aten::_unsafe_index.Tensor",
      "aten::index_put_",      "aten::index_put",        "aten::_index_put_impl_",
      "aten::index_put.out",   "aten::_unsafe_index_put"};
  return names.count(name) > 0;
}

// A schema that does not say what its kernel writes: running statistics in training.
bool writes_unannotated(const std::string& op, const std::string& argument) {
  return op == "aten::native_batch_norm" && starts_with(argument, "running_");
}

// CPU kernels without a generator argument draw from the CPU's default generator: it gets the device's state for the
// time of the call.
void run_with_device_generator(c10::DeviceIndex device, const std::function<void()>& body) {
  static auto* mutex = new std::mutex();
  std::lock_guard<std::mutex> lock(*mutex);
  auto host = at::detail::getDefaultCPUGenerator();
  auto& own = default_generator(device);
  auto saved = host.get_state();
  host.set_state(own.get_state());
  body();
  own.set_state(host.get_state());
  host.set_state(saved);
}

// One call of one operator.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), schema_(op.schema()), name_(c10::toString(op.operator_name())), stack_(stack),
        begin_(stack->size() - schema_.arguments().size()) {}

  void run() {
    device_ = find_device();
    c10::DeviceGuard guard(device_);
    auto& stream = current_stream(device_.index());
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      cpu_stack_->push_back(convert(argument(i), schema_.arguments()[i]));
    }
    reject_host_tensors();
    bool synchronizes = is_dynamic();
    if (synchronizes) {
      count_host_synchronization(cause::kDynamicShape, name_);
    }
    auto body = kernel();
    bool queueable = results_are_arguments() && sized_by_kernel_.empty() && !synchronizes && !random_;
    launch(stream, name_, accesses_, std::move(body), queueable ? Run::MayQueue : Run::Inline);
    if (synchronizes) {
      host_waited_for(stream);
    }
    write_back_sized(stream);
    return_results(stream);
  }

 private:
  const c10::IValue& argument(size_t i) const { return (*stack_)[begin_ + i]; }

  template <typename Visit>
  static void for_each_tensor(const c10::IValue& value, Visit visit) {
    if (value.isTensor()) {
      visit(value.toTensor());
    } else if (value.isTensorList()) {
      for (const auto& tensor : value.toTensorVector()) {
        visit(tensor);
      }
    } else if (value.isOptionalTensorList()) {
      for (const auto& tensor : value.toOptionalTensorVector()) {
        visit(tensor.value_or(Tensor()));
      }
    }
  }

  // The device of the first operand on a device, else the one asked for, else the current one.
  c10::Device find_device() const {
    std::optional<c10::Device> found, asked;
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      for_each_tensor(argument(i), [&](const Tensor& tensor) {
        if (!found && on_device(tensor)) {
          found = tensor.device();
        }
      });
      if (argument(i).isDevice()) {
        asked = argument(i).toDevice();
      }
    }
    auto device = found ? found : asked;
    return device && device->has_index() ? *device : c10::Device(kDeviceType, current_device());
  }

  // --- arguments ----------------------------------------------------------------------------------
  c10::IValue convert(const c10::IValue& value, const c10::Argument& declared) {
    bool writes = (declared.alias_info() != nullptr && declared.alias_info()->isWrite()) ||
                  writes_unannotated(name_, declared.name());
    if (value.isTensor()) {
      return convert(value.toTensor(), writes);
    }
    if (value.isTensorList()) {
      std::vector<Tensor> list;
      for_each_tensor(value, [&](const Tensor& tensor) { list.push_back(convert(tensor, writes)); });
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for_each_tensor(value, [&](const Tensor& tensor) {
        masked_ |= tensor.defined() && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
        list.push_back(tensor.defined() ? std::make_optional(convert(tensor, writes)) : std::nullopt);
      });
      return list;
    }
    if (value.isDevice()) {
      return c10::Device(c10::kCPU);
    }
    if (declared.type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()))) {
      random_ = true;
      has_generator_ = true;
      return value.isNone() ? c10::IValue(default_generator(device_.index())) : value;
    }
    return value;
  }

  Tensor convert(const Tensor& tensor, bool writes) {
    if (!tensor.defined()) {
      return tensor;
    }
    if (!on_device(tensor)) {
      return convert_host_tensor(tensor, writes);
    }
    TORCH_CHECK(tensor.device() == device_, "Expected all tensors to be on the same device, but found at least two "
                "devices, ", device_, " and ", tensor.device(), "! (in ", name_, ")");
    auto& view = views_[tensor.unsafeGetTensorImpl()];
    if (writes && tensor.numel() == 0) {
      // An out argument may be empty because the kernel is to give it its size.
      view = at::empty(tensor.sizes(), tensor.options().device(c10::kCPU));
      sized_by_kernel_.emplace_back(tensor, view);
      return view;
    }
    accesses_.push_back(access_to(tensor, writes));
    if (!view.defined()) {
      view = cpu_view(tensor);
    }
    return view;
  }

  Tensor convert_host_tensor(const Tensor& tensor, bool writes) {
    TORCH_CHECK(tensor.is_cpu(), name_, ": expected a tensor of ", device_, ", found one of ", tensor.device());
    // A kernel takes a 0-dimensional CPU tensor by value. Kernels over lists would read it through its address.
    bool by_value = tensor.dim() == 0 && !writes && !starts_with(name_, "aten::_foreach_") &&
                    !starts_with(name_, "aten::_fused_");
    if (!by_value) {
      host_tensors_.push_back(tensor);
    }
    return by_value && options().asynchronous ? tensor.clone() : tensor;
  }

  void reject_host_tensors() {
    if (host_tensors_.empty()) {
      return;
    }
    bool only_indices = takes_indices(name_) && argument(0).isTensor() && on_device(argument(0).toTensor());
    TORCH_CHECK(only_indices, "Expected all tensors to be on the same device, but found at least two devices, ",
                device_, " and cpu! (in ", name_, ", a CPU tensor of sizes ", host_tensors_[0].sizes(), ")");
    count_host_synchronization(cause::kCopyFromHost, name_); // CUDA copies the indices to the device
  }

  // --- the kernel ---------------------------------------------------------------------------------
  bool is_dynamic() const {
    if (takes_indices(name_)) {
      return masked_; // integer indices tell the shape without their values
    }
    return op_.hasTag(at::Tag::dynamic_output_shape) || op_.hasTag(at::Tag::data_dependent_output);
  }

  bool results_are_arguments() const {
    for (const auto& result : schema_.returns()) {
      if (result.alias_info() == nullptr) {
        return false;
      }
    }
    return true;
  }

  std::function<void()> kernel() {
    auto body = [op = op_, stack = cpu_stack_] {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack.get());
    };
    if (op_.hasTag(at::Tag::nondeterministic_seeded) && !has_generator_) {
      random_ = true;
      return [body, device = device_.index()] { run_with_device_generator(device, body); };
    }
    return body;
  }

  // --- results ------------------------------------------------------------------------------------
  void write_back_sized(Stream& stream) {
    for (auto& [tensor, cpu] : sized_by_kernel_) {
      tensor.resize_(cpu.sizes());
      if (cpu.numel() > 0) {
        record_write(stream, name_, writes(tensor));
        stream.drain();
        cpu_view(tensor).copy_(cpu);
      }
    }
  }

  void return_results(Stream& stream) {
    Stack results;
    for (size_t i = 0; i < schema_.returns().size(); ++i) {
      const auto* alias = schema_.returns()[i].alias_info();
      results.push_back(alias != nullptr ? aliased_argument(*alias) : device_result((*cpu_stack_)[i], stream));
    }
    torch::jit::drop(*stack_, schema_.arguments().size());
    stack_->insert(stack_->end(), results.begin(), results.end());
  }

  c10::IValue aliased_argument(const c10::AliasInfo& alias) const {
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      const auto* of_argument = schema_.arguments()[i].alias_info();
      if (of_argument != nullptr && of_argument->isWrite() && of_argument->beforeSets() == alias.beforeSets()) {
        return argument(i);
      }
    }
    TORCH_CHECK_NOT_IMPLEMENTED(false, "simulated accelerator: ", name_, " returns a view and needs its own kernel");
  }

  c10::IValue device_result(const c10::IValue& value, Stream& stream) const {
    if (value.isTensor()) {
      return to_device(value.toTensor(), device_, stream, name_);
    }
    if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const auto& tensor : value.toTensorVector()) {
        list.push_back(to_device(tensor, device_, stream, name_));
      }
      return list;
    }
    return value;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const std::string name_;
  Stack* const stack_;
  const size_t begin_; // of the arguments on the stack
  c10::Device device_{kDeviceType, 0};
  std::shared_ptr<Stack> cpu_stack_ = std::make_shared<Stack>();
  std::vector<Access> accesses_;
  std::map<at::TensorImpl*, Tensor> views_; // one per operand, so that operands that are one tensor stay one
  std::vector<std::pair<Tensor, Tensor>> sized_by_kernel_;
  std::vector<Tensor> host_tensors_;
  bool masked_ = false;
  bool random_ = false;
  bool has_generator_ = false;
};

} // namespace

void run_cpu_kernel(const c10::OperatorHandle& op, Stack* stack) {
  Call(op, stack).run();
}

} // namespace trainyard::simulated
