// Ends the process with a message when an exception has nowhere to go: it leaves a thread of Gloo or libtorch, or a
// function that does not return errors to Rust, as when memory runs out in it.
#include "bridge.h"

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <thread>

namespace trainyard {
namespace {

[[noreturn]] void report_and_exit() {
  const char* rank = std::getenv("RANK");
  rank = rank == nullptr ? "0" : rank;
  const char* format = "error: rank %s: an exception ended a thread of libtorch: %s\n";
  try {
    if (auto exception = std::current_exception()) {
      std::rethrow_exception(exception);
    }
    std::fprintf(stderr, format, rank, "no exception, std::terminate was called");
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "error: rank %s: the host is out of memory: lower training.local_batch_size, or use more ranks\n", rank);
  } catch (const c10::Error& e) {
    std::fprintf(stderr, format, rank, e.what_without_backtrace());
  } catch (const std::exception& e) {
    std::fprintf(stderr, format, rank, e.what());
  } catch (...) {
    std::fprintf(stderr, format, rank, "an exception of unknown type");
  }
  // Not abort(): the message says what a core file would, and other threads must not run destructors.
  std::_Exit(1);
}

}  // namespace

void report_uncaught_exceptions() { std::set_terminate(report_and_exit); }

void throw_in_thread(rust::Str message, bool is_out_of_memory) {
  std::string text(message);
  std::thread([text, is_out_of_memory] {
    if (is_out_of_memory) {
      throw std::bad_alloc();
    }
    TORCH_CHECK(false, text);
  }).join();
}

}  // namespace trainyard
