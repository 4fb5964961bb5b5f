#include "fault.h"

#include <execinfo.h>
#include <signal.h>
#include <unistd.h>

#include <cstring>

#include "memory.h"
#include "pinned.h"

namespace trainyard::simulated {
namespace {

struct sigaction previous;

// Only async-signal-safe calls.
void print(const char* text) {
  (void)!write(STDERR_FILENO, text, std::strlen(text));
}

void print_number(unsigned long value) {
  char digits[24];
  char* at = digits + sizeof digits - 1;
  *at = '\0';
  do {
    *--at = static_cast<char>('0' + value % 10);
    value /= 10;
  } while (value > 0);
  print(at);
}

void print_backtrace() {
  void* frames[48];
  backtrace_symbols_fd(frames, backtrace(frames, 48), STDERR_FILENO);
}

bool explain(const void* address) {
  if (device_addresses().contains(address)) {
    print("simulated accelerator: host access to device memory of cuda:");
    print_number(static_cast<unsigned long>(device_of_address(address)));
    print("; copy the tensor to the host first\n");
    return true;
  }
  if (pinned_addresses().contains(address)) {
    print("simulated accelerator: host access to pinned memory that an asynchronous copy may still use; "
          "synchronize with an event recorded after the copy first\n");
    return true;
  }
  return false;
}

void on_fault(int signal_number, siginfo_t* info, void* context) {
  if (explain(info->si_addr)) {
    print_backtrace();
  }
  if ((previous.sa_flags & SA_SIGINFO) != 0) {
    previous.sa_sigaction(signal_number, info, context); // Rust's, which looks for stack overflows
  } else if (previous.sa_handler == SIG_DFL || previous.sa_handler == SIG_IGN) {
    signal(SIGSEGV, SIG_DFL); // the instruction faults again on return, and the process dies of the signal
  } else {
    previous.sa_handler(signal_number);
  }
}

} // namespace

void install_fault_handler() {
  // The first call of backtrace loads a library, which a handler may not do.
  void* frame;
  backtrace(&frame, 1);
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &previous);
}

} // namespace trainyard::simulated
