// cuDNN: descriptors that remember, plans of no (or given) workspace; or the real library planning without a card.
#include "cudnn_forward.h"

#include <cudnn.h>
#include <algorithm>

#if CUDNN_VERSION < 90800  // headers that do not know planning without a device: PyTorch 2.6 and older
constexpr auto CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR = (cudnnBackendDescriptorType_t)38;
constexpr auto CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION = (cudnnBackendAttributeName_t)2702;
constexpr auto CUDNN_ATTR_ENGINEHEUR_DEVICEPROP = (cudnnBackendAttributeName_t)204;
constexpr auto CUDNN_ATTR_ENGINE_DEVICEPROP = (cudnnBackendAttributeName_t)1307;
constexpr auto CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP = (cudnnBackendAttributeName_t)407;
#endif

static u64 dnn_ws() {
  static u64 v = envu("FAKE_CUDNN_WS", 0);
  return v;
}
static u64 dnn_rs() {
  static u64 v = envu("FAKE_CUDNN_RESERVE", 0);
  return v;
}
#define OK CUDNN_STATUS_SUCCESS
// Real mode (FAKE_CUDNN_REAL=1): the calls go to the real cuDNN, which plans without a device: a
// device-property descriptor (JSON, FAKE_CUDNN_DEVPROP=file) takes the handle's place, so the real
// heuristics choose the real plan and tell its real workspace size. Execution stays a no-op.
struct Real {
  bool on = false;
  void* h = 0;
  cudnnStatus_t (*create)(cudnnBackendDescriptorType_t, cudnnBackendDescriptor_t*);
  cudnnStatus_t (*destroy)(cudnnBackendDescriptor_t);
  cudnnStatus_t (*fin)(cudnnBackendDescriptor_t);
  cudnnStatus_t (*set)(cudnnBackendDescriptor_t, cudnnBackendAttributeName_t, cudnnBackendAttributeType_t, int64_t,
                       const void*);
  cudnnStatus_t (*get)(cudnnBackendDescriptor_t, cudnnBackendAttributeName_t, cudnnBackendAttributeType_t, int64_t,
                       int64_t*, void*);
  void (*last)(char*, size_t);
  cudnnBackendDescriptor_t prop = 0;
  std::map<void*, int> types;
};
static Real& R() {
  static Real* r = 0;
  LOCK;
  if (r) return *r;
  r = new Real;
  if (!envu("FAKE_CUDNN_REAL", 0)) return *r;
  const char* path = getenv("FAKE_CUDNN_PATH");
  r->h = path && *path ? dlopen(path, RTLD_NOW) : dlopen("libcudnn.so.9", RTLD_NOW | RTLD_NOLOAD);
  if (!r->h) {
    fprintf(stderr, "fakecuda: real cuDNN not loaded\n");
    return *r;
  }
  *(void**)&r->create = dlsym(r->h, "cudnnBackendCreateDescriptor");
  *(void**)&r->destroy = dlsym(r->h, "cudnnBackendDestroyDescriptor");
  *(void**)&r->fin = dlsym(r->h, "cudnnBackendFinalize");
  *(void**)&r->set = dlsym(r->h, "cudnnBackendSetAttribute");
  *(void**)&r->get = dlsym(r->h, "cudnnBackendGetAttribute");
  *(void**)&r->last = dlsym(r->h, "cudnnGetLastErrorString");
  std::string js;
  const char* f = getenv("FAKE_CUDNN_DEVPROP");
  if (FILE* fp = f && *f ? fopen(f, "r") : 0) {
    char buf[4096];
    size_t k = fread(buf, 1, sizeof buf, fp);
    js.assign(buf, k);
    fclose(fp);
    while (!js.empty() && js.back() != '}') js.pop_back();
  } else {
    char buf[2048];
    State& s = S();
    snprintf(buf, sizeof buf,
             "{\"maxGridSize\":[2147483647,65535,65535],\"maxBlockSize\":[1024,1024,64],\"regsPerBlock\":65536,"
             "\"multiProcessorCount\":%d,\"warpSize\":32,"
             "\"maxSharedMemoryPerBlock\":49152,\"maxSharedMemoryPerBlockOptin\":%llu,\"reservedSharedMemoryPerBlock\":"
             "1024,\"maxRegistersPerSM\":65536,\"maxCtasPerSM\":32,\"maxThreadsPerBlock\":1024,"
             "\"maxThreadsPerSM\":2048,\"pciDeviceId\":0,\"isTccDriver\":0,\"supportCoopLaunch\":1,\"totalGlobalMem\":%"
             "llu,\"smClockRateKHz\":1980000,\"memClockRateKHz\":2619000,\"l2CacheSize\":52428800,"
             "\"cudaDeviceId\":0,\"deviceVer\":%d,\"driverVer\":13000,\"deviceName\":\"FakeCUDA\"}",
             s.sms, (unsigned long long)smem_optin(), (unsigned long long)s.total, s.cc * 10);
    js = buf;
  }
  cudnnStatus_t st = r->create(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, &r->prop);
  if (!st)
    st = r->set(r->prop, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, (int64_t)js.size(), js.data());
  if (!st) st = r->fin(r->prop);
  if (st) {
    char m[512] = "";
    r->last(m, sizeof m);
    fprintf(stderr, "fakecuda: device property descriptor failed %d %s\n", (int)st, m);
    return *r;
  }
  r->on = true;
  return *r;
}
// In real mode the small host-only calls (descriptors, size queries) go to the real library too, with a
// made-up handle: zeros, and the words of the device's description that size queries read, in the order of cuDNN's own
// description (9.19, 9.20: +28 multiprocessors, +60 threads of each, +72 cooperative launches, +104 the device version).
// The words further on are ours.
void* real_sym(const char* n) {
  Real& r = R();
  return r.on ? dlsym(r.h, n) : 0;
}
void real_failed(const char* n, long st) {
  if (!S().log) return;
  char t[512] = "";
  R().last(t, sizeof t);
  S().logf("%s failed %ld %s", n, st, t);
}
static const int H_STREAM = 60000;
API cudnnStatus_t cudnnCreate(cudnnHandle_t* h) {
  char* p = (char*)calloc(1, 65536);
  *(int*)(p + 28) = S().sms;
  *(int*)(p + 60) = S().tpsm;
  *(int*)(p + 72) = 1;
  *(int*)(p + 104) = S().cc * 10;
  *h = (cudnnHandle_t)p;
  S().logf("cudnnCreate");
  return OK;
}
API cudnnStatus_t cudnnDestroy(cudnnHandle_t) { return OK; }
API cudnnStatus_t cudnnSetStream(cudnnHandle_t h, cudaStream_t s) {
  *(cudaStream_t*)((char*)h + H_STREAM) = s;
  return OK;
}
API cudnnStatus_t cudnnGetStream(cudnnHandle_t h, cudaStream_t* s) {
  *s = *(cudaStream_t*)((char*)h + H_STREAM);
  return OK;
}
API size_t cudnnGetVersion() { return CUDNN_VERSION; }
API size_t cudnnGetCudartVersion() { return 13000; }
API const char* cudnnGetErrorString(cudnnStatus_t s) {
  return s == OK ? "CUDNN_STATUS_SUCCESS" : "CUDNN_STATUS_FAKE_ERROR";
}
API void cudnnGetLastErrorString(char* m, size_t n) {
  if (n) m[0] = 0;
}
API cudnnStatus_t cudnnGetProperty(libraryPropertyType t, int* v) {
  *v = t == MAJOR_VERSION ? CUDNN_MAJOR : t == MINOR_VERSION ? CUDNN_MINOR : CUDNN_PATCHLEVEL;
  return OK;
}
#define MK(fn) FWD(fn, *(void**)a = calloc(1, 1024))
MK(cudnnCreateTensorDescriptor)
MK(cudnnCreateFilterDescriptor) MK(cudnnCreateConvolutionDescriptor) MK(cudnnCreateActivationDescriptor)
    MK(cudnnCreatePoolingDescriptor) MK(cudnnCreateDropoutDescriptor) MK(cudnnCreateRNNDescriptor)
        MK(cudnnCreateRNNDataDescriptor) MK(cudnnCreateSpatialTransformerDescriptor) MK(cudnnCreateCTCLossDescriptor)
            FWD(cudnnDestroyTensorDescriptor, ) FWD(cudnnDestroyFilterDescriptor, ) FWD(cudnnDestroyDropoutDescriptor, )
                FWD(cudnnDestroyRNNDescriptor, ) FWD(cudnnDestroyRNNDataDescriptor, ) FWD(cudnnSetTensorNdDescriptor, )
                    FWD(cudnnGetTensorNdDescriptor, ) FWD(cudnnSetFilterNdDescriptor, )
                        FWD(cudnnGetFilterNdDescriptor, ) FWD(cudnnSetRNNDescriptor_v8, )
                            FWD(cudnnSetRNNDataDescriptor, ) FWD(cudnnGetRNNWeightSpaceSize, *(size_t*)c = 0)
    FWD(cudnnDestroyCTCLossDescriptor, ) FWD(cudnnSetCTCLossDescriptorEx, ) FWD(cudnnSetCTCLossDescriptor_v9, )
// Where a matrix and its bias lie. The real library refuses a GRU on the made-up handle: TensorFlow, which alone asks,
// then hears of single numbers at the beginning, and reads nothing there.
typedef cudnnStatus_t (*weights_t)(cudnnHandle_t, cudnnRNNDescriptor_t, int32_t, size_t, const void*, int32_t,
                                   cudnnTensorDescriptor_t, void**, cudnnTensorDescriptor_t, void**);
typedef cudnnStatus_t (*set_nd_t)(cudnnTensorDescriptor_t, cudnnDataType_t, int, const int[], const int[]);
API cudnnStatus_t cudnnGetRNNWeightParams(cudnnHandle_t h, cudnnRNNDescriptor_t d, int32_t layer, size_t size,
                                          const void* space, int32_t id, cudnnTensorDescriptor_t matrix, void** at,
                                          cudnnTensorDescriptor_t bias, void** bias_at) {
  static weights_t r = (weights_t)real_sym("cudnnGetRNNWeightParams");
  static set_nd_t set = (set_nd_t)real_sym("cudnnSetTensorNdDescriptor");
  if (!r || r(h, d, layer, size, space, id, matrix, at, bias, bias_at) == OK) return OK;
  const int one[3] = {1, 1, 1};
  set(matrix, CUDNN_DATA_FLOAT, 3, one, one);
  set(bias, CUDNN_DATA_FLOAT, 3, one, one);
  *at = *bias_at = (void*)space;
  return OK;
}
// The real library says these sizes before it looks for its device, and then fails for want of one: the sizes are kept.
static const int NO_DEVICE = CUDNN_STATUS_EXECUTION_FAILED_CUDART;
typedef cudnnStatus_t (*spaces_t)(cudnnHandle_t, cudnnRNNDescriptor_t, cudnnForwardMode_t, cudnnRNNDataDescriptor_t,
                                  size_t*, size_t*);
API cudnnStatus_t cudnnGetRNNTempSpaceSizes(cudnnHandle_t h, cudnnRNNDescriptor_t d, cudnnForwardMode_t m,
                                            cudnnRNNDataDescriptor_t x, size_t* work, size_t* reserve) {
  static spaces_t r = (spaces_t)real_sym("cudnnGetRNNTempSpaceSizes");
  if (!r) {
    if (work) *work = dnn_ws();
    if (reserve) *reserve = dnn_rs();
    return OK;
  }
  int st = r(h, d, m, x, work, reserve);
  S().logf("cudnn recurrent spaces %zu %zu status %d", work ? *work : 0, reserve ? *reserve : 0, st);
  return st == NO_DEVICE ? OK : (cudnnStatus_t)st;
}
// The real library says nothing of these without a device: the environment gives the sizes.
API cudnnStatus_t cudnnGetCTCLossWorkspaceSize(cudnnHandle_t, cudnnTensorDescriptor_t, cudnnTensorDescriptor_t,
                                               const int*, const int*, const int*, cudnnCTCLossAlgo_t,
                                               cudnnCTCLossDescriptor_t, size_t* size) {
  *size = dnn_ws();
  return OK;
}
API cudnnStatus_t cudnnGetCTCLossWorkspaceSize_v8(cudnnHandle_t, cudnnCTCLossAlgo_t, cudnnCTCLossDescriptor_t,
                                                  cudnnTensorDescriptor_t, cudnnTensorDescriptor_t, size_t* size) {
  *size = dnn_ws();
  return OK;
}
FWD(cudnnDropoutGetStatesSize, *(size_t*)b = 0)
FWD(cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize, *(size_t*)i = dnn_ws())
FWD(cudnnGetBatchNormalizationBackwardExWorkspaceSize, *(size_t*)k = dnn_ws())
FWD(cudnnGetBatchNormalizationTrainingExReserveSpaceSize, *(size_t*)f = dnn_rs())
typedef cudnnStatus_t (*drop_t)(cudnnDropoutDescriptor_t, cudnnHandle_t, float, void*, size_t, unsigned long long);
API cudnnStatus_t cudnnSetDropoutDescriptor(cudnnDropoutDescriptor_t d, cudnnHandle_t h, float p, void* st, size_t n,
                                            unsigned long long seed) {
  drop_t r = (drop_t)real_sym(st ? "cudnnRestoreDropoutDescriptor" : "cudnnSetDropoutDescriptor");
  return r ? r(d, h, p, st, n, seed) : OK;  // Set with states would launch a kernel
}
API cudnnStatus_t cudnnRestoreDropoutDescriptor(cudnnDropoutDescriptor_t d, cudnnHandle_t h, float p, void* st,
                                                size_t n, unsigned long long seed) {
  drop_t r = (drop_t)real_sym("cudnnRestoreDropoutDescriptor");
  return r ? r(d, h, p, st, n, seed) : OK;
}

// backend (graph) API: descriptors are attribute maps; heuristics give one engine.
struct BD {
  cudnnBackendDescriptorType_t type;
  std::map<int, std::pair<int64_t, std::vector<char>>> a;
};
static size_t tsz(cudnnBackendAttributeType_t t) {
  switch (t) {
    case CUDNN_TYPE_BOOLEAN:
    case CUDNN_TYPE_CHAR:
      return 1;
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_DOUBLE:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR:
      return 8;
    case CUDNN_TYPE_FRACTION:
      return 16;
    default:
      return 4;
  }
}
static cudnnStatus_t chk(const char* what, void* d, cudnnStatus_t st) {
  if (st && S().log) {
    char m[512] = "";
    R().last(m, sizeof m);
    S().logf("cudnn %s type=%d failed %d: %s", what, R().types.count(d) ? R().types[d] : -1, (int)st, m);
  }
  return st;
}
API cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t t, cudnnBackendDescriptor_t* d) {
  Real& r = R();
  if (r.on) {
    LOCK;
    cudnnStatus_t st = r.create(t, d);
    if (!st) r.types[*d] = t;
    return chk("create", *d, st);
  }
  BD* b = new BD;
  b->type = t;
  *d = (cudnnBackendDescriptor_t)b;
  return OK;
}
API cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t d) {
  Real& r = R();
  if (r.on) {
    LOCK;
    r.types.erase(d);
    return r.destroy(d);
  }
  delete (BD*)d;
  return OK;
}
API cudnnStatus_t cudnnBackendInitialize(cudnnBackendDescriptor_t) { return OK; }
API cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t d) {
  Real& r = R();
  if (!r.on) return OK;
  LOCK;
  int t = r.types[d];
  if (t == CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)
    chk("heur devprop", d, r.set(d, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &r.prop));
  if (t == CUDNN_BACKEND_ENGINE_DESCRIPTOR)
    chk("engine devprop", d, r.set(d, CUDNN_ATTR_ENGINE_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &r.prop));
  if (t == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)
    chk("plan devprop", d, r.set(d, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &r.prop));
  return chk("finalize", d, r.fin(d));
}
API cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t n,
                                           cudnnBackendAttributeType_t t, int64_t c, const void* e) {
  Real& r = R();
  if (r.on) {
    if (n == CUDNN_ATTR_OPERATIONGRAPH_HANDLE || n == CUDNN_ATTR_EXECUTION_PLAN_HANDLE) return OK;
    return chk("set", d, r.set(d, n, t, c, e));
  }
  BD* b = (BD*)d;
  auto& x = b->a[(int)n];
  x.first = c;
  x.second.assign((const char*)e, (const char*)e + (e ? c * tsz(t) : 0));
  return OK;
}
API cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t n,
                                           cudnnBackendAttributeType_t t, int64_t want, int64_t* got, void* e) {
  Real& r = R();
  if (r.on) {
    cudnnStatus_t st = chk("get", d, r.get(d, n, t, want, got, e));
    if (n == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE && e && !st)
      S().logf("cudnn plan workspace %lld", (long long)*(int64_t*)e);
    if (n == CUDNN_ATTR_ENGINEHEUR_RESULTS) S().logf("cudnn heuristics: %lld configs", got ? (long long)*got : -1);
    return st;
  }
  BD* b = (BD*)d;
  int64_t dummy;
  if (!got) got = &dummy;
  switch ((int)n) {
    case CUDNN_ATTR_ENGINEHEUR_RESULTS:
      *got = 1;
      return OK;  // caller made the config descriptors
    case CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT:
      *got = 1;
      if (e) *(int64_t*)e = 1;
      return OK;
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE:
      *got = 1;
      if (e) *(int64_t*)e = (int64_t)dnn_ws();
      return OK;
#if CUDNN_VERSION >= 90200  // the attribute came after 9.1, which PyTorch 2.6 has
    case CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE:
      *got = 1;
      if (e) *(int64_t*)e = (int64_t)dnn_ws();
      return OK;
#endif
    case CUDNN_ATTR_ENGINECFG_ENGINE:
      *got = 1;
      return OK;
    case CUDNN_ATTR_ENGINE_GLOBAL_INDEX:
      *got = 1;
      if (e) *(int64_t*)e = 0;
      return OK;
    case CUDNN_ATTR_ENGINE_NUMERICAL_NOTE:
    case CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE:
    case CUDNN_ATTR_ENGINE_KNOB_INFO:
    case CUDNN_ATTR_ENGINECFG_KNOB_CHOICES:
      *got = 0;
      return OK;
    default:
      break;
  }
  auto it = b->a.find((int)n);
  if (it == b->a.end()) {
    *got = 0;
    if (e && want > 0 && t != CUDNN_TYPE_BACKEND_DESCRIPTOR) memset(e, 0, want * tsz(t));
    return OK;
  }
  int64_t k = it->second.first;
  *got = k;
  if (e) {
    if (k > want) k = want;
    memcpy(e, it->second.second.data(), std::min<size_t>(k * tsz(t), it->second.second.size()));
  }
  return OK;
}
API cudnnStatus_t cudnnBackendExecute(cudnnHandle_t, cudnnBackendDescriptor_t, cudnnBackendDescriptor_t) {
  g_memsets++;
  return OK;
}
