/* A pretend NVML: one device; figures from the same environment as fakecuda. */
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#define API __attribute__((visibility("default")))
static unsigned long long envu(const char* n, unsigned long long d) {
  const char* s = getenv(n);
  return s && *s ? strtoull(s, 0, 10) : d;
}
API int nvmlInit(void) { return 0; }
API int nvmlInit_v2(void) { return 0; }
API int nvmlInitWithFlags(unsigned f) {
  (void)f;
  return 0;
}
API int nvmlShutdown(void) { return 0; }
API const char* nvmlErrorString(int r) {
  (void)r;
  return "fake nvml";
}
API int nvmlSystemGetDriverVersion(char* s, unsigned n) {
  snprintf(s, n, "580.65.06");
  return 0;
}
API int nvmlSystemGetNVMLVersion(char* s, unsigned n) {
  snprintf(s, n, "13.580.65");
  return 0;
}
API int nvmlSystemGetCudaDriverVersion(int* v) {
  *v = 13000;
  return 0;
}
API int nvmlSystemGetCudaDriverVersion_v2(int* v) {
  *v = 13000;
  return 0;
}
API int nvmlDeviceGetCount_v2(unsigned* n) {
  *n = envu("FAKE_CUDA_DEVICES", 1);
  return 0;
}
API int nvmlDeviceGetCount(unsigned* n) {
  *n = envu("FAKE_CUDA_DEVICES", 1);
  return 0;
}
API int nvmlDeviceGetHandleByIndex_v2(unsigned i, void** d) {
  *d = (void*)(unsigned long)(i + 1);
  return 0;
}
API int nvmlDeviceGetHandleByIndex(unsigned i, void** d) {
  *d = (void*)(unsigned long)(i + 1);
  return 0;
}
API int nvmlDeviceGetHandleByUUID(const char* u, void** d) {
  (void)u;
  *d = (void*)1;
  return 0;
}
API int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** d) {
  (void)id;
  *d = (void*)1;
  return 0;
}
API int nvmlDeviceGetIndex(void* d, unsigned* i) {
  *i = (unsigned)(unsigned long)d - 1;
  return 0;
}
API int nvmlDeviceGetName(void* d, char* s, unsigned n) {
  (void)d;
  const char* e = getenv("FAKE_CUDA_NAME");
  snprintf(s, n, "%s", e && *e ? e : "NVIDIA FakeCUDA");
  return 0;
}
API int nvmlDeviceGetUUID(void* d, char* s, unsigned n) {
  snprintf(s, n, "GPU-00000000-0000-0000-0000-00000000000%lu", (unsigned long)d);
  return 0;
}
API int nvmlDeviceGetCudaComputeCapability(void* d, int* a, int* b) {
  (void)d;
  int cc = (int)envu("FAKE_CUDA_CC", 90);
  *a = cc / 10;
  *b = cc % 10;
  return 0;
}
API int nvmlDeviceGetMemoryInfo(void* d, unsigned long long* m) {
  (void)d;
  m[0] = envu("FAKE_CUDA_TOTAL_MIB", 81920) << 20;
  m[2] = envu("FAKE_CUDA_OTHER_MIB", 0) << 20;
  m[1] = m[0] - m[2];
  return 0;
}
API int nvmlDeviceGetMemoryInfo_v2(void* d, unsigned long long* m) {
  (void)d;
  m[1] = envu("FAKE_CUDA_TOTAL_MIB", 81920) << 20;
  m[2] = 0;
  m[4] = envu("FAKE_CUDA_OTHER_MIB", 0) << 20;
  m[3] = m[1] - m[4];
  return 0;
}
API int nvmlDeviceGetP2PStatus(void* a, void* b, int i, int* st) {
  (void)a;
  (void)b;
  (void)i;
  *st = 0;
  return 0;
}
API int nvmlDeviceGetTopologyCommonAncestor(void* a, void* b, int* l) {
  (void)a;
  (void)b;
  *l = 0;
  return 0;
}
API int nvmlDeviceGetPersistenceMode(void* d, int* m) {
  (void)d;
  *m = 1;
  return 0;
}
API int nvmlDeviceGetMigMode(void* d, unsigned* a, unsigned* b) {
  (void)d;
  *a = 0;
  *b = 0;
  return 3;
}
API int nvmlDeviceGetGpuFabricInfoV(void* device, void* info) {
  (void)device;
  (void)info;
  return 0;
}
API int nvmlDeviceGetNvLinkRemoteDeviceType(void* d, unsigned link, int* type) {
  (void)d;
  (void)link;
  *type = 255;
  return 3;
}
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void* d, unsigned link, void* pci) {
  (void)d;
  (void)link;
  (void)pci;
  return 3;
}
API int nvmlDeviceGetComputeRunningProcesses(void* d, unsigned* n, void* infos) {
  (void)d;
  (void)infos;
  *n = 0;
  return 0;
}
