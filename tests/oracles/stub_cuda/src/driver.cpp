// The driver: virtual memory (expandable segments), and what Triton, vLLM and cuDNN's compiled engines look up.
#include "stub.h"

static CUresult CUDAAPI generic_ok() { return CUDA_SUCCESS; }
static void* driver_sym(const char* name) {
  static void* self = 0;
  if (!self) {
    Dl_info di;
    dladdr((void*)&cudaMalloc, &di);
    self = dlopen(di.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }
  std::string n(name);
  for (const char* suf : {"_v3", "_v2", ""})
    if (void* p = dlsym(self ? self : RTLD_DEFAULT, (n + suf).c_str())) return p;
  fake_stub_called((std::string("driver:") + name).c_str());
  return (void*)generic_ok;
}
API cudaError_t cudaGetDriverEntryPointByVersion(const char* sym, void** fp, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* st) {
  *fp = driver_sym(sym);
  if (st) *st = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
API cudaError_t cudaGetDriverEntryPoint(const char* sym, void** fp, unsigned long long,
                                        cudaDriverEntryPointQueryResult* st) {
  *fp = driver_sym(sym);
  if (st) *st = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int* v) {
  *v = 13000;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGet(CUdevice* d, int) {
  *d = 0;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetCount(int* n) {
  *n = 1;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetName(char* s, int n, CUdevice) {
  const char* name = getenv("FAKE_CUDA_NAME");
  snprintf(s, n, "%s", name && *name ? name : "FakeCUDA");
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* f, int* a) {
  *f = 0;
  *a = 1;
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice) {
  *c = (CUcontext)0x9000;
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext* c) {
  *c = (CUcontext)0x9000;
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetDevice(CUdevice* d) {
  *d = 0;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int* v, CUdevice_attribute a, CUdevice) {
  if (a == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) *v = 1;
  else if (a == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED || a == CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED)
    *v = 0;
  else if (a == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) *v = 0;
  else *v = devattr((int)a);
  return CUDA_SUCCESS;
}
API CUresult cuGetErrorString(CUresult e, const char** s) {
  *s = e == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : e ? "fake driver error" : "no error";
  return CUDA_SUCCESS;
}
API CUresult cuGetErrorName(CUresult e, const char** s) {
  *s = e == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE";
  return CUDA_SUCCESS;
}
API CUresult cuMemGetAllocationGranularity(size_t* g, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *g = PAGE;
  return CUDA_SUCCESS;
}
API CUresult cuMemAddressReserve(CUdeviceptr* p, size_t n, size_t, CUdeviceptr, unsigned long long) {
  LOCK;
  State& s = S();
  u64 r = (n + PAGE - 1) / PAGE * PAGE;
  if (s.vnext + r + (1ull << 31) > s.vspan) return CUDA_ERROR_OUT_OF_MEMORY;
  u64 a = (u64)s.vbase + s.vnext;
  s.vnext += r;
  s.resv[a] = r;
  *p = a;
  s.logf("cuMemAddressReserve %zu -> v+%llu", n, (unsigned long long)(a - (u64)s.vbase));
  return CUDA_SUCCESS;
}
API CUresult cuMemAddressFree(CUdeviceptr p, size_t n) {
  LOCK;
  S().resv.erase(p);
  S().logf("cuMemAddressFree %zu", n);
  return CUDA_SUCCESS;
}
API CUresult cuMemCreate(CUmemGenericAllocationHandle* h, size_t n, const CUmemAllocationProp*, unsigned long long) {
  LOCK;
  State& s = S();
  if (n % PAGE) return CUDA_ERROR_INVALID_VALUE;
  if (!take_phys(n)) {
    s.logf("cuMemCreate %zu OOM used=%llu", n, (unsigned long long)s.used);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *h = s.next_handle++;
  s.handles[*h] = n;
  s.hrefs[*h] = 1;
  s.n_malloc++;
  s.logf("cuMemCreate %zu used=%llu", n, (unsigned long long)s.used);
  return CUDA_SUCCESS;
}
static void unref(u64 h) {
  State& s = S();
  if (--s.hrefs[h] == 0) {
    s.used -= s.handles[h];
    s.handles.erase(h);
    s.hrefs.erase(h);
    s.n_free++;
    s.logf("  handle freed used=%llu", (unsigned long long)s.used);
  }
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle h) {
  LOCK;
  State& s = S();
  if (!s.handles.count(h)) return CUDA_ERROR_INVALID_VALUE;
  s.logf("cuMemRelease");
  unref(h);
  return CUDA_SUCCESS;
}
API CUresult cuMemMap(CUdeviceptr p, size_t n, size_t, CUmemGenericAllocationHandle h, unsigned long long) {
  LOCK;
  State& s = S();
  if (!s.handles.count(h) || s.maps.count(p)) return CUDA_ERROR_INVALID_VALUE;
  s.maps[p] = {n, h};
  s.hrefs[h]++;
  s.logf("cuMemMap v+%llu %zu", (unsigned long long)(p - (u64)s.vbase), n);
  return CUDA_SUCCESS;
}
API CUresult cuMemUnmap(CUdeviceptr p, size_t n) {
  LOCK;
  State& s = S();
  s.logf("cuMemUnmap v+%llu %zu", (unsigned long long)(p - (u64)s.vbase), n);
  for (auto it = s.maps.lower_bound(p); it != s.maps.end() && it->first < p + n;) {
    u64 h = it->second.second;
    it = s.maps.erase(it);
    unref(h);
  }
  return CUDA_SUCCESS;
}
API CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
API CUresult cuPointerGetAttribute(void* d, CUpointer_attribute a, CUdeviceptr p) {
  if (a == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int*)d = 0;
  else if (a == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(u64*)d = (u64)p;
  else if (a == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) *(int*)d = is_dev((void*)p) ? 2 : 1;
  else if (a == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR) {
    LOCK;
    State& s = S();
    *(u64*)d = 0;
    auto it = s.live.upper_bound((u64)p);
    if (it != s.live.begin()) {
      --it;
      if ((u64)p < it->first + it->second) *(u64*)d = it->first;
    }
  } else *(u64*)d = 0;
  return CUDA_SUCCESS;
}
API CUresult cuGetProcAddress_v2(const char* n, void** f, int, cuuint64_t, CUdriverProcAddressQueryResult* st) {
  *f = driver_sym(n);
  if (st) *st = CU_GET_PROC_ADDRESS_SUCCESS;
  return CUDA_SUCCESS;
}
API CUresult cuModuleLoadData(CUmodule* m, const void*) {
  *m = (CUmodule)0xb000;
  return CUDA_SUCCESS;
}
API CUresult cuModuleLoadDataEx(CUmodule* m, const void*, unsigned, CUjit_option*, void**) {
  *m = (CUmodule)0xb000;
  return CUDA_SUCCESS;
}
API CUresult cuModuleGetFunction(CUfunction* f, CUmodule, const char*) {
  *f = (CUfunction)0xb100;
  return CUDA_SUCCESS;
}
API CUresult cuFuncGetAttribute(int* v, CUfunction_attribute a, CUfunction) {
  *v = a == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
API CUresult cuKernelGetFunction(CUfunction* f, CUkernel) {
  *f = (CUfunction)0xb100;
  return CUDA_SUCCESS;
}
API CUresult cuLibraryGetModule(CUmodule* m, CUlibrary) {
  *m = (CUmodule)0xb000;
  return CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxActiveClusters(int* n, CUfunction, const CUlaunchConfig*) {
  *n = S().sms;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceTotalMem_v2(size_t* n, CUdevice) {
  *n = S().total;
  return CUDA_SUCCESS;
}
API CUresult cuMemGetInfo_v2(size_t* f, size_t* t) { return (CUresult)cudaMemGetInfo(f, t); }
API CUresult cuDeviceGetUuid_v2(CUuuid* u, CUdevice) {
  memset(u, 0, sizeof *u);
  return CUDA_SUCCESS;
}
API CUresult cuDeviceComputeCapability(int* a, int* b, CUdevice) {
  *a = S().cc / 10;
  *b = S().cc % 10;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetPCIBusId(char* s, int n, CUdevice) {
  snprintf(s, n, "0000:01:00.0");
  return CUDA_SUCCESS;
}
API CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                            void**, void**) {
  S().n_launch++;
  return CUDA_SUCCESS;
}
API CUresult cuLaunchKernelEx(const CUlaunchConfig*, CUfunction, void**, void**) {
  S().n_launch++;
  return CUDA_SUCCESS;
}
API CUresult cuMemAlloc_v2(CUdeviceptr* p, size_t n) { return (CUresult)cudaMalloc((void**)p, n); }
API CUresult cuMemFree_v2(CUdeviceptr p) { return (CUresult)cudaFree((void*)p); }
API CUresult cuStreamCreate(CUstream* s, unsigned) {
  *s = (CUstream)new_handle();
  return CUDA_SUCCESS;
}
API CUresult cuEventCreate(CUevent* e, unsigned) {
  *e = (CUevent)new_handle();
  return CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, CUfunction, int bs, size_t) {
  int k = bs > 0 ? 2048 / bs : 1;
  *n = k < 1 ? 1 : k;
  return CUDA_SUCCESS;
}

// nvrtc asks for one table and skips it when the first word (its size) is small; the static cudart
// inside cuDNN must not get one (it would call through it), so that it gives up with "no driver".
API CUresult cuGetExportTable(const void** t, const CUuuid*) {
  Dl_info di;
  static u64 tab[16] = {8};
  *t = 0;
  if (dladdr(__builtin_return_address(0), &di) && di.dli_fname && strstr(di.dli_fname, "nvrtc")) {
    *t = tab;
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_NOT_FOUND;
}
API CUresult cuLibraryLoadData(CUlibrary* l, const void*, CUjit_option*, void**, unsigned, CUlibraryOption*, void**,
                               unsigned) {
  *l = (CUlibrary)0xa000;
  return CUDA_SUCCESS;
}
API CUresult cuLibraryLoadFromFile(CUlibrary* l, const char*, CUjit_option*, void**, unsigned, CUlibraryOption*, void**,
                                   unsigned) {
  *l = (CUlibrary)0xa000;
  return CUDA_SUCCESS;
}
API CUresult cuLibraryGetKernel(CUkernel* k, CUlibrary, const char*) {
  *k = (CUkernel)0xa100;
  return CUDA_SUCCESS;
}
API CUresult cuKernelGetAttribute(int* v, CUfunction_attribute, CUkernel, CUdevice) {
  *v = 0;
  return CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxPotentialClusterSize(int* n, CUfunction, const CUlaunchConfig*) {
  *n = 8;
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetLimit(size_t* v, CUlimit) {
  *v = 1024;
  return CUDA_SUCCESS;
}
API CUresult cuStreamGetCtx(CUstream, CUcontext* c) {
  *c = (CUcontext)0x9000;
  return CUDA_SUCCESS;
}
API CUresult cuLinkCreate(unsigned, CUjit_option*, void**, CUlinkState* s) {
  *s = (CUlinkState)0xa200;
  return CUDA_SUCCESS;
}
// The constants of a module: addresses that nobody else has, and no memory of the card. XLA writes to them.
API CUresult cuModuleGetGlobal(CUdeviceptr* p, size_t* n, CUmodule, const char*) {
  if (p) *p = (CUdeviceptr)(S().vbase + S().vspan - 1024 * PAGE);
  if (n) *n = 1024 * PAGE;
  return CUDA_SUCCESS;
}
