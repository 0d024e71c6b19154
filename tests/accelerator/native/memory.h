// Each device's own memory: a caching allocator as accelerators have one, with its peaks, its limit and its poison.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "devices.h"

namespace simulated {

constexpr size_t kGranularity = 512;  // torch's caching allocators hand out multiples of it

// Larger blocks are shared mappings, which the kernel counts apart from the process's own memory (RssShmem, not
// RssAnon), as a real device's memory is apart from the host's. A mapping takes whole pages, and a process may have
// 65530 of them, so smaller blocks come from the heap.
constexpr size_t kMapped = 64 << 10;

inline void* map_or_allocate(size_t bytes) {  // null where there is no more
  if (bytes >= kMapped) {
    void* place = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return place == MAP_FAILED ? nullptr : place;
  }
  void* place = nullptr;
  if (posix_memalign(&place, 64, bytes) != 0) return nullptr;
  std::memset(place, 0, bytes);  // what a driver hands out is no other process's
  return place;
}

inline void unmap_or_free(void* place, size_t bytes) {
  if (bytes >= kMapped)
    munmap(place, bytes);
  else
    std::free(place);
}

struct Usage {
  size_t allocated = 0, peak_allocated = 0, reserved = 0, peak_reserved = 0;
};

class Memory final : public c10::DeviceAllocator {
 public:
  // The byte that memory is filled with before it is handed out; -1 leaves what lay there.
  int fill = -1;

  c10::DataPtr allocate(size_t bytes) override {
    int index = current;
    if (bytes == 0) return {nullptr, nullptr, &release, device(index)};
    check(index);
    size_t rounded = (bytes + kGranularity - 1) / kGranularity * kGranularity;
    std::lock_guard<std::mutex> lock(mutex_);
    void* place = take(index, rounded);
    if (fill >= 0) std::memset(place, fill, rounded);
    blocks_[place] = {index, rounded};
    auto& usage = usages_[index];
    usage.allocated += rounded;
    usage.peak_allocated = std::max(usage.peak_allocated, usage.allocated);
    return {place, place, &release, device(index)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool initialized() override { return count() > 0; }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  void resetAccumulatedStats(c10::DeviceIndex) override {}

  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (int index = 0; index < count(); ++index) drop_cached(index);
  }

  void resetPeakStats(c10::DeviceIndex index) override {
    check(index);
    std::lock_guard<std::mutex> lock(mutex_);
    auto& usage = usages_[index];
    usage.peak_allocated = usage.allocated;
    usage.peak_reserved = usage.reserved;
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    auto usage = of(index);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto tell = [](auto& array, size_t now, size_t peak) {
      array[0].current = static_cast<int64_t>(now);
      array[0].peak = static_cast<int64_t>(peak);
    };
    tell(stats.allocated_bytes, usage.allocated, usage.peak_allocated);
    tell(stats.active_bytes, usage.allocated, usage.peak_allocated);
    tell(stats.requested_bytes, usage.allocated, usage.peak_allocated);
    tell(stats.reserved_bytes, usage.reserved, usage.peak_reserved);
    return stats;
  }

  // `override` where the installed torch has it
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) {
    auto total = models()[static_cast<size_t>(index)].memory_bytes;
    return {total - of(index).reserved, total};
  }

  Usage of(int64_t index) {
    check(index);
    std::lock_guard<std::mutex> lock(mutex_);
    return usages_[static_cast<int>(index)];
  }

  int owner(void* place) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto after = blocks_.upper_bound(place);
    if (after == blocks_.begin()) return 0;
    return std::prev(after)->second.device;
  }

 private:
  struct Block {
    int device;
    size_t bytes;
  };

  static Memory& the();

  static void release(void* place) {
    if (place == nullptr) return;
    auto& memory = the();
    std::lock_guard<std::mutex> lock(memory.mutex_);
    auto found = memory.blocks_.find(place);
    auto [index, bytes] = found->second;
    memory.blocks_.erase(found);
    memory.usages_[index].allocated -= bytes;
    memory.cached_[index].emplace(bytes, place);
  }

  void* take(int index, size_t bytes) {
    auto& cached = cached_[index];
    if (auto found = cached.find(bytes); found != cached.end()) {
      void* place = found->second;
      cached.erase(found);
      return place;
    }
    auto& usage = usages_[index];
    auto limit = models()[static_cast<size_t>(index)].memory_bytes;
    if (usage.reserved + bytes > limit) drop_cached(index);
    void* place = usage.reserved + bytes > limit ? nullptr : map_or_allocate(bytes);
    if (place == nullptr)
      TORCH_CHECK_WITH(OutOfMemoryError, false, "simulated accelerator out of memory. Tried to allocate ", bytes,
                       " bytes. Device ", index, " has a total capacity of ", limit, " bytes of which ",
                       limit - usage.reserved, " bytes are free.");
    usage.reserved += bytes;
    usage.peak_reserved = std::max(usage.peak_reserved, usage.reserved);
    return place;
  }

  void drop_cached(int index) {
    for (auto& [bytes, place] : cached_[index]) {
      usages_[index].reserved -= bytes;
      unmap_or_free(place, bytes);
    }
    cached_[index].clear();
  }

  std::mutex mutex_;
  std::map<void*, Block> blocks_;
  std::map<int, std::multimap<size_t, void*>> cached_;
  std::map<int, Usage> usages_;
};

inline Memory& memory() {
  static auto* found = new Memory;  // never destroyed: tensors may outlive every static
  return *found;
}

inline Memory& Memory::the() { return memory(); }

// Host memory that a device could read by itself; it is told by its address.
class Pinned final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* place = nullptr;
    if (bytes > 0) {
      TORCH_CHECK(posix_memalign(&place, 64, bytes) == 0, "no pinned memory left");
      std::lock_guard<std::mutex> lock(mutex());
      places()[place] = bytes;
    }
    return {place, place, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

  static bool holds(const void* place) {
    std::lock_guard<std::mutex> lock(mutex());
    auto after = places().upper_bound(const_cast<void*>(place));
    if (after == places().begin()) return false;
    auto before = std::prev(after);
    return static_cast<const char*>(place) < static_cast<const char*>(before->first) + before->second;
  }

 private:
  static void release(void* place) {
    if (place == nullptr) return;
    {
      std::lock_guard<std::mutex> lock(mutex());
      places().erase(place);
    }
    std::free(place);
  }
  static std::mutex& mutex() {
    static auto* found = new std::mutex;
    return *found;
  }
  static std::map<void*, size_t>& places() {
    static auto* found = new std::map<void*, size_t>;
    return *found;
  }
};

inline Pinned* pinned() {
  static auto* found = new Pinned;
  return found;
}

}  // namespace simulated
