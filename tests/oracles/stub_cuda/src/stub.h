// What all files of the stub share: the state of the pretend card, its lock and its log.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))
typedef uint64_t u64;
static const u64 MIB = 1ull << 20;
static const u64 PAGE = 2 * MIB;  // what the driver hands out memory in

extern std::recursive_mutex g_mu;
#define LOCK std::lock_guard<std::recursive_mutex> _lk(g_mu)

inline u64 envu(const char* n, u64 d) {
  const char* s = getenv(n);
  return s && *s ? strtoull(s, 0, 10) : d;
}

cudaError_t err(cudaError_t e);  // remembers it for cudaGetLastError

struct State {
  u64 total, other, used = 0, peak = 0;
  int cc, sms, tpsm;
  u64 lag;
  int va_mode;
  char* base;
  u64 span;                  // cudaMalloc arena
  std::map<u64, u64> live;   // address -> rounded size
  std::map<u64, u64> req;    // address -> requested size
  std::map<u64, u64> holes;  // address -> size
  char* vbase;
  u64 vspan, vnext = 0;                     // cuMemAddressReserve arena
  std::map<u64, u64> resv;                  // reserved VA ranges
  std::map<u64, u64> handles;               // cuMemCreate handle -> size
  std::map<u64, int> hrefs;                 // handle -> references (1 creation + mappings)
  std::map<u64, std::pair<u64, u64>> maps;  // va -> (size, handle)
  u64 next_handle = 0x1000;
  std::map<u64, u64> pinned;
  FILE* log = 0;
  FILE* stublog = 0;
  u64 n_malloc = 0, n_free = 0, n_launch = 0;
  State() {
    total = envu("FAKE_CUDA_TOTAL_MIB", 81920) * MIB;
    other = envu("FAKE_CUDA_OTHER_MIB", 0) * MIB;
    cc = (int)envu("FAKE_CUDA_CC", 90);
    sms = (int)envu("FAKE_CUDA_SMS", 132);
    tpsm = (int)envu("FAKE_CUDA_TPSM", cc == 75                                            ? 1024
                                       : cc == 86 || cc == 87 || cc == 89 || cc / 10 == 12 ? 1536
                                                                                           : 2048);
    lag = envu("FAKE_CUDA_EVENT_LAG", 0);
    const char* v = getenv("FAKE_CUDA_VA");
    va_mode = !v || !*v || !strcmp(v, "firstfit") ? 0 : !strcmp(v, "bump") ? 1 : 2;
    span = 8ull << 40;
    vspan = 32ull << 40;
    base = (char*)mmap((void*)0x200000000000ull, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    vbase = (char*)mmap((void*)0x300000000000ull, vspan, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED || vbase == MAP_FAILED) {
      perror("fakecuda mmap");
      abort();
    }
    holes[(u64)base] = span;
    if (const char* f = getenv("FAKE_CUDA_LOG"))
      if (*f) log = fopen(f, "w");
    if (const char* f = getenv("FAKE_CUDA_LOG_STUBS"))
      if (*f) stublog = fopen(f, "a");
  }
  void logf(const char* fmt, ...) {
    if (!log) return;
    va_list a;
    va_start(a, fmt);
    vfprintf(log, fmt, a);
    va_end(a);
    fputc('\n', log);
    fflush(log);
  }
};

State& S();
bool is_dev(const void* p);
bool take_phys(u64 n);  // false: the card is full
u64 va_take(u64 n);     // an address for n bytes, by FAKE_CUDA_VA
void va_give(u64 a, u64 n);
u64 new_handle();  // of a stream, event, graph
int devattr(int a);
u64 smem_optin();
// Beside launches, calls that write on the device: what was sent there before is no longer known.
extern std::atomic<u64> g_memsets;
extern "C" __attribute__((visibility("hidden"))) volatile unsigned long fake_stub_calls;
extern "C" __attribute__((visibility("hidden"))) void fake_stub_called(const char* name);
