// The optional log of calls, and the list of functions that were called although nobody wrote them.
#pragma once
#include <string>
#include <vector>

namespace simulator {

// Writes one line to the file that TRAINYARD_SIM_LOG names. Costs next to nothing without that setting.
void log(const char* format, ...) __attribute__((format(printf, 1, 2)));

// One line on standard error, for what a user must see.
void complain(const std::string& text);

// Names of generated functions that were called, in the order of their first call.
std::vector<std::string> called_but_not_written();

} // namespace simulator

// Generated functions call this with a flag of their own, so that each is noted once.
extern "C" void trainyard_simulator_not_written(const char* name, int* noted);
