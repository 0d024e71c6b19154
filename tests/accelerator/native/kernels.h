// The kernels a device has of its own: sums and matrix products, cut into as many partial sums as its architecture has.
// Each piece is the CPU's own product, so the values are right; only the order of the additions is another.
#pragma once
#include <ATen/ATen.h>
#include <ATen/native/Resize.h>

#include <numeric>

#include "copies.h"

namespace simulated {

inline void same_device(at::TensorList tensors, const char* name) {
  std::optional<c10::Device> first;
  for (auto& tensor : tensors) {
    if (!tensor.defined() || (tensor.device().is_cpu() && tensor.dim() == 0)) continue;
    if (!first) first = tensor.device();
    TORCH_CHECK(*first == tensor.device(),
                "Expected all tensors to be on the same device, but found at least two devices, ", *first, " and ",
                tensor.device(), "! (", name, ")");
  }
}

inline at::Tensor on_device(const at::Tensor& host, int index) {
  auto found = at::empty(host.sizes(), host.options().device(device(index)));
  host_view(found).copy_(host);
  return found;
}

// The dtype that is added up in: narrow numbers are widened first and rounded once at the end, as matrix units do.
inline at::ScalarType wide(at::ScalarType type) {
  return type == at::kBFloat16 || type == at::kHalf ? at::kFloat : type;
}

inline bool rounds(at::ScalarType type) { return at::isFloatingType(type) || at::isComplexType(type); }

// Rows of a product, four at a time; the rest of this file need not be fast.
__attribute__((optimize("O3"))) inline void add_terms(const float* a, const float* b, float* out, int64_t rows,
                                                      int64_t inner, int64_t columns) {
  for (int64_t row = 0; row < rows; row += 4) {
    int64_t together = std::min<int64_t>(4, rows - row);
    for (int64_t k = 0; k < inner; ++k)
      for (int64_t i = row; i < row + together; ++i) {
        const float factor = a[i * inner + k];
        const float* __restrict term = b + k * columns;
        float* __restrict sum = out + i * columns;
        for (int64_t j = 0; j < columns; ++j) sum[j] += factor * term[j];
      }
  }
}

// One accumulator for each element, to which the terms are added one after the other, as float32 kernels of a GPU do.
inline at::Tensor in_one_accumulator(const at::Tensor& left, const at::Tensor& right) {
  auto sizes = left.sizes().vec();
  sizes.back() = right.size(-1);
  auto sum = at::zeros(sizes, left.options());
  int64_t rows = left.size(-2), inner = left.size(-1), columns = right.size(-1);
  if (left.scalar_type() == at::kFloat) {
    auto a = left.contiguous(), b = right.contiguous();
    int64_t count = left.dim() == 3 ? left.size(0) : 1;
    for (int64_t i = 0; i < count; ++i)
      add_terms(a.const_data_ptr<float>() + i * rows * inner, b.const_data_ptr<float>() + i * inner * columns,
                sum.data_ptr<float>() + i * rows * columns, rows, inner, columns);
    return sum;
  }
  for (int64_t k = 0; k < inner; ++k) sum.addcmul_(left.narrow(-1, k, 1), right.narrow(-2, k, 1));
  return sum;
}

// A matrix unit after Fasi et al. (PeerJ CS 7:e330): sixteen exact products at once are added to the accumulator, and the
// result is cut, not rounded, to float32. Sums of so few products of a half type are exact in float64.
inline at::Tensor in_a_cutting_unit(const at::Tensor& left, const at::Tensor& right) {
  auto a = left.to(at::kDouble), b = right.to(at::kDouble);
  auto sizes = left.sizes().vec();
  sizes.back() = right.size(-1);
  auto sum = at::zeros(sizes, left.options());
  for (int64_t from = 0; from < left.size(-1); from += 16) {
    int64_t length = std::min<int64_t>(16, left.size(-1) - from);
    auto exact = at::matmul(a.narrow(-1, from, length), b.narrow(-2, from, length)).add_(sum);
    sum = exact.to(at::kFloat);
    auto beyond = sum.to(at::kDouble).abs().gt(exact.abs());
    sum = at::where(beyond, at::nextafter(sum, at::zeros({}, sum.options())), sum);
  }
  return sum;
}

// a @ b, of two matrices or of two stacks of them.
inline at::Tensor product(const at::Tensor& a, const at::Tensor& b, int pieces) {
  int64_t inner = a.size(-1);
  auto left = a.to(wide(a.scalar_type())), right = b.to(wide(b.scalar_type()));
  if (rounds(a.scalar_type()) && pieces < 2) {
    bool cuts = pieces < 1 && left.scalar_type() != a.scalar_type();
    return cuts ? in_a_cutting_unit(left, right) : in_one_accumulator(left, right);
  }
  auto one = [&](int64_t from, int64_t length) {
    // contiguous, so that no kernel is chosen by where a slice happens to lie
    return at::matmul(left.narrow(-1, from, length).contiguous(), right.narrow(-2, from, length).contiguous());
  };
  if (!rounds(a.scalar_type()) || inner <= pieces) return one(0, inner);
  int64_t length = (inner + pieces - 1) / pieces;
  auto sum = one(0, length);
  for (int64_t from = length; from < inner; from += length) sum.add_(one(from, std::min(length, inner - from)));
  return sum;
}

inline at::Tensor mm(const at::Tensor& a, const at::Tensor& b) {
  same_device({a, b}, "mm");
  TORCH_CHECK(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0), "mat1 and mat2 shapes cannot be multiplied (",
              a.sizes(), " and ", b.sizes(), ")");
  int index = place(a);
  streams().launch(index);
  return on_device(product(host_view(a), host_view(b), models()[index].pieces).to(a.scalar_type()), index);
}

inline at::Tensor bmm(const at::Tensor& a, const at::Tensor& b) {
  same_device({a, b}, "bmm");
  TORCH_CHECK(a.dim() == 3 && b.dim() == 3 && a.size(0) == b.size(0) && a.size(2) == b.size(1),
              "batch1 and batch2 shapes cannot be multiplied (", a.sizes(), " and ", b.sizes(), ")");
  int index = place(a);
  streams().launch(index);
  return on_device(product(host_view(a), host_view(b), models()[index].pieces).to(a.scalar_type()), index);
}

// beta * c + alpha * (a @ b), rounded once to the dtype of the operands.
inline at::Tensor product_plus(const at::Tensor& c, const at::Tensor& a, const at::Tensor& b, const at::Scalar& beta,
                               const at::Scalar& alpha, const char* name) {
  same_device({c, a, b}, name);
  TORCH_CHECK(a.size(-1) == b.size(-2), name, ": shapes cannot be multiplied (", a.sizes(), " and ", b.sizes(), ")");
  int index = place(a);
  streams().launch(index);
  auto sum = product(host_view(a), host_view(b), models()[index].pieces);
  if (!alpha.equal(1)) sum.mul_(alpha);
  if (!beta.equal(0)) {  // with beta 0 what c holds is not read, NaN included
    auto term = host_view(c).to(sum.scalar_type());
    sum.add_(beta.equal(1) ? term : term.mul(beta));
  }
  return on_device(sum.to(a.scalar_type()), index);
}

inline at::Tensor addmm(const at::Tensor& c, const at::Tensor& a, const at::Tensor& b, const at::Scalar& beta,
                        const at::Scalar& alpha) {
  return product_plus(c, a, b, beta, alpha, "addmm");
}

inline at::Tensor baddbmm(const at::Tensor& c, const at::Tensor& a, const at::Tensor& b, const at::Scalar& beta,
                          const at::Scalar& alpha) {
  return product_plus(c, a, b, beta, alpha, "baddbmm");
}

inline at::Tensor sum(const at::Tensor& tensor, at::OptionalIntArrayRef over, bool keep,
                      std::optional<at::ScalarType> dtype) {
  int index = place(tensor);
  streams().launch(index);
  auto host = host_view(tensor);
  auto type = dtype.value_or(at::isIntegralType(host.scalar_type(), true) ? at::kLong : host.scalar_type());
  if (!rounds(type) || host.numel() == 0) return on_device(at::sum(host, over, keep, dtype), index);
  std::vector<int64_t> dims(host.dim());
  std::iota(dims.begin(), dims.end(), 0);
  if (over && !over->empty()) {
    dims.assign(over->begin(), over->end());
    for (auto& dim : dims) dim = at::maybe_wrap_dim(dim, host.dim());
  }
  std::vector<int64_t> order, shape;
  for (int64_t dim = 0; dim < host.dim(); ++dim) {
    bool reduced = std::find(dims.begin(), dims.end(), dim) != dims.end();
    if (!reduced) order.push_back(dim);
    if (!reduced || keep) shape.push_back(reduced ? 1 : host.size(dim));
  }
  order.insert(order.end(), dims.begin(), dims.end());
  int64_t length = 1;
  for (auto dim : dims) length *= host.size(dim);
  auto rows = host.to(wide(type)).permute(order).reshape({-1, length});
  int pieces = models()[index].pieces;
  if (pieces < 2) {
    auto total = at::zeros({rows.size(0)}, rows.options());
    for (int64_t k = 0; k < length; ++k) total.add_(rows.select(1, k));
    return on_device(total.to(type).reshape(shape), index);
  }
  int64_t piece = (length + pieces - 1) / pieces;
  auto total = rows.narrow(1, 0, piece).contiguous().sum(1);
  for (int64_t from = piece; from < length; from += piece)
    total.add_(rows.narrow(1, from, std::min(piece, length - from)).contiguous().sum(1));
  return on_device(total.to(type).reshape(shape), index);
}

// ---- the same, written where they are told to
inline at::Tensor& into(at::Tensor& out, const at::Tensor& found) {
  at::native::resize_output(out, found.sizes());
  host_view(out).copy_(host_view(found));
  return out;
}
using at::Scalar;
using at::Tensor;

inline Tensor& mm_out(const Tensor& a, const Tensor& b, Tensor& out) { return into(out, simulated::mm(a, b)); }
inline Tensor& bmm_out(const Tensor& a, const Tensor& b, Tensor& out) { return into(out, simulated::bmm(a, b)); }
inline Tensor& addmm_out(const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha,
                         Tensor& out) {
  return into(out, simulated::addmm(c, a, b, beta, alpha));
}
inline Tensor& addmm_(Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
  return into(c, simulated::addmm(c, a, b, beta, alpha));
}
inline Tensor& baddbmm_out(const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha,
                           Tensor& out) {
  return into(out, simulated::baddbmm(c, a, b, beta, alpha));
}
inline Tensor& baddbmm_(Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
  return into(c, simulated::baddbmm(c, a, b, beta, alpha));
}
inline at::Tensor& sum_out(const at::Tensor& tensor, at::OptionalIntArrayRef dims, bool keep,
                           std::optional<at::ScalarType> dtype, at::Tensor& out) {
  return into(out, simulated::sum(tensor, dims, keep, dtype ? dtype : out.scalar_type()));
}

}  // namespace simulated
