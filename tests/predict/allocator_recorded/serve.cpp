// Serves requests from standard input with PyTorch's own allocator and prints its statistics.
//
// Input, in 64-bit integers: the capacity, then pairs (storage, bytes): born; (-storage, 0): dies; (0, 0): empty cache.
// Output: index of the request that ran out of memory or -1, peak allocated, peak reserved, reserved, retries.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/PeerToPeerAccess.h>

#include <cstdint>
#include <cstdio>
#include <unordered_map>

extern "C" void device_set_capacity(size_t bytes);
namespace allocator = c10::cuda::CUDACachingAllocator;

int main() {
  int64_t capacity, request[2], failed = -1;
  if (fread(&capacity, sizeof capacity, 1, stdin) != 1) return 2;
  device_set_capacity(capacity);
  allocator::init(1);
  c10::cuda::detail::init_p2p_access_cache(1);
  std::unordered_map<int64_t, void*> alive;
  for (int64_t index = 0; failed < 0 && fread(request, sizeof request, 1, stdin) == 1; ++index) {
    if (request[0] > 0) {
      try {
        alive[request[0]] = allocator::raw_alloc(request[1]);
      } catch (const c10::OutOfMemoryError&) {
        failed = index;
      }
    } else if (request[0] < 0) {
      allocator::raw_delete(alive.at(-request[0]));
    } else {
      allocator::emptyCache();
    }
  }
  const auto stats = allocator::getDeviceStats(0);
  printf("%ld %ld %ld %ld %ld\n", (long)failed, (long)stats.allocated_bytes[0].peak, (long)stats.reserved_bytes[0].peak,
         (long)stats.reserved_bytes[0].current, (long)stats.num_alloc_retries);
}
