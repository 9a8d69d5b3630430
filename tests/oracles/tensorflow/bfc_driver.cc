// Runs TensorFlow's own GPU allocator class, as exported by libtensorflow_framework.so.2, over a pretended device that
// only hands out addresses. Requests come on stdin, one answer a line goes to stdout; record_bfc.py talks to it.
//
//   first line:  bfc|gpu LIMIT CAPACITY COALESCE ALLOW_GROWTH GARBAGE_COLLECTION FRAGMENTATION_FRACTION GAP
//   then:        a ID BYTES | f ID
//   answers:     [address or -1, chunk bytes, in use, peak in use, pool, peak pool, [[event, bytes, address]...]]
#include <cstdio>
#include <map>
#include <memory>
#include <string>

#include "tensorflow/core/common_runtime/gpu/gpu_bfc_allocator.h"
#include "xla/tsl/framework/bfc_allocator.h"

namespace {

constexpr uintptr_t kBase = 0x700000000000ull;
std::string events;  // of the pretended device, since the last answer

void Note(const char* what, size_t bytes, const void* address) {
  char text[96];
  int used = std::snprintf(text, sizeof text, "%s[\"%s\",%zu", events.empty() ? "" : ",", what, bytes);
  if (address) std::snprintf(text + used, sizeof text - used, ",%zu", reinterpret_cast<uintptr_t>(address) - kBase);
  events += text;
  events += "]";
}

class PretendedDevice : public tsl::SubAllocator {
 public:
  PretendedDevice(size_t capacity, bool coalesce, size_t gap)
      : tsl::SubAllocator({}, {}), room_(capacity), coalesce_(coalesce), gap_(gap) {}

  void* Alloc(size_t, size_t bytes, size_t* received) override {
    *received = bytes;
    if (bytes > room_) {
      Note("fail", bytes, nullptr);
      return nullptr;
    }
    room_ -= bytes;
    void* address = reinterpret_cast<void*>(next_);
    next_ += bytes + gap_;
    Note("region", bytes, address);
    return address;
  }
  void Free(void* address, size_t bytes) override {
    room_ += bytes;
    Note("release", bytes, address);
  }
  bool SupportsCoalescing() const override { return coalesce_; }
  tsl::AllocatorMemoryType GetMemoryType() const override { return tsl::AllocatorMemoryType::kDevice; }

 private:
  size_t room_;
  bool coalesce_;
  size_t gap_;
  uintptr_t next_ = kBase;
};

template <typename Allocator, typename Options>
std::unique_ptr<tsl::BFCAllocator> Make(std::unique_ptr<PretendedDevice> device, size_t limit, bool growth, bool collect,
                                        double fraction) {
  Options options;
  options.allow_growth = growth;
  options.garbage_collection = collect;
  options.fragmentation_fraction = fraction;
  options.allow_retry_on_failure = false;
  return std::make_unique<Allocator>(std::move(device), limit, "oracle", options);
}

}  // namespace

int main() {
  char kind[8], operation;
  size_t limit, capacity, gap, bytes;
  int coalesce, growth, collect;
  double fraction;
  if (std::scanf("%7s %zu %zu %d %d %d %lf %zu", kind, &limit, &capacity, &coalesce, &growth, &collect, &fraction, &gap) != 8)
    return 2;
  auto device = std::make_unique<PretendedDevice>(capacity, coalesce != 0, gap);
  auto allocator =
      std::string(kind) == "gpu"
          ? Make<tensorflow::GPUBFCAllocator, tensorflow::GPUBFCAllocator::Options>(std::move(device), limit, growth, collect, fraction)
          : Make<tsl::BFCAllocator, tsl::BFCAllocator::Options>(std::move(device), limit, growth, collect, fraction);
  tsl::AllocationAttributes once;
  once.retry_on_failure = false;
  std::map<long, void*> live;
  long id;
  while (std::scanf(" %c %ld", &operation, &id) == 2) {
    if (operation == 'a') {
      if (std::scanf("%zu", &bytes) != 1) return 3;
      void* address = allocator->AllocateRaw(256, bytes, once);
      if (address) live[id] = address;
      std::printf("[%lld,%zu", address ? static_cast<long long>(reinterpret_cast<uintptr_t>(address) - kBase) : -1LL,
                  address ? allocator->AllocatedSize(address) : 0);
    } else {
      auto found = live.find(id);
      if (found != live.end()) {
        allocator->DeallocateRaw(found->second);
        live.erase(found);
      }
      std::printf("[null,null");
    }
    auto stats = allocator->GetStats();
    std::printf(",%lld,%lld,%lld,%lld,[%s]]\n", static_cast<long long>(stats->bytes_in_use),
                static_cast<long long>(stats->peak_bytes_in_use), static_cast<long long>(*stats->pool_bytes),
                static_cast<long long>(*stats->peak_pool_bytes), events.c_str());
    events.clear();
  }
  std::fflush(stdout);
  _Exit(0);
}
