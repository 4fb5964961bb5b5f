#pragma once

namespace trainyard::simulated {

// Explains a SIGSEGV of the host in device memory or in pinned memory that a copy uses, then lets the previous handler
// end the process.
void install_fault_handler();

} // namespace trainyard::simulated
