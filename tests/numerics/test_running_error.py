"""The bounds of single operations: no kernel exceeds them, and an error of a few times the bound does."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn import functional

from consistency.case.stage import Level
from consistency.numerics.dtype import UNIT_ROUNDOFF, named
from consistency.numerics.precision import Precision
from consistency.numerics.running_error import Arithmetic, Tracked, measure_tracked
from consistency.stages.operators import worker as operators
from consistency.stages.operators.table import Operation, operations

TABLE = [(operation, dtype) for operation in operations(Level.THOROUGH) for dtype in operation.dtypes]
NAMES = [f"{operation.name} {dtype} {operation.size}" for operation, dtype in TABLE]
FLOAT32 = Arithmetic.of(torch.float32)


def share(actual: torch.Tensor, exact: Tracked) -> float:
    """Return the largest share of the bound that an element uses up."""
    found = measure_tracked(actual, exact).ratio
    assert found is not None
    return float(found)


def looked_at(operation: Operation, dtype: str) -> tuple[torch.Tensor, Tracked]:
    host = [operators.given(values, dtype) for values in operation.inputs()]
    return operators.compute(operation, host), operators._exact(operation, host, Arithmetic.of(named(dtype)))


@pytest.mark.parametrize(("operation", "dtype"), TABLE, ids=NAMES)
def test_a_kernel_is_inside_its_bound_and_a_worse_one_is_not(operation: Operation, dtype: str) -> None:
    actual, exact = looked_at(operation, dtype)
    assert actual.dtype == named(dtype)
    assert share(actual, exact) <= 1
    if operation.name == "embedding":  # the next number is far beyond half the smallest
        wrong = torch.nextafter(actual, torch.zeros_like(actual)).to(torch.float64)
    else:
        wrong = actual.to(torch.float64) + 3 * torch.from_numpy(exact.allowed)
    assert share(wrong.to(named(dtype)), exact) > 1


@pytest.mark.parametrize(
    "operation", [o for o in operations(Level.STANDARD) if o.name != "embedding"], ids=lambda o: f"{o.name} {o.size}"
)
def test_a_thousandth_too_much_is_seen_in_float32(operation: Operation) -> None:
    actual, exact = looked_at(operation, "float32")
    assert share(actual * 1.001, exact) > 2


@pytest.mark.parametrize(
    "operation", [o for o in operations(Level.STANDARD) if o.name == "matmul"], ids=lambda o: f"{o.name} {o.size}"
)
def test_products_of_cut_operands_are_outside_the_bound_and_inside_that_of_tf32(operation: Operation) -> None:
    host = [operators.given(values, "float32") for values in operation.inputs()]
    cut = [(tensor.view(torch.int32) & ~0x1FFF).view(torch.float32) for tensor in host]
    actual = operators.compute(operation, cut)
    assert share(actual, operators._exact(operation, host, FLOAT32)) > 2
    in_tf32 = operators._exact(operation, host, Arithmetic.of(torch.float32, products=Precision.TF32))
    assert share(actual, in_tf32) <= 1


def inputs(kind: str, length: int) -> np.ndarray:
    """Return numbers that bounds are easily wrong about."""
    g = np.random.Generator(np.random.PCG64(7))
    x = g.standard_normal((4, length))
    match kind:
        case "cancelling":
            x = np.concatenate([x, -x + 1e-6 * g.standard_normal(x.shape)], axis=-1)
        case "subnormal":
            x = x * 2.0**-140
        case "tiny":
            x = x * 1e-30
        case "huge":
            x = x * 1e12
        case "mixed":
            x = x * 10.0 ** g.integers(-12, 12, x.shape)
        case "far from zero":
            x = x + 1000
    return x.astype(np.float32).astype(np.float64)


KINDS = ("plain", "cancelling", "subnormal", "tiny", "huge", "mixed", "far from zero")
COMPOSITES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[Tracked], Tracked]]] = {
    "sum": (lambda x: x.sum(-1, keepdim=True), Tracked.sum),
    "cumsum": (lambda x: x.cumsum(-1), Tracked.cumsum),
    "product": (lambda x: x @ x.T, lambda x: x.matmul(x.moved(np.transpose))),
    "squares": (lambda x: x * x - x, lambda x: x * x - x),
    "softmax": (lambda x: functional.softmax(x, -1), lambda x: (p := (x - x.max()).exp()) / p.sum()),
    "inverse root": (lambda x: torch.rsqrt(x * x + 1), lambda x: (x * x + x.by.constant(1.0)).rsqrt()),
    "root": (lambda x: (x.abs() * 3).sqrt(), lambda x: (x.moved(np.abs) * x.by.constant(3.0)).sqrt()),
    "log": (lambda x: (x * x + 1).log(), lambda x: (x * x + x.by.constant(1.0)).log()),
    "tanh": (lambda x: torch.tanh(x * 3), lambda x: (x * x.by.constant(3.0)).tanh()),
    "erf": (lambda x: torch.erf(x * 3), lambda x: (x * x.by.constant(3.0)).erf()),
    "sin and cos": (lambda x: x.sin() / x.cos(), lambda x: x.sin() / x.cos()),
}


@pytest.mark.parametrize(("kind", "name"), list(itertools.product(KINDS, COMPOSITES)))
def test_no_input_takes_a_kernel_out_of_its_bound(kind: str, name: str) -> None:
    compute, track = COMPOSITES[name]
    for length in (1, 7, 500):
        x = inputs(kind, length)
        with np.errstate(all="ignore"):
            exact = track(FLOAT32.known(x))
        actual = compute(torch.from_numpy(x).to(torch.float32))
        finite = torch.from_numpy(np.abs(exact.value) < 3e38)  # what overflows float32 has no bound
        held = Tracked(value=exact.value[finite.numpy()], error=exact.error[finite.numpy()], by=exact.by)
        if held.value.size:
            assert share(actual[finite], held) <= 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_is_stored_is_rounded_once(dtype: str) -> None:
    by = Arithmetic.of(named(dtype))
    x = by.known(np.array([1.0, -3.0])).store()
    assert x.error == pytest.approx(np.array([1.0, 3.0]) * UNIT_ROUNDOFF[named(dtype)], rel=1e-6, abs=1e-7)
    assert FLOAT32.known(np.array([1.0])).store().error == 0


def test_a_sum_of_n_terms_is_off_by_n_roundings_of_the_magnitudes() -> None:
    found = FLOAT32.known(np.array([[1.0, -1.0, 2.0]])).sum()
    assert found.value == 2
    assert found.error == pytest.approx(3 * 2.0**-24 * 4, rel=1e-6)


def test_units_that_truncate_have_twice_the_roundoff() -> None:
    a = np.ones((1, 8))
    plain = Arithmetic.of(torch.bfloat16).known(a).matmul(Arithmetic.of(torch.bfloat16).known(a.T))
    by = Arithmetic.of(torch.bfloat16, truncating=True)
    assert by.known(a).matmul(by.known(a.T)).error == pytest.approx(2 * plain.error, rel=1e-6)


def test_a_float64_reference_may_be_off_as_much_as_what_it_judges() -> None:
    known = Arithmetic.of(torch.float64).known(np.ones((1, 4))).sum()
    assert known.allowed == 2 * known.error


def test_a_division_by_what_may_be_zero_has_no_bound() -> None:
    one = FLOAT32.known(np.array([1.0]))
    unsure = Tracked(value=np.array([1e-9]), error=np.array([1e-8]), by=FLOAT32)
    assert np.isinf((one / unsure).error)
    assert np.isinf(unsure.log().error)
    assert np.isinf(unsure.rsqrt().error)
    assert np.isfinite(unsure.sqrt().error)


def in_single_steps(x: torch.Tensor) -> torch.Tensor:
    """Return GELU as torch_xla writes it for a compiler: each step gives the dtype of the operand."""

    def number(value: float) -> torch.Tensor:
        return torch.tensor(value, dtype=x.dtype)

    inner = number((2 / np.pi) ** 0.5) * (x + number(0.044715) * x**3)
    return number(0.5) * x * (number(1.0) + torch.tanh(inner))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_steps_that_are_rounded_one_by_one_are_inside_a_bound_of_their_own_alone(dtype: str) -> None:
    operation = next(o for o in operations(Level.STANDARD) if o.name == "gelu_tanh")
    host = [operators.given(values, dtype) for values in operation.inputs()]
    actual = in_single_steps(*host)
    at_once = operators._exact(operation, host, Arithmetic.of(named(dtype)))
    by_steps = operators._exact(operation, host, Arithmetic.of(named(dtype), steps=True))
    assert share(actual, at_once) > 100
    assert 0.1 < share(actual, by_steps) <= 1
    wrong = actual.to(torch.float64) + 3 * torch.from_numpy(by_steps.allowed)
    assert share(wrong.to(named(dtype)), by_steps) > 1


def test_a_sum_in_a_half_type_has_no_bound_from_as_many_terms_as_its_roundoff_has() -> None:
    by = Arithmetic.of(torch.bfloat16, steps=True)
    assert by.known(np.ones((1, 255))).sum().error == pytest.approx(255 * 255, rel=0.01)  # n u / (1 - n u) of 255
    unbounded = by.known(np.array([[0.0, *[1.0] * 255]])).sum()
    assert np.isinf(unbounded.error).all()
    product = by.known(np.array([0.0, 2.0])) * unbounded
    assert product.error[0, 0] == pytest.approx(by.stored_floor, abs=1e-30)
    assert np.isinf(product.error[0, 1])


def test_float32_has_no_narrower_steps() -> None:
    assert Arithmetic.of(torch.float32, steps=True) == FLOAT32
