"""Products with rounded operands, against the same products written out by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from consistency.numerics.precision import Precision
from consistency.numerics.reduced_products import ReducedProducts, rounded_to_bfloat16, truncated_to_tf32

CUTS: dict[Precision, Callable[[torch.Tensor], torch.Tensor]] = {
    Precision.TF32: truncated_to_tf32,
    Precision.BFLOAT16: rounded_to_bfloat16,
}


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).standard_normal(shape, dtype=np.float32))


def reduced(precision: Precision) -> ReducedProducts:
    return ReducedProducts(matmul=precision, convolution=precision)


@pytest.fixture(params=list(CUTS), ids=str)
def precision(request: pytest.FixtureRequest) -> Precision:
    found: Precision = request.param
    return found


PRODUCTS: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...], tuple[int, ...]]] = {
    "matmul": (torch.matmul, ((5, 7), (7, 3)), (0, 1)),
    "batched": (torch.matmul, ((2, 5, 7), (2, 7, 3)), (0, 1)),
    "vector": (torch.matmul, ((5, 7), (7,)), (0, 1)),
    "dot": (torch.matmul, ((7,), (7,)), (0, 1)),
    "linear": (functional.linear, ((4, 7), (3, 7), (3,)), (0, 1)),
    "linear of three axes": (functional.linear, ((2, 4, 7), (3, 7), (3,)), (0, 1)),
    "conv1d": (functional.conv1d, ((2, 3, 9), (4, 3, 2), (4,)), (0, 1)),
    "conv2d": (functional.conv2d, ((2, 3, 9, 9), (4, 3, 2, 2), (4,)), (0, 1)),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), ((2, 5, 7), (2, 3, 7)), (0, 1)),
    "baddbmm": (torch.baddbmm, ((2, 5, 3), (2, 5, 7), (2, 7, 3)), (1, 2)),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_operands_are_rounded_and_nothing_else(name: str, inference: bool, precision: Precision) -> None:
    compute, shapes, places = PRODUCTS[name]
    inputs = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    by_hand = compute(*(CUTS[precision](x) if i in places else x for i, x in enumerate(inputs)))
    with torch.inference_mode(inference), reduced(precision):
        found = compute(*inputs)
    assert torch.equal(found, by_hand)
    assert not torch.equal(found, compute(*inputs))


def test_gradients_are_products_of_rounded_operands_too(precision: Precision) -> None:
    cut = CUTS[precision]
    x, weight, gradient = normal(4, 7), normal(3, 7, seed=2), normal(4, 3, seed=3)
    weight.requires_grad_()
    x.requires_grad_()
    with reduced(precision):
        functional.linear(x, weight).backward(gradient)
    assert x.grad is not None
    assert weight.grad is not None
    assert torch.equal(x.grad, cut(gradient) @ cut(weight.detach()))
    assert torch.equal(weight.grad, cut(gradient).T @ cut(x.detach()))


def test_gradients_of_a_convolution(precision: Precision) -> None:
    cut = CUTS[precision]
    x, weight, gradient = normal(2, 3, 9), normal(4, 3, 2, seed=2).requires_grad_(), normal(2, 4, 8, seed=3)
    with reduced(precision):
        functional.conv1d(x, weight).backward(gradient)
    by_hand = weight.detach().clone().requires_grad_()
    wanted = torch.autograd.grad(functional.conv1d(cut(x), by_hand), by_hand, cut(gradient))[0]
    assert weight.grad is not None
    assert torch.equal(weight.grad, wanted)


def test_attention_by_its_formula(precision: Precision) -> None:
    cut = CUTS[precision]
    q, k, v = (normal(1, 2, 6, 8, seed=i) for i in range(3))
    with sdpa_kernel(SDPBackend.MATH), reduced(precision):
        found = functional.scaled_dot_product_attention(q, k, v)
    root = 8**-0.25
    weights = torch.softmax(cut(q * root) @ cut(k * root).transpose(-1, -2), dim=-1)
    torch.testing.assert_close(found, cut(weights) @ cut(v), rtol=1e-5, atol=1e-6)
    plain = functional.scaled_dot_product_attention(q, k, v)
    assert float((found - plain).abs().max()) > 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_left_alone(dtype: torch.dtype, precision: Precision) -> None:
    a, b = normal(5, 7).to(dtype), normal(7, 3).to(dtype)
    with reduced(precision):
        assert torch.equal(a @ b, torch.matmul(a.clone(), b))


def test_convolutions_and_matrix_products_have_a_precision_each() -> None:
    x, weight, a = normal(2, 3, 9), normal(4, 3, 2), normal(5, 5)
    with ReducedProducts(matmul=Precision.FLOAT32, convolution=Precision.TF32):
        product, convolved = a @ a, functional.conv1d(x, weight)
    assert torch.equal(product, a @ a)
    assert torch.equal(convolved, functional.conv1d(truncated_to_tf32(x), truncated_to_tf32(weight)))


def test_cuts_are_within_the_precision_s_error_and_keep_what_is_no_number() -> None:
    values = normal(4096)
    for precision, cut in CUTS.items():
        error = ((cut(values) - values).abs() / values.abs()).max()
        assert 0.4 * precision.operand_error < float(error) <= precision.operand_error
        odd = torch.tensor([float("inf"), float("-inf"), 0.0, -0.0])
        assert torch.equal(cut(odd).view(torch.int32), odd.view(torch.int32))
        assert cut(torch.tensor([float("nan")])).isnan().all()


@pytest.mark.skipif(
    not (torch.ops.mkldnn._is_mkldnn_bf16_supported() and torch.cpu._is_amx_tile_supported()),
    reason="this processor has no AMX",
)
def test_units_of_this_processor_make_the_same_error() -> None:
    """The real thing: oneDNN's AMX kernels, which round operands to bfloat16 where `medium` permits it."""
    a, b = normal(256, 128), normal(128, 192, seed=2)
    exact = a.double() @ b.double()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        native = a @ b
    finally:
        torch.set_float32_matmul_precision(before)
    with reduced(Precision.BFLOAT16):
        simulated = a @ b
    errors = [float((found - exact).abs().max()) for found in (native, simulated, a @ b)]
    assert errors[0] == pytest.approx(errors[1], rel=0.01)
    assert errors[2] < errors[0] / 100
    torch.testing.assert_close(native, simulated, rtol=0, atol=errors[2] * 10)
