#include "log.h"

#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <mutex>

#include "settings.h"

namespace simulator {
namespace {

struct Log {
  std::mutex mutex;
  FILE* file = settings().log.empty() ? nullptr : fopen(settings().log.c_str(), "we");
  std::vector<std::string> not_written;
};

// Never destroyed: threads still call at process exit.
Log& the_log() {
  static Log& log = *new Log();
  return log;
}

} // namespace

void log(const char* format, ...) {
  auto& l = the_log();
  if (!l.file) return;
  std::lock_guard lock(l.mutex);
  va_list arguments;
  va_start(arguments, format);
  vfprintf(l.file, format, arguments);
  va_end(arguments);
  fputc('\n', l.file);
  fflush(l.file); // the last lines before a crash are the ones that matter
}

void complain(const std::string& text) {
  // One write, so that lines of several ranks do not mix.
  std::string line = "simulated CUDA: " + text + "\n";
  [[maybe_unused]] auto written = write(STDERR_FILENO, line.data(), line.size());
}

std::vector<std::string> called_but_not_written() {
  auto& l = the_log();
  std::lock_guard lock(l.mutex);
  return l.not_written;
}

} // namespace simulator

extern "C" void trainyard_simulator_not_written(const char* name, int* noted) {
  if (__atomic_exchange_n(noted, 1, __ATOMIC_RELAXED)) return;
  simulator::log("not written: %s", name);
  auto& l = simulator::the_log();
  std::lock_guard lock(l.mutex);
  l.not_written.push_back(name);
}
