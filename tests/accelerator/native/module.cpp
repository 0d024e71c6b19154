// Several accelerators in software, on torch's PrivateUse1 extension points: what torch asks of a backend, registered.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "operators.h"

namespace simulated {

c10::Allocator* const kMemory = &memory();
REGISTER_ALLOCATOR(kDevice, kMemory)

Lane lane_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
Streams::Event* event_of(void* event) { return static_cast<Streams::Event*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device to) const override {
    auto before = getDevice();
    setDevice(to);
    return before;
  }
  c10::Device getDevice() const override { return device(current); }
  void setDevice(c10::Device to) const override {
    if (to.index() < 0) return;
    check(to.index());
    current = to.index();
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    if (to.index() >= 0) current = to.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(count()); }
  c10::Stream getStream(c10::Device of) const override { return streams().now(of.index()); }
  c10::Stream getDefaultStream(c10::Device of) const override { return c10::Stream(c10::Stream::DEFAULT, of); }
  c10::Stream getNewStream(c10::Device of, int) const override { return streams().fresh(of.index()); }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override { return streams().fresh(of.index()); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return streams().exchange(stream); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete event_of(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Streams::Event;
    streams().record(*event_of(*event), lane_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) streams().order(*event_of(event), lane_of(stream));
  }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream& stream) const override { return streams().idle(lane_of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { streams().wait_for_stream(lane_of(stream)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) streams().wait_for_event(*event_of(event));
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override { synchronize(index); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(count()); }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    check(index);
    current = index;
  }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    auto before = current;
    if (index >= 0) current = index;
    return static_cast<c10::DeviceIndex>(before);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static auto* found = new at::Generator(at::globalContext().defaultGenerator(at::kCPU));
    return *found;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned(); }
  bool isPinnedPtr(const void* place) const override { return Pinned::holds(place); }
  c10::Device getDeviceFromPtr(void* place) const override { return device(memory().owner(place)); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    On on(storage.device().index());
    auto fresh = memory().allocate(bytes);
    if (storage.nbytes() > 0 && bytes > 0) std::memcpy(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

}  // namespace simulated

using namespace simulated;

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", simulated::empty);
  m.impl("empty_strided", simulated::empty_strided);
  m.impl("as_strided", simulated::as_strided);
  m.impl("view", simulated::view);
  m.impl("_reshape_alias", simulated::reshape_alias);
  m.impl("unfold", simulated::unfold);
  m.impl("resize_", simulated::resize_);
  m.impl("is_set_to", simulated::is_set_to);
  m.impl("set_.source_Storage_storage_offset", simulated::set_storage);
  m.impl("set_.source_Storage", simulated::set_source_storage);
  m.impl("set_.source_Tensor", simulated::set_source_tensor);
  m.impl("_copy_from", simulated::copy_from);
  m.impl("_copy_from_and_resize", simulated::copy_from_and_resize);
  m.impl("_local_scalar_dense", simulated::item);
  m.impl("_fused_sdp_choice", simulated::attention_by_plain_products);
  m.impl("convolution_overrideable", simulated::convolution);
  m.impl("convolution_backward_overrideable", simulated::convolution_backward);
  m.impl("mm", simulated::mm);
  m.impl("mm.out", simulated::mm_out);
  m.impl("bmm", simulated::bmm);
  m.impl("bmm.out", simulated::bmm_out);
  m.impl("addmm", simulated::addmm);
  m.impl("addmm.out", simulated::addmm_out);
  m.impl("addmm_", simulated::addmm_);
  m.impl("baddbmm", simulated::baddbmm);
  m.impl("baddbmm.out", simulated::baddbmm_out);
  m.impl("baddbmm_", simulated::baddbmm_);
  m.impl("sum.dim_IntList", simulated::sum);
  m.impl("sum.IntList_out", simulated::sum_out);
}

PYBIND11_MODULE(_native, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("set_devices", [](const std::vector<std::pair<int, size_t>>& given) {
    TORCH_CHECK(models().empty(), "the devices are set once in the life of a process");
    TORCH_CHECK(given.size() <= kMostDevices, "at most ", kMostDevices, " devices");
    for (auto [pieces, bytes] : given) models().push_back({pieces, bytes});
  });
  m.def("set_carrier", [](pybind11::object carry, pybind11::object deliver) {
    carrier = carry.release().ptr();
    arrival = deliver.release().ptr();
  });
  m.def("set_answer", [](pybind11::object given) { answer = given.is_none() ? nullptr : given.release().ptr(); });
  m.def("spin", simulated::spin);
  m.def("set_fill", [](int byte) { memory().fill = byte; });
  m.def("current_device", [] { return current; });
  m.def("set_device", [](int index) {
    check(index);
    current = index;
  });
  m.def("synchronize", [](int index) {
    check(index);
    synchronize(index);
  });
  m.def("empty_cache", [] { memory().emptyCache(); });
  m.def("reset_peak", [](int index) { memory().resetPeakStats(static_cast<c10::DeviceIndex>(index)); });
  m.def("usage", [](int index) {
    auto found = memory().of(index);
    return std::make_tuple(found.allocated, found.peak_allocated, found.reserved, found.peak_reserved);
  });
}
