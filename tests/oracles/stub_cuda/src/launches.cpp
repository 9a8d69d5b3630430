// The runtime's modules and launches: kernels do nothing and are counted.
#include "stub.h"

API void** __cudaRegisterFatBinary(void*) {
  static void* h[4];
  return h;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API char __cudaInitModule(void**) { return 1; }
struct Cfg {
  dim3 g, b;
  size_t sm;
  cudaStream_t s;
};
static thread_local std::vector<Cfg>* t_cfg = 0;
API unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t sm, cudaStream_t s) {
  if (!t_cfg) t_cfg = new std::vector<Cfg>;
  t_cfg->push_back({g, b, sm, s});
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* g, dim3* b, size_t* sm, void* s) {
  if (!t_cfg || t_cfg->empty()) return err(cudaErrorMissingConfiguration);
  Cfg c = t_cfg->back();
  t_cfg->pop_back();
  *g = c.g;
  *b = c.b;
  *sm = c.sm;
  *(cudaStream_t*)s = c.s;
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* k, const void* f) {
  *k = (cudaKernel_t)f;
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  S().n_launch++;
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  S().n_launch++;
  return cudaSuccess;
}
API cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  S().n_launch++;
  return cudaSuccess;
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
  S().n_launch++;
  return cudaSuccess;
}
API cudaError_t cudaLaunchCooperativeKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  S().n_launch++;
  return cudaSuccess;
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  // The newest architecture not above the card's that PyTorch's wheel holds code for: CUB looks its policy up by it and
  // fails for one that was not compiled (8.9 runs the code of 8.6).
  int compiled = 75;
  for (int x : {75, 80, 86, 90, 100, 120})
    if (x <= S().cc) compiled = x;
  a->ptxVersion = a->binaryVersion = compiled;
  a->maxDynamicSharedSizeBytes = (int)smem_optin();
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int bs, size_t, unsigned) {
  int k = bs > 0 ? 2048 / bs : 1;
  *n = k < 1 ? 1 : k > 32 ? 32 : k;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void* f, int bs, size_t sm) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, f, bs, sm, 0);
}
