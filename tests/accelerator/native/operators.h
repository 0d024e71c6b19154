// Every other operator: the CPU's own kernel, after the same check of devices that an accelerator makes.
#pragma once
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>

#include "copies.h"
#include "kernels.h"
#include "memory.h"

namespace simulated {

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  // indices may lie on the host, as with CUDA
  bool host_indices = name == "aten::index" || name.rfind("aten::index_put", 0) == 0 ||
                      name.rfind("aten::_index_put", 0) == 0;
  std::optional<c10::Device> found;
  auto see = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || (tensor.device().is_cpu() && (tensor.dim() == 0 || host_indices))) return;
    if (!found) found = tensor.device();
    TORCH_CHECK(*found == tensor.device(),
                "Expected all tensors to be on the same device, but found at least two devices, ", *found, " and ",
                tensor.device(), "! (", name, ")");
  };
  std::optional<c10::Device> asked;  // of a factory
  for (auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) see(value.toTensor());
    else if (value.isTensorList()) for (const at::Tensor& tensor : value.toTensorVector()) see(tensor);
    else if (value.isOptionalTensorList()) for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) { if (tensor) see(*tensor); }
    else if (value.isDevice()) asked = value.toDevice();
  }
  if (!found) found = asked;
  InsideKernel inside;
  int index = found && found->type() == kDevice && found->has_index() ? found->index() : current;
  On on(index);
  streams().launch(index);
  at::native::cpu_fallback(op, stack);
}

// ---- factories and views
inline at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                        std::optional<c10::Device> where, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  On on(index_of(where));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}
inline at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                                std::optional<at::Layout>, std::optional<c10::Device> where, std::optional<bool>) {
  On on(index_of(where));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}
inline at::Tensor as_strided(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                             std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt);
}
inline at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}
inline at::Tensor reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
inline at::Tensor unfold(const at::Tensor& tensor, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(tensor, dim, size, step);
}
inline const at::Tensor& resize_(const at::Tensor& tensor, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  On on(tensor.device().index());
  return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(size), format);
}
inline bool is_set_to(const at::Tensor& a, const at::Tensor& b) { return at::native::is_set_to(a, b); }
inline at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                               c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(tensor, storage, offset.guard_int(__FILE__, __LINE__),
                                      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
inline at::Tensor& set_source_storage(at::Tensor& tensor, at::Storage storage) {
  int64_t elements = static_cast<int64_t>(storage.nbytes() / tensor.dtype().itemsize());
  return tensor.set_(storage, 0, {elements}, {});
}
inline at::Tensor& set_source_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return at::native::set_tensor_(tensor, source);
}

// ---- copies
inline at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  carry(source, target, non_blocking);
  return target;
}
inline at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  carry(source, target, false);
  return target;
}
inline at::Scalar item(const at::Tensor& tensor) {  // a copy of one element to the host
  auto host = at::empty({}, tensor.options().device(at::kCPU));
  carry(tensor.reshape({}), host, false);
  return host.item();
}

// ---- what torch has no CPU kernel to fall back to
inline int64_t attention_by_plain_products(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                           const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;  // SDPBackend::math
}
inline at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                              c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                              bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  auto added = bias ? *bias : at::Tensor();
  same_device({input, weight, added}, "convolution");
  int index = place(input);
  streams().launch(index);
  std::optional<at::Tensor> host_bias;
  if (added.defined()) host_bias = host_view(added);
  return on_device(at::convolution_symint(host_view(input), host_view(weight), host_bias, stride, padding, dilation,
                                          transposed, output_padding, groups), index);
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> wanted) {
  same_device({gradient, input, weight}, "convolution_backward");
  int index = place(input);
  streams().launch(index);
  std::vector<c10::SymInt> bias_size{transposed ? weight.sym_size(1) * groups : weight.sym_size(0)};
  auto [of_input, of_weight, of_bias] = at::convolution_backward_symint(
      host_view(gradient), host_view(input), host_view(weight), c10::SymIntArrayRef(bias_size), stride, padding,
      dilation, transposed, output_padding, groups, wanted);
  auto moved = [index](const at::Tensor& host) { return host.defined() ? on_device(host, index) : host; };
  return {moved(of_input), moved(of_weight), moved(of_bias)};
}

}  // namespace simulated
