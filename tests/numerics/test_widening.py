"""Large weights are widened in parts, and their products stay what they were."""

from __future__ import annotations

import pytest
import torch

from consistency.numerics import sizes, widening
from consistency.numerics.exact import Float64Mode
from consistency.numerics.rounded_products import RoundedProducts
from consistency.numerics.widening import Widening


def made(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the buffer hold few columns."""
    monkeypatch.setattr(sizes, "PART_BYTES", 8 * 300 * 64)
    monkeypatch.setattr(widening, "_LARGE", 1)


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("bias", [None, (500,), (9, 500), (9, 1), ()])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_product_in_parts_is_the_product(dtype: torch.dtype, transposed: bool, bias: tuple[int, ...] | None) -> None:
    left, weight = made(9, 300, seed=0, dtype=dtype), made(300, 500, seed=1, dtype=dtype)
    weight = weight.t().contiguous().t() if transposed else weight
    expected, added = left.double() @ weight.double(), None
    if bias is not None:
        added = made(*bias, seed=2, dtype=dtype)
        expected = expected + added.double()
    with Float64Mode():
        found = left @ weight if added is None else torch.addmm(added, left, weight)
    assert found.dtype == torch.float64
    assert torch.allclose(found, expected, rtol=1e-13, atol=1e-12)


@pytest.mark.usefixtures("in_parts")
def test_the_buffer_holds_no_more_than_its_size() -> None:
    wide = Widening(torch.float64, frozenset({torch.bfloat16}))
    for rows, columns in ((300, 500), (100, 4000), (20_000, 3)):
        found = wide.product(torch.ops.aten.mm.default, (made(2, rows, seed=0), made(rows, columns, seed=1)))
        assert found is not None
        assert found.shape == (2, columns)
    assert wide._buffer is not None
    assert wide._buffer.nbytes <= max(sizes.PART_BYTES, 8 * 20_000), "one column at least"


def test_what_is_no_large_narrow_product_is_left_to_others() -> None:
    wide = Widening(torch.float64, frozenset({torch.bfloat16}))
    x = made(300, 300, seed=0)
    assert wide.product(torch.ops.aten.mm.default, (x, x.double())) is None
    assert wide.product(torch.ops.aten.mm.default, (x, x[:, :3])) is None
    assert wide.product(torch.ops.aten.bmm.default, (x[None], x[None])) is None


def test_rows_of_a_table_are_selected_before_they_are_widened() -> None:
    table, ids = made(50, 8, seed=0), torch.tensor([[3, 3, 49]])
    with Float64Mode():
        found = torch.nn.functional.embedding(ids, table)
    assert found.dtype == torch.float64
    assert torch.equal(found, table.double()[ids])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_in_float32_kernels_err_as_native_ones(dtype: torch.dtype) -> None:
    """One rounding of a nearly exact sum, as in fast native kernels, whose share of other results is below 0.1 %."""
    x, weight, bias = (made(*size, seed=1, dtype=dtype) for size in ((64, 256), (512, 256), (512,)))
    exact = x.double() @ weight.double().t() + bias.double()
    with RoundedProducts():
        found = torch.nn.functional.linear(x, weight, bias)
        batched = torch.bmm(x.view(2, 32, 256), weight.t().expand(2, 256, 512))
        untouched = torch.mm(x.float(), weight.t().float())
    assert found.dtype == batched.dtype == dtype
    assert untouched.dtype == torch.float32
    assert float((found != exact.to(dtype)).float().mean()) < 2e-3
    native = torch.nn.functional.linear(x, weight, bias)
    errors = [float((result.double() - exact).abs().max()) for result in (native, found)]
    assert 1 / 2 <= errors[1] / errors[0] <= 2


def test_a_convolution_and_its_gradients_keep_their_dtype() -> None:
    x, kernel = made(2, 4, 9, 9, seed=0).requires_grad_(), made(6, 4, 3, 3, seed=1).requires_grad_()
    with RoundedProducts():
        found = torch.nn.functional.conv2d(x, kernel)
        found.backward(torch.ones_like(found))
    assert found.dtype == torch.bfloat16
    assert x.grad is not None
    assert kernel.grad is not None
    assert x.grad.dtype == kernel.grad.dtype == torch.bfloat16
    exact = torch.nn.functional.conv2d(x.detach().double(), kernel.detach().double())
    assert float((found.detach() != exact.bfloat16()).float().mean()) < 2e-3
