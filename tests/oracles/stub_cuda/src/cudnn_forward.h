// Functions of cuDNN that run on the host alone: handed to the real library where it plans, else answered here.
#pragma once

#include "stub.h"

void* real_sym(const char* name);  // of the real cuDNN; null where it does not plan
void real_failed(const char* name, long status);
typedef long (*gen_t)(long, long, long, long, long, long, long, long, long, long, long, long, long, long, long, long);

#define FWD(fn, FALLBACK)                                                                                             \
  extern "C" __attribute__((visibility("default"))) long fn##_f(long a, long b, long c, long d, long e, long f,       \
                                                                long g, long h, long i, long j, long k, long l,       \
                                                                long m, long n, long o, long p) __asm__(#fn);         \
  long fn##_f(long a, long b, long c, long d, long e, long f, long g, long h, long i, long j, long k, long l, long m, \
              long n, long o, long p) {                                                                               \
    static gen_t r = (gen_t)real_sym(#fn);                                                                            \
    if (r) {                                                                                                          \
      long st = (int)r(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p);                                               \
      if (st) real_failed(#fn, st);                                                                                   \
      return st;                                                                                                      \
    }                                                                                                                 \
    FALLBACK;                                                                                                         \
    return 0;                                                                                                         \
  }
