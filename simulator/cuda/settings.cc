#include "settings.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace simulator {
namespace {

uint64_t number(const char* name, uint64_t otherwise) {
  const char* text = getenv(name);
  if (!text || !*text) return otherwise;
  char* end;
  uint64_t value = strtoull(text, &end, 10);
  if (*end) {
    fprintf(stderr, "simulated CUDA: %s=%s is not a number\n", name, text);
    exit(2);
  }
  return value;
}

void replace_all(std::string& text, const std::string& what, const std::string& by) {
  for (size_t at = text.find(what); at != text.npos; at = text.find(what, at + by.size())) text.replace(at, what.size(), by);
}

std::string path(const char* name, int rank) {
  const char* text = getenv(name);
  std::string path = text ? text : "";
  replace_all(path, "%p", std::to_string(getpid()));
  replace_all(path, "%r", std::to_string(rank));
  return path;
}

// Launchers show each process its own device. Which one it is makes no difference here; how many does.
int visible_devices(int devices) {
  const char* list = getenv("CUDA_VISIBLE_DEVICES");
  if (!list) return devices;
  int visible = 0;
  for (char* end; *list; list = end) {
    long device = strtol(list, &end, 10);
    if (end == list || device < 0 || device >= devices) break; // the runtime, too, ends the list at the first invalid entry
    ++visible;
    if (*end == ',') ++end;
  }
  return visible;
}

Settings read() {
  Settings s;
  s.rank = int(number("RANK", 0));
  s.devices = visible_devices(int(std::min<uint64_t>(number("TRAINYARD_SIM_GPUS", 1), max_devices)));
  s.arch = int(number("TRAINYARD_SIM_ARCH", 80));
  s.memory = number("TRAINYARD_SIM_MEMORY", 80ull << 30);
  s.log = path("TRAINYARD_SIM_LOG", s.rank);
  s.report = path("TRAINYARD_SIM_REPORT", s.rank);
  return s;
}

} // namespace

const Settings& settings() {
  static const Settings& s = *new Settings(read());
  return s;
}

} // namespace simulator
