// The runtime's memory calls: address space only, and zeros on the way back unless a recorder says otherwise.
#include "stub.h"

API cudaError_t cudaMalloc(void** p, size_t n) {
  LOCK;
  State& s = S();
  u64 r = (n + PAGE - 1) / PAGE * PAGE;
  if (!r) {
    *p = 0;
    return cudaSuccess;
  }
  if (!take_phys(r)) {
    s.logf("cudaMalloc %zu OOM used=%llu", n, (unsigned long long)s.used);
    *p = 0;
    return err(cudaErrorMemoryAllocation);
  }
  u64 a = va_take(r);
  s.live[a] = r;
  s.req[a] = n;
  *p = (void*)a;
  s.n_malloc++;
  s.logf("cudaMalloc %zu -> +%llu used=%llu", n, (unsigned long long)(a - (u64)s.base), (unsigned long long)s.used);
  return cudaSuccess;
}
API cudaError_t cudaFree(void* p) {
  LOCK;
  State& s = S();
  if (!p) return cudaSuccess;
  auto it = s.live.find((u64)p);
  if (it == s.live.end()) {
    s.logf("cudaFree BAD %p", p);
    return err(cudaErrorInvalidValue);
  }
  s.used -= it->second;
  va_give(it->first, it->second);
  s.n_free++;
  s.logf("cudaFree +%llu size=%llu used=%llu", (unsigned long long)(it->first - (u64)s.base),
         (unsigned long long)it->second, (unsigned long long)s.used);
  s.live.erase(it);
  s.req.erase((u64)p);
  return cudaSuccess;
}
API cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t) { return cudaMalloc(p, n); }
API cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }
API cudaError_t cudaMallocManaged(void** p, size_t n, unsigned) { return cudaMalloc(p, n); }
API cudaError_t cudaMemGetInfo(size_t* f, size_t* t) {
  LOCK;
  State& s = S();
  u64 u = s.used + s.other;
  *f = u > s.total ? 0 : s.total - u;
  *t = s.total;
  s.logf("cudaMemGetInfo free=%zu", *f);
  return cudaSuccess;
}
API cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) {
  *p = 0;
  if (posix_memalign(p, 4096, n ? n : 1)) return err(cudaErrorMemoryAllocation);
  LOCK;
  S().pinned[(u64)*p] = n;
  return cudaSuccess;
}
API cudaError_t cudaMallocHost(void** p, size_t n) { return cudaHostAlloc(p, n, 0); }
API cudaError_t cudaFreeHost(void* p) {
  {
    LOCK;
    S().pinned.erase((u64)p);
  }
  free(p);
  return cudaSuccess;
}
API cudaError_t cudaHostRegister(void* p, size_t n, unsigned) {
  LOCK;
  S().pinned[(u64)p] = n;
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* p) {
  LOCK;
  S().pinned.erase((u64)p);
  return cudaSuccess;
}
API cudaError_t cudaHostGetDevicePointer(void** d, void* h, unsigned) {
  *d = h;
  return cudaSuccess;
}

// What is read back from the card is zeros, unless a recorder (true_values.py) has said which bytes the next copies of
// exactly that size give: first in, first out.
static std::vector<std::string> g_prime;
static u64 g_d2h_true = 0, g_d2h_zero = 0;
API void fake_cuda_prime(const void* p, size_t n) {
  LOCK;
  g_prime.emplace_back((const char*)p, n);
}
API unsigned long long fake_cuda_prime_clear() {
  LOCK;
  u64 n = g_prime.size();
  g_prime.clear();
  return n;
}  // how many were not taken
API unsigned long long fake_cuda_d2h_true() {
  LOCK;
  return g_d2h_true;
}
API unsigned long long fake_cuda_d2h_zero() {
  LOCK;
  return g_d2h_zero;
}
// With FAKE_CUDA_SENT=1 a small copy to the device is remembered until the next kernel or memset (either might write
// there): what sends and reads back with nothing between (DDP's bucket indices) gets its own bytes.
static bool keeps_sent() {
  static bool on = envu("FAKE_CUDA_SENT", 0);
  return on;
}
static const size_t SENT_MAX = 65536;  // bytes of one copy
static std::map<u64, std::string> g_sent;
static u64 g_sent_at = 0;
static void forget_overwritten() {
  u64 t = S().n_launch + g_memsets + fake_stub_calls;
  if (t != g_sent_at) {
    g_sent.clear();
    g_sent_at = t;
  }
}
static void remember(u64 d, const void* s, size_t n) {
  LOCK;
  forget_overwritten();
  std::string bytes;
  bool known = n <= SENT_MAX;
  if (known && is_dev(s)) {
    auto it = g_sent.find((u64)s);
    known = it != g_sent.end() && it->second.size() >= n;
    if (known) bytes = it->second.substr(0, n);
  } else if (known) bytes.assign((const char*)s, n);
  for (auto it = g_sent.lower_bound(d > SENT_MAX ? d - SENT_MAX : 0); it != g_sent.end() && it->first < d + n;)
    if (it->first + it->second.size() > d) it = g_sent.erase(it);
    else ++it;
  if (known && g_sent.size() < 4096) g_sent[d] = bytes;
}
static void read_back(void* d, const void* s, size_t n) {
  LOCK;
  if (!g_prime.empty() && g_prime.front().size() == n) {
    memcpy(d, g_prime.front().data(), n);
    g_prime.erase(g_prime.begin());
    g_d2h_true++;
    S().logf("D2H %zu true", n);
    return;
  }
  if (keeps_sent()) {
    forget_overwritten();
    auto it = g_sent.find((u64)s);
    if (it != g_sent.end() && it->second.size() >= n) {
      memcpy(d, it->second.data(), n);
      g_d2h_true++;
      S().logf("D2H %zu sent", n);
      return;
    }
  }
  memset(d, 0, n);
  g_d2h_zero++;
  S().logf("D2H %zu zeros", n);
}
static void copy(void* d, const void* s, size_t n) {
  if (is_dev(d)) {
    if (keeps_sent()) remember((u64)d, s, n);
  } else if (is_dev(s)) read_back(d, s, n);
  else memcpy(d, s, n);
}
API cudaError_t cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind) {
  copy(d, s, n);
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind, cudaStream_t) {
  copy(d, s, n);
  return cudaSuccess;
}
API cudaError_t cudaMemcpyPeerAsync(void*, int, const void*, int, size_t, cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
API cudaError_t cudaMemcpyFromSymbol(void* d, const void*, size_t n, size_t, cudaMemcpyKind) {
  memset(d, 0, n);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy2DAsync(void* d, size_t dp, const void* s, size_t sp, size_t w, size_t h, cudaMemcpyKind,
                                  cudaStream_t) {
  for (size_t i = 0; i < h; i++) copy((char*)d + i * dp, (const char*)s + i * sp, w);
  return cudaSuccess;
}
API cudaError_t cudaMemset(void*, int, size_t) {
  g_memsets++;
  return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) {
  g_memsets++;
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  LOCK;
  memset(a, 0, sizeof *a);
  State& s = S();
  if (is_dev(p)) {
    a->type = cudaMemoryTypeDevice;
    a->devicePointer = (void*)p;
    return cudaSuccess;
  }
  auto it = s.pinned.upper_bound((u64)p);
  if (it != s.pinned.begin()) {
    --it;
    if ((u64)p < it->first + it->second) {
      a->type = cudaMemoryTypeHost;
      a->hostPointer = (void*)p;
      a->devicePointer = (void*)p;
      return cudaSuccess;
    }
  }
  a->type = cudaMemoryTypeUnregistered;
  a->device = -2;
  a->hostPointer = (void*)p;
  return cudaSuccess;
}
API cudaError_t cudaGetSymbolAddress(void** p, const void*) {
  *p = S().vbase + (S().vspan - (1ull << 30));
  return cudaSuccess;
}
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* v) {
  *(u64*)v = 0;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* m, int) {
  *m = (cudaMemPool_t)0x77;
  return cudaSuccess;
}
