// Pinned host memory, which the host may not touch while an asynchronous copy uses it.
//
// Each block is a memfd mapped twice: the host's view, which is protected from the launch of a copy until the host has
// synchronized with it, and the device's view, which copies use.
#pragma once

#include <c10/core/Allocator.h>

#include "memory.h"
#include "streams.h"

namespace trainyard::simulated {

// Reserves the addresses of all host views, so that the fault handler can tell them without a lock.
void reserve_pinned_memory();

c10::Allocator* pinned_allocator();
const AddressRange& pinned_addresses();
bool is_pinned(const void* address);

// The device's view of a host address in pinned memory.
void* device_view(const void* address);

// The stream's last launch is a copy from (or, if it writes, to) this pinned memory.
void use_pinned(const void* address, Stream& stream, bool writes);

// Lifts the protections whose copies the host knows to be over.
void release_pinned_uses();

} // namespace trainyard::simulated
