#include "report.h"

#include <fstream>
#include <iostream>
#include <sstream>

#include <c10/util/Exception.h>

#include "clocks.h"
#include "memory.h"

namespace trainyard::simulated {
namespace {

struct Report {
  Counters counters; // without memory, which the allocator counts
  std::vector<std::string> hazards;
  std::string to_raise;
  bool forbid_host_synchronization = false;
  bool in_step = false;
};

Report& report() {
  static auto* report = new Report();
  return *report;
}

Options& mutable_options() {
  static Options options;
  return options;
}

std::string quoted(const std::string& text) {
  std::ostringstream out;
  out << '"';
  for (char c : text) {
    if (c == '"' || c == '\\') {
      out << '\\' << c;
    } else {
      out << (static_cast<unsigned char>(c) < ' ' ? ' ' : c);
    }
  }
  out << '"';
  return out.str();
}

void write_counts(std::ostream& out, const char* name, const std::map<std::string, uint64_t>& counts) {
  out << ", \"" << name << "\": {";
  const char* separator = "";
  for (const auto& [key, count] : counts) {
    out << separator << quoted(key) << ": " << count;
    separator = ", ";
  }
  out << "}";
}

void record(const std::string& text) {
  report().hazards.push_back(text);
  ++report().counters.hazards;
}

} // namespace

const Options& options() {
  return mutable_options();
}

void set_options(const Options& options) {
  mutable_options() = options;
}

void throw_hazard(const std::string& text) {
  {
    ClockLock lock(clock_mutex());
    record(text);
  }
  TORCH_CHECK(false, "simulated accelerator: ", text);
  std::abort(); // not reached; TORCH_CHECK is not declared noreturn
}

void report_hazard(const std::string& text) {
  ClockLock lock(clock_mutex());
  record(text);
  // Also printed at once: a process that launches nothing more would never show it.
  std::cerr << "simulated accelerator: " + text + "\n" << std::flush;
  if (report().to_raise.empty()) {
    report().to_raise = text;
  }
}

void raise_reported_hazard() {
  ClockLock lock(clock_mutex());
  if (!report().to_raise.empty()) {
    auto text = std::exchange(report().to_raise, "");
    TORCH_CHECK(false, "simulated accelerator (found before this call): ", text);
  }
}

void count_kernel(const std::string& op) {
  ClockLock lock(clock_mutex());
  ++report().counters.kernels;
  ++report().counters.kernels_by_operator[op];
}

void count_host_synchronization(const char* cause, const std::string& op) {
  ClockLock lock(clock_mutex());
  TORCH_CHECK(!report().forbid_host_synchronization, "simulated accelerator: host synchronization is forbidden here: ",
              op, " makes the host wait for the device (", cause, ")");
  ++report().counters.host_synchronizations[cause];
  if (report().in_step) {
    ++report().counters.synchronizations_in_steps[std::string(cause) + ": " + op];
  }
}

void begin_step() {
  ClockLock lock(clock_mutex());
  report().in_step = true;
  ++report().counters.steps;
}

void end_step() {
  ClockLock lock(clock_mutex());
  report().in_step = false;
}

Counters counters() {
  ClockLock lock(clock_mutex());
  auto result = report().counters;
  for (int device = 0; device < options().devices; ++device) {
    result.memory.push_back(memory_counters(device));
  }
  return result;
}

void reset_counters() {
  ClockLock lock(clock_mutex());
  report().counters = {};
  report().hazards.clear();
  report().to_raise.clear();
  for (int device = 0; device < options().devices; ++device) {
    reset_memory_peak(device);
  }
}

std::vector<std::string> hazards() {
  ClockLock lock(clock_mutex());
  return report().hazards;
}

void write_report(const std::string& path) {
  auto counted = counters();
  std::ofstream out(path);
  out << "{\"kernels\": " << counted.kernels << ", \"steps\": " << counted.steps;
  write_counts(out, "host_synchronizations", counted.host_synchronizations);
  write_counts(out, "synchronizations_in_steps", counted.synchronizations_in_steps);
  out << ", \"hazards\": [";
  const char* separator = "";
  for (const auto& hazard : hazards()) {
    out << separator << quoted(hazard);
    separator = ", ";
  }
  out << "]}\n";
}

void forbid_host_synchronization(bool forbid) {
  ClockLock lock(clock_mutex());
  report().forbid_host_synchronization = forbid;
}

} // namespace trainyard::simulated
