// cuSPARSE: the real library makes a context of its own at its first call, with tables of the driver that the stub does
// not have. Products ask for no buffer here: what a card gives them is not known (README.md).
#include "stub.h"

typedef int cusparseStatus_t;
typedef void* opaque;

API cusparseStatus_t cusparseCreate(opaque* handle) {
  *handle = (opaque)new_handle();
  return 0;
}
API cusparseStatus_t cusparseSpMM_bufferSize(opaque, int, int, const void*, opaque, opaque, const void*, opaque, int, int,
                                             size_t* bytes) {
  *bytes = 0;
  return 0;
}
API cusparseStatus_t cusparseSpMV_bufferSize(opaque, int, const void*, opaque, opaque, const void*, opaque, int, int,
                                             size_t* bytes) {
  *bytes = 0;
  return 0;
}
API cusparseStatus_t cusparseSDDMM_bufferSize(opaque, int, int, const void*, opaque, opaque, const void*, opaque, int, int,
                                              size_t* bytes) {
  *bytes = 0;
  return 0;
}
