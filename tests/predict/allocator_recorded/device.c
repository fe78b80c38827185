/* A CUDA device without a device: just enough of the runtime and the driver for libc10_cuda's allocator.
 *
 * Memory is counted, never touched. cudaMalloc fails where the capacity ends, cuMemCreate as well. */
#include <cuda.h>
#include <driver_types.h>
#include <stdlib.h>
#include <string.h>

static const size_t PAGE = (size_t)2 << 20;
static size_t capacity, used, next_segment = (size_t)1 << 40, next_range = (size_t)1 << 45;
static struct { size_t address, size; } segments[1 << 16];
static size_t count;

void device_set_capacity(size_t bytes) { capacity = bytes; }

cudaError_t cudaMalloc(void **address, size_t bytes) {
  size_t size = (bytes + PAGE - 1) / PAGE * PAGE;
  if (used + size > capacity) return cudaErrorMemoryAllocation;
  used += size;
  *address = (void *)next_segment;
  segments[count].address = next_segment;
  segments[count++].size = size;
  next_segment += size + PAGE;
  return cudaSuccess;
}

cudaError_t cudaFree(void *address) {
  for (size_t i = count; i-- > 0;)
    if (segments[i].address == (size_t)address) {
      used -= segments[i].size;
      segments[i] = segments[--count];
      return cudaSuccess;
    }
  return cudaErrorInvalidValue;
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
  *available = capacity - used;
  *total = capacity;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  memset(properties, 0, sizeof *properties);
  properties->totalGlobalMem = (size_t)1 << 38;
  properties->major = 9;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *number) { *number = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) { *status = 0; return 0; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status) { *status = 0; return 0; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDA_VERSION; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = *greatest = 0; return cudaSuccess; }
const char *cudaGetErrorString(cudaError_t error) { return "device error"; }
const char *cudaGetErrorName(cudaError_t error) { return "device error"; }

#define DOES_NOTHING(name) int name(void) { return 0; }
DOES_NOTHING(cudaSetDevice) DOES_NOTHING(cudaDeviceCanAccessPeer) DOES_NOTHING(cudaDeviceEnablePeerAccess)
DOES_NOTHING(cudaDeviceGetDefaultMemPool) DOES_NOTHING(cudaDeviceSynchronize) DOES_NOTHING(cudaEventCreateWithFlags)
DOES_NOTHING(cudaEventDestroy) DOES_NOTHING(cudaEventElapsedTime) DOES_NOTHING(cudaEventQuery)
DOES_NOTHING(cudaEventRecord) DOES_NOTHING(cudaEventSynchronize) DOES_NOTHING(cudaFreeAsync)
DOES_NOTHING(cudaGetLastError) DOES_NOTHING(cudaGraphNodeGetDependencies) DOES_NOTHING(cudaIpcCloseMemHandle)
DOES_NOTHING(cudaIpcGetMemHandle) DOES_NOTHING(cudaIpcOpenMemHandle) DOES_NOTHING(cudaMallocAsync)
DOES_NOTHING(cudaMemPoolGetAttribute) DOES_NOTHING(cudaMemPoolSetAccess) DOES_NOTHING(cudaMemPoolSetAttribute)
DOES_NOTHING(cudaMemPoolTrimTo) DOES_NOTHING(cudaMemcpy) DOES_NOTHING(cudaMemcpyAsync)
DOES_NOTHING(cudaMemcpyPeerAsync) DOES_NOTHING(cudaStreamCreateWithPriority) DOES_NOTHING(cudaStreamQuery)
DOES_NOTHING(cudaStreamSynchronize) DOES_NOTHING(cudaStreamWaitEvent)
DOES_NOTHING(cudaThreadExchangeStreamCaptureMode)

static CUresult does_nothing(void) { return CUDA_SUCCESS; }
static CUresult has_no_attribute(int *value, CUdevice_attribute name, CUdevice device) { *value = 0; return CUDA_SUCCESS; }

static CUresult reserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wish, unsigned long long flags) {
  *address = next_range;
  next_range += size + ((size_t)1 << 30);
  return CUDA_SUCCESS;
}

static CUresult create(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *kind,
                       unsigned long long flags) {
  if (used + size > capacity) return CUDA_ERROR_OUT_OF_MEMORY;
  used += size;
  *handle = size;
  return CUDA_SUCCESS;
}

static CUresult release(CUmemGenericAllocationHandle handle) { used -= handle; return CUDA_SUCCESS; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *status) {
  *function = does_nothing;
  if (!strcmp(name, "cuDeviceGetAttribute")) *function = has_no_attribute;
  if (!strcmp(name, "cuMemAddressReserve")) *function = reserve;
  if (!strcmp(name, "cuMemCreate")) *function = create;
  if (!strcmp(name, "cuMemRelease")) *function = release;
  if (status) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
