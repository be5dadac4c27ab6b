// CUDA's runtime, as far as torch and its allocator ask for it, of a GPU that does nothing: see count.py.
#include <driver_types.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef cudaError_t Error;

// The device

Error cudaGetDevice(int *d) { *d = 0; return 0; }
Error cudaSetDevice(int d) { return 0; }
Error cudaGetDeviceCount(int *n) { *n = 1; return 0; }
Error cudaDriverGetVersion(int *v) { *v = 13000; return 0; }
Error cudaGetLastError(void) { return 0; }
Error cudaPeekAtLastError(void) { return 0; }
Error cudaDeviceSynchronize(void) { return 0; }
Error cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; return 0; }
Error cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
    *v = a == cudaDevAttrComputeCapabilityMajor ? 9 : a == cudaDevAttrComputeCapabilityMinor ? 0 : 1;
    return 0;
}
Error cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "a GPU that does nothing");
    p->major = 9, p->multiProcessorCount = 132, p->warpSize = 32;
    p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048, p->regsPerMultiprocessor = 65536;
    p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448, p->l2CacheSize = 60 << 20;
    p->totalGlobalMem = 1ull << 40;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    return 0;
}
Error cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned v, unsigned long long flags,
                                       enum cudaDriverEntryPointQueryResult *found) {
    *f = 0;
    if (found) *found = cudaDriverEntryPointSymbolNotFound;
    return 0;
}

// Memory: addresses, with nothing behind most of them

Error cudaMalloc(void **p, size_t n) {
    *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return *p == MAP_FAILED ? cudaErrorMemoryAllocation : 0;
}
Error cudaFree(void *p) { return 0; }
Error cudaHostAlloc(void **p, size_t n, unsigned flags) { *p = malloc(n); return 0; }
Error cudaMemGetInfo(size_t *left, size_t *all) { *left = *all = 1ull << 40; return 0; }
Error cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind k, cudaStream_t s) {
    if (n < 4096) memcpy(to, from, n);  // numbers that Python asks for
    return 0;
}
Error cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t s) { return 0; }

// Streams, events, launches

Error cudaDeviceGetStreamPriorityRange(int *least, int *most) { *least = 0, *most = -5; return 0; }
Error cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int p) { *s = malloc(8); return 0; }
Error cudaStreamGetPriority(cudaStream_t s, int *p) { *p = 0; return 0; }
Error cudaStreamQuery(cudaStream_t s) { return 0; }
Error cudaStreamSynchronize(cudaStream_t s) { return 0; }
Error cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) { return 0; }
Error cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) { *c = 0; return 0; }
Error cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *c) { *c = 0; return 0; }
Error cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m) { return 0; }
Error cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { *e = malloc(8); return 0; }
Error cudaEventDestroy(cudaEvent_t e) { return 0; }
Error cudaEventQuery(cudaEvent_t e) { return 0; }
Error cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return 0; }
Error cudaEventSynchronize(cudaEvent_t e) { return 0; }
Error cudaLaunchKernel(const void *f, void *grid, void *block, void **args, size_t shared, cudaStream_t s) { return 0; }
Error cudaLaunchKernelExC(const void *config, const void *f, void **args) { return 0; }
Error cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    return 0;
}
Error cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int v) { return 0; }
Error cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int block, size_t shared) { *n = 2; return 0; }
Error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int block, size_t shared, unsigned flags) {
    *n = 2;
    return 0;
}
