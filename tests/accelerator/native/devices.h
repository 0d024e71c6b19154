// The devices there are, and which of them this thread is on.
#pragma once
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <optional>
#include <vector>

namespace simulated {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

struct Model {
  int pieces;           // how many partial sums a dot product is cut into: what makes an architecture
  size_t memory_bytes;  // a request beyond it is out of memory
};

inline std::vector<Model>& models() {
  static auto* found = new std::vector<Model>;  // never destroyed: tensors may outlive every static
  return *found;
}

inline int count() { return static_cast<int>(models().size()); }

inline thread_local int current = 0;

inline void check(int64_t index) {
  TORCH_CHECK(index >= 0 && index < count(), "invalid device ordinal ", index, ": there are ", count(),
              " simulated devices");
}

inline int index_of(std::optional<c10::Device> device) {
  int index = device && device->has_index() ? device->index() : current;
  check(index);
  return index;
}

inline c10::Device device(int index) { return {kDevice, static_cast<c10::DeviceIndex>(index)}; }

// Be on a device for as long as this lives.
class On {
 public:
  explicit On(int index) : before_(current) { current = index; }
  ~On() { current = before_; }
  On(const On&) = delete;
  On& operator=(const On&) = delete;

 private:
  int before_;
};

}  // namespace simulated
