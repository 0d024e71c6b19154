// Streams and events. Work is done at once; what is kept is which of it nobody has waited for yet, so that a copy can
// tell whether it runs beside other work.
#pragma once
#include <c10/core/Stream.h>

#include <array>
#include <map>
#include <mutex>
#include <utility>

#include "answers.h"
#include "devices.h"

namespace simulated {

using Lane = std::pair<int, c10::StreamId>;  // a device and a stream of it

constexpr size_t kMostDevices = 64;

class Streams {
 public:
  c10::Stream now(int index) { return make(index, mine()[slot(index)]); }

  c10::Stream exchange(c10::Stream stream) {
    auto& place = mine()[slot(stream.device_index())];
    auto before = make(stream.device_index(), place);
    place = stream.id();
    return before;
  }

  c10::Stream fresh(int index) {
    std::lock_guard<std::mutex> lock(mutex_);
    return make(index, ++last_);
  }

  // Note that a kernel was put on the current stream of a device.
  void launch(int index) {
    ask(index);
    Lane lane{index, mine()[slot(index)]};
    std::lock_guard<std::mutex> lock(mutex_);
    ++launched_[lane];
  }

  void wait_for_stream(Lane lane) {
    std::lock_guard<std::mutex> lock(mutex_);
    done_[lane] = launched_[lane];
  }

  void wait_for_device(int index) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [lane, work] : launched_)
      if (lane.first == index) done_[lane] = work;
  }

  struct Event {
    Lane lane;
    uint64_t work;
  };

  void record(Event& event, Lane lane) {
    std::lock_guard<std::mutex> lock(mutex_);
    event = {lane, launched_[lane]};
  }

  // Let a stream wait until what an event marks is done.
  void order(const Event& event, Lane waiter) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& seen = seen_[{waiter, event.lane}];
    seen = std::max(seen, event.work);
  }

  void wait_for_event(const Event& event) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& done = done_[event.lane];
    done = std::max(done, event.work);
  }

  bool idle(Lane lane) {
    std::lock_guard<std::mutex> lock(mutex_);
    return launched_[lane] <= done_[lane];
  }

  // Whether a copy between two devices (-1 is the host) meets work on another stream that nothing makes it wait for.
  bool beside_work(int source, int target) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [lane, work] : launched_) {
      if (lane.first != source && lane.first != target) continue;
      bool ordered = work <= done_[lane];
      for (int end : {source, target}) {
        if (end < 0) continue;
        Lane own{end, mine()[slot(end)]};  // a copy waits for the current streams of both its ends
        auto seen = seen_.find({own, lane});
        ordered = ordered || own == lane || (seen != seen_.end() && work <= seen->second);
      }
      if (!ordered) return true;
    }
    return false;
  }

 private:
  static size_t slot(int index) { return static_cast<size_t>(index < 0 ? current : index) % kMostDevices; }
  static std::array<c10::StreamId, kMostDevices>& mine() {
    static thread_local std::array<c10::StreamId, kMostDevices> ids{};
    return ids;
  }
  static c10::Stream make(int index, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, device(static_cast<int>(slot(index))), id);
  }

  std::mutex mutex_;
  c10::StreamId last_ = 0;  // 0 is the default stream
  std::map<Lane, uint64_t> launched_, done_;
  std::map<std::pair<Lane, Lane>, uint64_t> seen_;
};

inline Streams& streams() {
  static auto* found = new Streams;
  return *found;
}

}  // namespace simulated
