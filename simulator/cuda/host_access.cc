#include "host_access.h"

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <mutex>

#include "address_space.h"

namespace simulator {
namespace {

struct sigaction previous;

void print_message(uintptr_t address) {
  char device[40] = "no device any more", text[256];
  if (auto d = try_device_of(address)) snprintf(device, sizeof device, "device %d", *d);
  int n = snprintf(text, sizeof text, "simulated CUDA: the host read or wrote device memory at %#zx of %s; a GPU machine would crash here, too\n",
                   size_t(address), device);
  [[maybe_unused]] auto written = write(STDERR_FILENO, text, size_t(n));
}

// The faulting instruction runs again when the handler returns, and then finds the default action.
void die_on_return(int signal) {
  struct sigaction by_default = {};
  by_default.sa_handler = SIG_DFL;
  sigaction(signal, &by_default, nullptr);
}

void on_fault(int signal, siginfo_t* info, void* context) {
  auto address = uintptr_t(info->si_addr);
  if (AddressSpace::holds(address)) {
    print_message(address);
    die_on_return(signal);
  } else if (previous.sa_flags & SA_SIGINFO) {
    previous.sa_sigaction(signal, info, context);
  } else if (previous.sa_handler == SIG_DFL || previous.sa_handler == SIG_IGN) {
    die_on_return(signal);
  } else {
    previous.sa_handler(signal);
  }
}

} // namespace

void report_host_access() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction ours = {};
    ours.sa_sigaction = on_fault;
    // On the alternate stack: a handler that we pass the signal to may be there for stack overflows, as Rust's is.
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    sigaction(SIGSEGV, &ours, &previous);
  });
}

} // namespace simulator
