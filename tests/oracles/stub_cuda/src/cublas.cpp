// cuBLAS and cuBLASLt: handles that remember their modes, products that do nothing, no workspace of their own.
#include "stub.h"

#include <cublasLt.h>
#include <cublas_v2.h>

struct Blas {
  cublasPointerMode_t pm = CUBLAS_POINTER_MODE_HOST;
  cublasMath_t mm = CUBLAS_DEFAULT_MATH;
  cudaStream_t st = 0;
};
API cublasStatus_t cublasCreate_v2(cublasHandle_t* h) {
  *h = (cublasHandle_t) new Blas;
  S().logf("cublasCreate");
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasDestroy_v2(cublasHandle_t h) {
  delete (Blas*)h;
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasSetStream_v2(cublasHandle_t h, cudaStream_t s) {
  ((Blas*)h)->st = s;
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasGetStream_v2(cublasHandle_t h, cudaStream_t* s) {
  *s = ((Blas*)h)->st;
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void* p, size_t n) {
  S().logf("cublasSetWorkspace %p %zu", p, n);
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t m) {
  ((Blas*)h)->pm = m;
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t* m) {
  *m = ((Blas*)h)->pm;
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasSetMathMode(cublasHandle_t h, cublasMath_t m) {
  ((Blas*)h)->mm = m;
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasGetMathMode(cublasHandle_t h, cublasMath_t* m) {
  *m = ((Blas*)h)->mm;
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasGetVersion_v2(cublasHandle_t, int* v) {
  *v = CUBLAS_VERSION;
  return CUBLAS_STATUS_SUCCESS;
}
API const char* cublasGetStatusString(cublasStatus_t) { return "fake"; }

API size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
API cublasStatus_t cublasLtCreate(cublasLtHandle_t* h) {
  *h = (cublasLtHandle_t) new Blas;
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* d, cublasComputeType_t, cudaDataType_t) {
  *d = (cublasLtMatmulDesc_t)calloc(1, 256);
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) {
  free(d);
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, const void*,
                                                  size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* l, cudaDataType, uint64_t, uint64_t, int64_t) {
  *l = (cublasLtMatrixLayout_t)calloc(1, 256);
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) {
  free(l);
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t, cublasLtMatrixLayoutAttribute_t,
                                                    const void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* p) {
  *p = (cublasLtMatmulPreference_t)calloc(1, 256);
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) {
  free(p);
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                                        cublasLtMatmulPreferenceAttributes_t a, const void* b, size_t) {
  if (a == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) S().logf("cublasLt max workspace pref %zu", *(const size_t*)b);
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                                  cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                                  cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int n,
                                                  cublasLtMatmulHeuristicResult_t r[], int* cnt) {
  if (n > 0) {
    memset(&r[0], 0, sizeof r[0]);
    r[0].state = CUBLAS_STATUS_SUCCESS;
    r[0].workspaceSize = 0;
    *cnt = 1;
  } else *cnt = 0;
  return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t, const void*, const void*,
                                  cublasLtMatrixLayout_t, const void*, cublasLtMatrixLayout_t, const void*, const void*,
                                  cublasLtMatrixLayout_t, void*, cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t*,
                                  void* ws, size_t n, cudaStream_t) {
  g_memsets++;
  S().logf("cublasLtMatmul ws=%p %zu", ws, n);
  return CUBLAS_STATUS_SUCCESS;
}
