// Streams, events, and stream capture into graphs that hold nothing.
#include "stub.h"

struct Ev {
  u64 left;
  bool recorded;
  timespec t;
  u64 capture;
  cudaStream_t origin;
};
API cudaError_t cudaStreamCreate(cudaStream_t* s) {
  *s = (cudaStream_t)new_handle();
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { return cudaStreamCreate(s); }
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) { return cudaStreamCreate(s); }
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* p) {
  *p = 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetFlags(cudaStream_t, unsigned* p) {
  *p = 1;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetId(cudaStream_t s, unsigned long long* p) {
  *p = (u64)s;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetDevice(cudaStream_t, int* d) {
  *d = 0;
  return cudaSuccess;
}

// Stream capture: a stream captures from BeginCapture, or from its wait for an event that a capturing stream recorded,
// until the capture ends. Nothing is captured (kernels do nothing anyway): a graph is a handle with one node, and
// launching it does nothing. What a real driver refuses during a capture (synchronising, cudaMalloc) is not refused.
struct Capture {
  u64 id;
  cudaStream_t origin;
};
static std::map<cudaStream_t, Capture> g_capturing;
static u64 g_capture_id = 0;
static Capture* capture_of(cudaStream_t s) {
  auto it = g_capturing.find(s);
  return it == g_capturing.end() ? 0 : &it->second;
}
static cudaGraph_t graph_of(u64 id) { return (cudaGraph_t)(0x6000000 + id * 64); }
API cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
  LOCK;
  if (capture_of(s)) return err(cudaErrorIllegalState);
  g_capturing[s] = {++g_capture_id, s};
  S().logf("capture begin %llu", (unsigned long long)g_capture_id);
  return cudaSuccess;
}
API cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t s, cudaGraph_t, const cudaGraphNode_t*,
                                              const cudaGraphEdgeData*, size_t, cudaStreamCaptureMode m) {
  return cudaStreamBeginCapture(s, m);
}
API cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* g) {
  LOCK;
  Capture* c = capture_of(s);
  *g = 0;
  if (!c || c->origin != s) return err(cudaErrorIllegalState);
  u64 id = c->id;
  for (auto it = g_capturing.begin(); it != g_capturing.end();)
    it = it->second.id == id ? g_capturing.erase(it) : std::next(it);
  *g = graph_of(id);
  S().logf("capture end %llu", (unsigned long long)id);
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* c) {
  LOCK;
  *c = capture_of(s) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
static cudaError_t capture_info(cudaStream_t s, cudaStreamCaptureStatus* c, unsigned long long* id, cudaGraph_t* g,
                                const cudaGraphNode_t** d, size_t* n) {
  LOCK;
  Capture* k = capture_of(s);
  *c = k ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id) *id = k ? k->id : 0;
  if (g) *g = k ? graph_of(k->id) : 0;
  if (d) *d = 0;
  if (n) *n = 0;
  return cudaSuccess;
}
#if CUDART_VERSION < 13000  // a macro for cudaStreamGetCaptureInfo_v2, which knows no edges
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* c, unsigned long long* id,
                                         cudaGraph_t* g, const cudaGraphNode_t** d, size_t* n) {
  return capture_info(s, c, id, g, d, n);
}
#else
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* c, unsigned long long* id,
                                         cudaGraph_t* g, const cudaGraphNode_t** d, const cudaGraphEdgeData** e,
                                         size_t* n) {
  if (e) *e = 0;
  return capture_info(s, c, id, g, d, n);
}
#endif
API cudaError_t cudaGraphCreate(cudaGraph_t* g, unsigned) {
  *g = (cudaGraph_t)new_handle();
  return cudaSuccess;
}
API cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t* nodes, size_t* n) {
  if (!nodes) *n = 1;
  else
    for (size_t i = 0; i < *n; i++) nodes[i] = (cudaGraphNode_t)0x77;
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* x, cudaGraph_t, unsigned long long) {
  *x = (cudaGraphExec_t)new_handle();
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* x, cudaGraph_t g, unsigned long long f) {
  return cudaGraphInstantiateWithFlags(x, g, f);
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  g_memsets++;
  return cudaSuccess;
}
API cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* m) {
  static thread_local cudaStreamCaptureMode cur = cudaStreamCaptureModeGlobal;
  cudaStreamCaptureMode o = cur;
  cur = *m;
  *m = o;
  return cudaSuccess;
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) {
  *e = (cudaEvent_t) new Ev{0, false, {0, 0}, 0, 0};
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t e) {
  delete (Ev*)e;
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  LOCK;
  Ev* v = (Ev*)e;
  Capture* c = capture_of(s);
  v->capture = c ? c->id : 0;
  v->origin = c ? c->origin : 0;
  v->recorded = true;
  v->left = S().lag;
  clock_gettime(CLOCK_MONOTONIC, &v->t);
  return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  LOCK;
  Ev* v = (Ev*)e;
  Capture* o = v && v->capture ? capture_of(v->origin) : 0;
  if (o && o->id == v->capture) g_capturing.insert({s, *o});
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { return cudaEventRecord(e, s); }
API cudaError_t cudaEventQuery(cudaEvent_t e) {
  Ev* v = (Ev*)e;
  if (v->left) {
    v->left--;
    return err(cudaErrorNotReady);
  }
  return cudaSuccess;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  ((Ev*)e)->left = 0;
  return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  Ev *x = (Ev*)a, *y = (Ev*)b;
  *ms = (float)((y->t.tv_sec - x->t.tv_sec) * 1e3 + (y->t.tv_nsec - x->t.tv_nsec) / 1e6);
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t f, void* d) {
  f(d);
  return cudaSuccess;
}
API cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void* d, unsigned) {
  f(s, cudaSuccess, d);
  return cudaSuccess;
}
