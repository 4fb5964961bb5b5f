// Configures glibc to keep freed memory.
#include "bridge.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace trainyard {

void keep_freed_memory() {
#ifdef __GLIBC__
  // Serve blocks up to this size from the heap instead of mmap, which returns memory to the kernel on every free.
  // Older glibc versions reject thresholds above half the size of a thread's heap.
  if (!mallopt(M_MMAP_THRESHOLD, 1 << 30)) {
    mallopt(M_MMAP_THRESHOLD, 32 << 20);
  }
  // Do not trim the top of the heap until this much is free there.
  mallopt(M_TRIM_THRESHOLD, 0x7fffffff);
#endif
}

}  // namespace trainyard
