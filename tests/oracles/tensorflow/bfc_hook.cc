// Listens to the BFC allocators of a running TensorFlow process: replaces three slots of the (exported) virtual table of
// tsl::BFCAllocator. Load with ctypes after `import tensorflow`; recording.py does so.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <mutex>
#include <string>
#include <vector>

#include "tsl/profiler/lib/scoped_memory_debug_annotation.h"
#include "xla/tsl/framework/bfc_allocator.h"

namespace {

using tsl::BFCAllocator;
using Attributes = tsl::AllocationAttributes;
using AllocateWithAttributes = void* (*)(BFCAllocator*, size_t, size_t, const Attributes&);
using Allocate = void* (*)(BFCAllocator*, size_t, size_t);
using Deallocate = void (*)(BFCAllocator*, void*);

struct Event {
  char kind;  // a: allocated, f: freed, m: a mark of the script
  size_t requested, chunk;
  uintptr_t address, allocator;
  std::string name;  // the operator that is running, or the mark
};

std::vector<Event> events;
std::recursive_mutex guard;
AllocateWithAttributes allocate_with_attributes;
Deallocate deallocate;
BFCAllocator* latest = nullptr;

std::string CurrentOperator() {
  const char* name = tsl::profiler::ScopedMemoryDebugAnnotation::CurrentAnnotation().pending_op_name.data();
  return name ? name : "";
}

void* OnAllocate(BFCAllocator* self, size_t alignment, size_t bytes, const Attributes& attributes) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  void* address = allocate_with_attributes(self, alignment, bytes, attributes);
  latest = self;
  events.push_back({'a', bytes, address ? self->AllocatedSize(address) : 0, reinterpret_cast<uintptr_t>(address),
                    reinterpret_cast<uintptr_t>(self), CurrentOperator()});
  return address;
}

void* OnAllocatePlain(BFCAllocator* self, size_t alignment, size_t bytes) {
  return OnAllocate(self, alignment, bytes, Attributes());
}

void OnDeallocate(BFCAllocator* self, void* address) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  events.push_back({'f', 0, 0, reinterpret_cast<uintptr_t>(address), reinterpret_cast<uintptr_t>(self), CurrentOperator()});
  deallocate(self, address);
}

template <typename Function>
Function Exported(const char* symbol) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, symbol));
}

}  // namespace

// Returns how many slots were replaced (3 if all is well), negative if the table cannot be found or written.
extern "C" int hook_install() {
  constexpr int kSlots = 40;
  void** table = Exported<void**>("_ZTVN3tsl12BFCAllocatorE");
  if (!table) return -1;
  allocate_with_attributes =
      Exported<AllocateWithAttributes>("_ZN3tsl12BFCAllocator11AllocateRawEmmRKNS_20AllocationAttributesE");
  auto plain = Exported<Allocate>("_ZN3tsl12BFCAllocator11AllocateRawEmm");
  deallocate = Exported<Deallocate>("_ZN3tsl12BFCAllocator13DeallocateRawEPv");
  const long page = sysconf(_SC_PAGESIZE);
  const uintptr_t begin = reinterpret_cast<uintptr_t>(table) & ~(page - 1);
  const size_t length = (reinterpret_cast<uintptr_t>(table + kSlots) - begin + page - 1) / page * page;
  if (mprotect(reinterpret_cast<void*>(begin), length, PROT_READ | PROT_WRITE)) return -2;
  int replaced = 0;
  auto replace = [&](int slot, const void* with) {
    table[slot] = const_cast<void*>(with);
    replaced++;
  };
  for (int slot = 0; slot < kSlots; slot++) {
    if (table[slot] == reinterpret_cast<void*>(allocate_with_attributes))
      replace(slot, reinterpret_cast<const void*>(&OnAllocate));
    else if (table[slot] == reinterpret_cast<void*>(plain))
      replace(slot, reinterpret_cast<const void*>(&OnAllocatePlain));
    else if (table[slot] == reinterpret_cast<void*>(deallocate))
      replace(slot, reinterpret_cast<const void*>(&OnDeallocate));
  }
  return replaced;
}

extern "C" void hook_mark(const char* text) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  events.push_back({'m', 0, 0, 0, 0, text});
}

// bytes_in_use, peak_bytes_in_use, pool_bytes, peak_pool_bytes, num_allocs, largest_alloc_size; -1 before any request.
extern "C" int hook_stats(long long* into) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  if (!latest) return -1;
  auto stats = latest->GetStats();
  const long long values[] = {stats->bytes_in_use,           stats->peak_bytes_in_use, stats->pool_bytes.value_or(-1),
                              stats->peak_pool_bytes.value_or(-1), stats->num_allocs,  stats->largest_alloc_size};
  for (long long value : values) *into++ = value;
  return 0;
}

extern "C" int hook_dump(const char* path) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  FILE* file = std::fopen(path, "w");
  if (!file) return -1;
  for (const Event& event : events)
    std::fprintf(file, "%c\t%zu\t%zu\t%zu\t%zu\t%s\n", event.kind, event.requested, event.chunk, event.address,
                 event.allocator, event.name.c_str());
  std::fclose(file);
  return static_cast<int>(events.size());
}
