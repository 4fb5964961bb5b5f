// Test programs are lists of named cases; a program runs the one that its first argument names.
#pragma once

#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <string>

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <unistd.h>

#include "simulated_accelerator.h"

namespace simulated = trainyard::simulated;
using at::Tensor;

inline at::TensorOptions cuda(int device = 0, at::ScalarType type = at::kFloat) {
  return at::TensorOptions().device(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device))).dtype(type);
}

inline c10::impl::VirtualGuardImpl guard_impl() {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA);
}

inline c10::Stream current_stream(int device = 0) {
  return guard_impl().getStream(cuda(device).device());
}

inline c10::Stream new_stream(int device = 0) {
  return guard_impl().getStreamFromGlobalPool(cuda(device).device());
}

// Orders `second` after what `first` has queued.
inline void order(const c10::Stream& first, const c10::Stream& second) {
  c10::Event event(c10::DeviceType::CUDA);
  event.record(first);
  event.block(second);
}

template <typename... Parts>
void say(const Parts&... parts) {
  std::cout << c10::str(parts...) << std::endl;
}

// Prints what the body throws; a rule that catches nothing prints that.
inline void expect_error(const std::function<void()>& body) {
  try {
    body();
    say("not caught");
  } catch (const c10::Error& error) {
    say("caught: ", error.what_without_backtrace());
  } catch (const std::exception& error) {
    say("caught: ", error.what());
  }
}

inline void expect(bool holds, const std::string& what) {
  say(holds ? "ok: " : "FAILED: ", what);
}

using Cases = std::map<std::string, std::function<void()>>;

// Runs the case that the first argument names; `finish` is called before the process exits.
inline int run_case(const Cases& cases, int argc, char** argv, const std::function<void()>& finish = [] {}) {
  auto found = argc > 1 ? cases.find(argv[1]) : cases.end();
  if (found == cases.end()) {
    std::cerr << "no such case; the cases are:\n";
    for (const auto& [name, body] : cases) {
      std::cerr << "  " << name << "\n";
    }
    return 2;
  }
  try {
    found->second();
  } catch (const c10::Error& error) {
    say("died: ", error.what_without_backtrace());
    _exit(1);
  } catch (const std::exception& error) {
    say("died: ", error.what());
    _exit(1);
  }
  for (const auto& hazard : simulated::hazards()) {
    say("hazard: ", hazard);
  }
  finish();
  std::cout.flush();
  _exit(0); // without destructors: threads of streams and of Gloo may still run
}
