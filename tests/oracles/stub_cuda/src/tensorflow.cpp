// What TensorFlow's StreamExecutor and XLA's runtime ask of the driver beyond what PyTorch does: pinned memory, copies,
// events, host functions, modules and graphs by the driver's own names. Kernels do nothing; callbacks run at once.
#include "stub.h"

// --- memory: as the runtime's functions of the same use ---------------------------------------------------------------

API CUresult cuMemHostAlloc(void** p, size_t n, unsigned f) { return (CUresult)cudaHostAlloc(p, n, f); }
API CUresult cuMemAllocHost_v2(void** p, size_t n) { return (CUresult)cudaHostAlloc(p, n, 0); }
API CUresult cuMemFreeHost(void* p) { return (CUresult)cudaFreeHost(p); }
API CUresult cuMemHostRegister_v2(void* p, size_t n, unsigned f) { return (CUresult)cudaHostRegister(p, n, f); }
API CUresult cuMemHostUnregister(void* p) { return (CUresult)cudaHostUnregister(p); }
API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* d, void* h, unsigned) {
  *d = (CUdeviceptr)h;
  return CUDA_SUCCESS;
}
API CUresult cuMemAllocManaged(CUdeviceptr* p, size_t n, unsigned) { return (CUresult)cudaMalloc((void**)p, n); }
// A pool of the driver hands out what was asked for: its own rounding is not public.
API CUresult cuMemAllocAsync(CUdeviceptr* p, size_t n, CUstream) { return (CUresult)cudaMalloc((void**)p, n); }
API CUresult cuMemAllocFromPoolAsync(CUdeviceptr* p, size_t n, CUmemoryPool, CUstream) {
  return (CUresult)cudaMalloc((void**)p, n);
}
API CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice) {
  *pool = (CUmemoryPool)0x77;
  return CUDA_SUCCESS;
}
API CUresult cuMemPoolCreate(CUmemoryPool* pool, const CUmemPoolProps*) { return cuDeviceGetDefaultMemPool(pool, 0); }
API CUresult cuMemPoolGetAttribute(CUmemoryPool, CUmemPool_attribute, void* value) {
  *(cuuint64_t*)value = 0;
  return CUDA_SUCCESS;
}
API CUresult cuMemFreeAsync(CUdeviceptr p, CUstream) { return (CUresult)cudaFree((void*)p); }
API CUresult cuMemGetAddressRange_v2(CUdeviceptr* b, size_t* n, CUdeviceptr p) {
  LOCK;
  State& s = S();
  auto it = s.live.upper_bound((u64)p);
  if (it == s.live.begin()) return CUDA_ERROR_NOT_FOUND;
  --it;
  if ((u64)p >= it->first + it->second) return CUDA_ERROR_NOT_FOUND;
  if (b) *b = it->first;
  if (n) *n = s.req[it->first];
  return CUDA_SUCCESS;
}
API CUresult cuMemcpyHtoD_v2(CUdeviceptr d, const void* s, size_t n) {
  return (CUresult)cudaMemcpy((void*)d, s, n, cudaMemcpyDefault);
}
API CUresult cuMemcpyDtoH_v2(void* d, CUdeviceptr s, size_t n) {
  return (CUresult)cudaMemcpy(d, (void*)s, n, cudaMemcpyDefault);
}
API CUresult cuMemcpyDtoD_v2(CUdeviceptr d, CUdeviceptr s, size_t n) {
  return (CUresult)cudaMemcpy((void*)d, (void*)s, n, cudaMemcpyDefault);
}
API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr d, const void* s, size_t n, CUstream) { return cuMemcpyHtoD_v2(d, s, n); }
API CUresult cuMemcpyDtoHAsync_v2(void* d, CUdeviceptr s, size_t n, CUstream) { return cuMemcpyDtoH_v2(d, s, n); }
API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr d, CUdeviceptr s, size_t n, CUstream) { return cuMemcpyDtoD_v2(d, s, n); }
API CUresult cuMemcpyAsync(CUdeviceptr d, CUdeviceptr s, size_t n, CUstream) { return cuMemcpyDtoD_v2(d, s, n); }

// --- streams and the card ---------------------------------------------------------------------------------------------

API CUresult cuLaunchHostFunc(CUstream, CUhostFn f, void* d) {
  f(d);
  return CUDA_SUCCESS;
}
API CUresult cuStreamAddCallback(CUstream s, CUstreamCallback f, void* d, unsigned) {
  f(s, CUDA_SUCCESS, d);
  return CUDA_SUCCESS;
}
API CUresult cuStreamCreateWithPriority(CUstream* s, unsigned, int) {
  *s = (CUstream)new_handle();
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return CUDA_SUCCESS;
}
// XLA captures into a graph of its own, and expects it back; nothing is captured.
static std::map<CUstream, CUgraph> g_captures;
API CUresult cuStreamBeginCaptureToGraph(CUstream s, CUgraph g, const CUgraphNode*, const CUgraphEdgeData*, size_t,
                                         CUstreamCaptureMode) {
  LOCK;
  g_captures[s] = g;
  return CUDA_SUCCESS;
}
API CUresult cuStreamEndCapture(CUstream s, CUgraph* g) {
  LOCK;
  *g = g_captures[s];
  g_captures.erase(s);
  return CUDA_SUCCESS;
}
API CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus* c) {
  LOCK;
  *c = g_captures.count(s) ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
// All times are equal: which of several algorithms would be the fastest is not known here.
#undef cuEventElapsedTime  // CUDA 13's header makes it the other name of the second version
API CUresult cuEventElapsedTime(float* ms, CUevent, CUevent) {
  *ms = 0.01f;
  return CUDA_SUCCESS;
}
API CUresult cuEventElapsedTime_v2(float* ms, CUevent, CUevent) {
  *ms = 0.01f;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetProperties(CUdevprop* p, CUdevice) {
  memset(p, 0, sizeof *p);
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->sharedMemPerBlock = 49152;
  p->totalConstantMemory = 65536;
  p->SIMDWidth = 32;
  p->memPitch = 2147483647;
  p->regsPerBlock = 65536;
  p->clockRate = 1980000;
  p->textureAlign = 512;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceCanAccessPeer(int* can, CUdevice, CUdevice) {
  *can = 0;
  return CUDA_SUCCESS;
}

// --- XLA: modules that ptxas made, kernels found by symbol, command buffers as graphs of the driver ---------------------

API CUresult cuModuleLoadFatBinary(CUmodule* m, const void*) {
  *m = (CUmodule)0xb000;
  return CUDA_SUCCESS;
}
API cudaError_t cudaGetFuncBySymbol(cudaFunction_t* f, const void*) {
  *f = (cudaFunction_t)0xb100;
  return cudaSuccess;
}
API CUresult cuFuncGetModule(CUmodule* m, CUfunction) {
  *m = (CUmodule)0xb000;
  return CUDA_SUCCESS;
}
API CUresult cuGraphCreate(CUgraph* g, unsigned) {
  *g = (CUgraph)new_handle();
  return CUDA_SUCCESS;
}
API CUresult cuGraphInstantiateWithFlags(CUgraphExec* x, CUgraph, unsigned long long) {
  *x = (CUgraphExec)new_handle();
  return CUDA_SUCCESS;
}
// Every cuGraphAdd...Node hands back its node by the first argument.
#define NODE(fn)                                                                \
  extern "C" __attribute__((visibility("default"))) int fn##_made(CUgraphNode*) __asm__(#fn); \
  int fn##_made(CUgraphNode* n) {                                               \
    *n = (CUgraphNode)new_handle();                                             \
    return 0;                                                                   \
  }
#undef cuGraphAddKernelNode
NODE(cuGraphAddKernelNode_v2)
NODE(cuGraphAddMemcpyNode)
NODE(cuGraphAddMemsetNode)
NODE(cuGraphAddChildGraphNode)
NODE(cuGraphAddEmptyNode)
NODE(cuGraphAddNode_v2)
NODE(cuGraphAddHostNode)
API CUresult cuGraphLaunch(CUgraphExec, CUstream) {
  g_memsets++;
  return CUDA_SUCCESS;
}
