// What a device answers when it is asked for work: a callable that a test can make refuse, or wait.
#pragma once
#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <string>
#include <utility>

namespace simulated {

inline PyObject* answer = nullptr;  // (device) -> None, or the kind of an error and its words

// Throw what a runtime throws of a device that refuses; torch makes its own Python errors of these.
inline void ask(int index) {
  if (answer == nullptr || index < 0) return;
  pybind11::gil_scoped_acquire gil;
  auto said = pybind11::reinterpret_borrow<pybind11::object>(answer)(index);
  if (said.is_none()) return;
  auto [kind, words] = said.cast<std::pair<std::string, std::string>>();
  c10::SourceLocation here{__func__, __FILE__, static_cast<uint32_t>(__LINE__)};
  if (kind == "AcceleratorError") throw c10::AcceleratorError(here, 1, words);
  if (kind == "OutOfMemoryError") throw c10::OutOfMemoryError(here, words);
  throw c10::Error(here, words);
}

// Take processor time inside one call, as a thread does that waits for a device.
inline void spin(double seconds) {
  pybind11::gil_scoped_release no_gil;
  auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (std::chrono::steady_clock::now() < end) {
  }
}

}  // namespace simulated
