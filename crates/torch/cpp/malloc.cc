#include "bridge.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace trainyard {

void keep_freed_memory() {
#ifdef __GLIBC__
  // Blocks up to this size come from the heap, not from pages of their own that go back when freed.
  // Older versions accept no more than half a heap of a thread.
  if (!mallopt(M_MMAP_THRESHOLD, 1 << 30)) {
    mallopt(M_MMAP_THRESHOLD, 32 << 20);
  }
  // Nor does the end of the heap go back while less than this lies there.
  mallopt(M_TRIM_THRESHOLD, 0x7fffffff);
#endif
}

}  // namespace trainyard
