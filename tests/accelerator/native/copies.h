// The one place through which bytes cross from one device to another: a callable that a test can make go wrong.
#pragma once
#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include "devices.h"
#include "streams.h"

namespace simulated {

inline PyObject* carrier = nullptr;         // (source, target, from, to, beside_work) -> None
inline PyObject* arrival = nullptr;         // (device) -> None: what was delayed has to arrive
inline thread_local int inside_kernel = 0;  // what a kernel moves for its own sake is no copy of the program

class InsideKernel {
 public:
  InsideKernel() { ++inside_kernel; }
  ~InsideKernel() { --inside_kernel; }
};

// A CPU tensor over the same bytes.
inline at::Tensor host_view(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;
  at::Tensor held = tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [held](void*) {},
                       tensor.options().device(at::kCPU).requires_grad(false));
}

inline int place(const at::Tensor& tensor) { return tensor.device().is_cpu() ? -1 : tensor.device().index(); }

inline void carry(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  at::NoGradGuard no_grad;
  auto from = host_view(source), to = host_view(target);
  if (source.device() == target.device() || inside_kernel > 0 || carrier == nullptr) {
    to.copy_(from);
    if (inside_kernel == 0) streams().launch(place(target));
    return;
  }
  ask(place(source));
  ask(place(target));
  bool beside = streams().beside_work(place(source), place(target));
  {
    pybind11::gil_scoped_acquire gil;
    pybind11::reinterpret_borrow<pybind11::object>(carrier)(pybind11::cast(from), pybind11::cast(to), place(source),
                                                            place(target), beside);
  }
  if (place(target) < 0) {
    if (!non_blocking) streams().wait_for_stream({place(source), streams().now(place(source)).id()});
  } else {
    streams().launch(place(target));
  }
}

inline void synchronize(int index) {
  ask(index);
  if (arrival != nullptr) {
    pybind11::gil_scoped_acquire gil;
    pybind11::reinterpret_borrow<pybind11::object>(arrival)(index);
  }
  streams().wait_for_device(index);
}

}  // namespace simulated
