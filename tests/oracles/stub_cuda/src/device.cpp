// What the runtime says of the card: the figures of a Hopper unless the environment says otherwise.
#include "stub.h"

static thread_local cudaError_t t_last = cudaSuccess;
cudaError_t err(cudaError_t e) {
  if (e != cudaSuccess) t_last = e;
  return e;
}

static thread_local int t_dev = 0;
API cudaError_t cudaGetDeviceCount(int* n) {
  *n = 1;
  return cudaSuccess;
}
API cudaError_t cudaGetDevice(int* d) {
  *d = t_dev;
  return cudaSuccess;
}
API cudaError_t cudaSetDevice(int d) {
  if (d != 0) return err(cudaErrorInvalidDevice);
  return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
API cudaError_t cudaDriverGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* c, int, int) {
  *c = 0;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* l, int* g) {
  if (l) *l = 0;
  if (g) *g = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* s, int n, int) {
  snprintf(s, n, "0000:01:00.0");
  return cudaSuccess;
}
u64 smem_optin() {
  int c = S().cc;
  return c >= 90 ? 232448 : c == 80 ? 166912 : c >= 86 ? 101376 : c >= 75 ? 65536 : 98304;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int d) {
  if (d != 0) return err(cudaErrorInvalidDevice);
  State& s = S();
  memset(p, 0, sizeof *p);
  {
    const char* nm = getenv("FAKE_CUDA_NAME");
    if (nm && *nm) snprintf(p->name, sizeof p->name, "%s", nm);
    else snprintf(p->name, sizeof p->name, "FakeCUDA sm_%d", s.cc);
  }
  p->totalGlobalMem = s.total;
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->memPitch = 2147483647;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = s.cc / 10;
  p->minor = s.cc % 10;
  p->textureAlignment = 512;
  p->texturePitchAlignment = 32;
  p->multiProcessorCount = s.sms;
  p->unifiedAddressing = 1;
  p->managedMemory = 1;
  p->concurrentKernels = 1;
  p->asyncEngineCount = 3;
  p->memoryBusWidth = 5120;
  p->l2CacheSize = 52428800;
  p->maxThreadsPerMultiProcessor = S().tpsm;
  p->streamPrioritiesSupported = 1;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerMultiprocessor = 65536;
  p->cooperativeLaunch = 1;
  p->sharedMemPerBlockOptin = smem_optin();
  p->maxBlocksPerMultiProcessor = 32;
  p->reservedSharedMemPerBlock = 1024;
  p->memoryPoolsSupported = 1;
  p->canMapHostMemory = 1;
  p->pciBusID = 1;
  p->clusterLaunch = s.cc >= 90;
  return cudaSuccess;
}
int devattr(int a) {
  State& s = S();
  switch (a) {
    case cudaDevAttrMaxThreadsPerBlock:
      return 1024;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
      return 1024;
    case cudaDevAttrMaxBlockDimZ:
      return 64;
    case cudaDevAttrMaxGridDimX:
      return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return 49152;
    case cudaDevAttrTotalConstantMemory:
      return 65536;
    case cudaDevAttrWarpSize:
      return 32;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      return 65536;
    case cudaDevAttrClockRate:
      return 1980000;
    case cudaDevAttrMemoryClockRate:  // an H200's
      return 3201000;
    case cudaDevAttrGlobalMemoryBusWidth:
      return 6144;
    case cudaDevAttrMultiProcessorCount:
      return s.sms;
    case cudaDevAttrL2CacheSize:
      return 52428800;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return s.tpsm;
    case cudaDevAttrUnifiedAddressing:
      return 1;
    case cudaDevAttrComputeCapabilityMajor:
      return s.cc / 10;
    case cudaDevAttrComputeCapabilityMinor:
      return s.cc % 10;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return 233472;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return (int)smem_optin();
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      return 32;
    case cudaDevAttrReservedSharedMemoryPerBlock:
      return 1024;
    case cudaDevAttrCooperativeLaunch:
      return 1;
    case cudaDevAttrMemoryPoolsSupported:
      return 1;
    case cudaDevAttrConcurrentKernels:
      return 1;
    case cudaDevAttrComputePreemptionSupported:
      return 1;
    case cudaDevAttrTextureAlignment:
      return 512;
    case cudaDevAttrClusterLaunch:
      return s.cc >= 90;
    default:
      return 0;
  }
}
API cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) {
  *v = devattr(a);
  return cudaSuccess;
}
API cudaError_t cudaGetLastError() {
  cudaError_t e = t_last;
  t_last = cudaSuccess;
  return e;
}
API cudaError_t cudaPeekAtLastError() { return t_last; }
API const char* cudaGetErrorString(cudaError_t e) {
  return e == cudaSuccess ? "no error" : e == cudaErrorMemoryAllocation ? "out of memory" : "fake cuda error";
}
API const char* cudaGetErrorName(cudaError_t e) {
  return e == cudaSuccess                 ? "cudaSuccess"
         : e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation"
                                          : "cudaErrorFake";
}
