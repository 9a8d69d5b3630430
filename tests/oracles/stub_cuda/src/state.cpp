// The pretend card: what it holds, where the next address is, and what scripts ask of it (ctypes).
#include "stub.h"

std::recursive_mutex g_mu;
std::atomic<u64> g_memsets{0};
extern "C" {
__attribute__((visibility("hidden"))) volatile unsigned long fake_stub_calls = 0;
}

State& S() {
  static State* s = new State;
  return *s;
}

extern "C" __attribute__((visibility("hidden"))) void fake_stub_called(const char* name) {
  LOCK;
  if (S().stublog) {
    fprintf(S().stublog, "%s\n", name);
    fflush(S().stublog);
  }
}

bool is_dev(const void* p) {
  u64 a = (u64)p;
  State& s = S();
  return (a >= (u64)s.base && a < (u64)s.base + s.span) || (a >= (u64)s.vbase && a < (u64)s.vbase + s.vspan);
}

u64 va_take(u64 n) {
  State& s = S();
  if (s.va_mode == 2) {
    for (auto it = s.holes.rbegin(); it != s.holes.rend(); ++it)
      if (it->second >= n) {
        u64 a = it->first, z = it->second;
        u64 r = a + z - n;
        if (z == n) s.holes.erase(a);
        else s.holes[a] = z - n;
        return r;
      }
  } else if (s.va_mode == 1) {
    auto it = std::prev(s.holes.end());
    u64 a = it->first, z = it->second;
    s.holes.erase(it);
    s.holes[a + n] = z - n;
    return a;
  } else
    for (auto it = s.holes.begin(); it != s.holes.end(); ++it)
      if (it->second >= n) {
        u64 a = it->first, z = it->second;
        s.holes.erase(it);
        if (z > n) s.holes[a + n] = z - n;
        return a;
      }
  return 0;
}
void va_give(u64 a, u64 n) {
  State& s = S();
  if (s.va_mode == 1) return;
  auto it = s.holes.lower_bound(a);
  if (it != s.holes.end() && a + n == it->first) {
    n += it->second;
    it = s.holes.erase(it);
  }
  if (it != s.holes.begin()) {
    auto p = std::prev(it);
    if (p->first + p->second == a) {
      p->second += n;
      return;
    }
  }
  s.holes[a] = n;
}

bool take_phys(u64 n) {
  State& s = S();
  if (s.used + s.other + n > s.total) return false;
  s.used += n;
  if (s.used > s.peak) s.peak = s.used;
  return true;
}

static std::atomic<u64> g_handle{0x5000000};
u64 new_handle() { return g_handle += 64; }

// ---- for scripts
API unsigned long long fake_cuda_used() {
  LOCK;
  return S().used;
}
API unsigned long long fake_cuda_peak() {
  LOCK;
  return S().peak;
}
API void fake_cuda_reset_peak() {
  LOCK;
  S().peak = S().used;
}
API unsigned long long fake_cuda_base() { return (u64)S().base; }
API unsigned long long fake_cuda_vbase() { return (u64)S().vbase; }
API unsigned long long fake_cuda_mallocs() {
  LOCK;
  return S().n_malloc;
}
API unsigned long long fake_cuda_frees() {
  LOCK;
  return S().n_free;
}
API unsigned long long fake_cuda_launches() { return S().n_launch; }
API void fake_cuda_set_other(unsigned long long b) {
  LOCK;
  S().other = b;
}
API void fake_cuda_set_event_lag(unsigned long long n) {
  LOCK;
  S().lag = n;
}
