#include "guard.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"
#include "pinned.h"
#include "report.h"
#include "streams.h"

namespace trainyard::simulated {
namespace {

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kDeviceType; }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(options().devices); }

  c10::Device getDevice() const override { return {kDeviceType, current_device()}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto previous = getDevice();
    set_current_device(device.index());
    return previous;
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < deviceCount()) {
      set_current_device(device.index());
    }
  }

  c10::Stream getStream(c10::Device device) const override { return current_stream(index(device)).handle(); }
  c10::Stream getDefaultStream(c10::Device device) const override { return default_stream(index(device)).handle(); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return pool_stream(index(device)).handle();
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return take_stream(index(device)).handle(); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return exchange_current_stream(find_stream(stream)).handle();
  }
  bool queryStream(const c10::Stream& stream) const override { return find_stream(stream).idle(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize_stream(find_stream(stream), cause::kStream, "Stream::synchronize");
  }
  void synchronizeDevice(c10::DeviceIndex device) const override { synchronize_device(device); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event();
    }
    static_cast<Event*>(*event)->record(find_stream(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      static_cast<Event*>(event)->block(find_stream(stream));
    }
  }
  bool queryEvent(void* event) const override { return event == nullptr || static_cast<Event*>(event)->query(); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      static_cast<Event*>(event)->synchronize(cause::kEvent);
    }
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* start, void* end, c10::DeviceIndex) const override {
    return Event::elapsed_ms(*static_cast<Event*>(start), *static_cast<Event*>(end));
  }

  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    record_stream(pointer, find_stream(stream));
  }

 private:
  static c10::DeviceIndex index(c10::Device device) { return device.has_index() ? device.index() : current_device(); }
};

class Hooks final : public at::CUDAHooksInterface {
 public:
  explicit Hooks(at::CUDAHooksArgs) {}

  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return options().devices > 0; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  std::string showConfig() const override { return "simulated accelerator"; }

  int getNumGPUs() const override { return options().devices; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(options().devices); }
  c10::DeviceIndex current_device() const override { return simulated::current_device(); }
  c10::DeviceIndex getCurrentDevice() const override { return simulated::current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto previous = simulated::current_device();
    set_current_device(device);
    return previous;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  void deviceSynchronize(c10::DeviceIndex device) const override {
    synchronize_device(device < 0 ? simulated::current_device() : device);
  }

  c10::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Device getDeviceFromPtr(void* address) const override {
    TORCH_CHECK(device_addresses().contains(address), "not an address of device memory");
    return {kDeviceType, device_of_address(address)};
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? simulated::current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};

} // namespace

at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* generators = [] {
    auto* all = new std::vector<at::Generator>();
    for (int i = 0; i < options().devices; ++i) {
      all->push_back(at::detail::createCPUGenerator(c10::default_rng_seed_val));
    }
    return all;
  }();
  return generators->at(device);
}

void register_guard() {
  c10::impl::registerDeviceGuard(kDeviceType, new Guard());
}

void register_hooks() {
  // libtorch creates the hooks of CUDA by this name, once, when it first asks for them.
  at::CUDAHooksRegistry()->Register(
      "CUDAHooks", [](at::CUDAHooksArgs args) { return std::make_unique<Hooks>(args); }, "simulated accelerator");
}

} // namespace trainyard::simulated
