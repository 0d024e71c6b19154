"""What an assertion has to bear: kinds of results, of inputs and of functions, and what it says."""

from __future__ import annotations

import subprocess
import sys
import unittest
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from consistency.errors import UsageError
from consistency.testing import (
    Allow,
    Precision,
    Products,
    WithinRounding,
    assert_within_rounding,
    rounding_tolerance,
    within_rounding,
)
from tests.testing.functions import drawn, read_in_order, rms_norm, twice


def test_results_of_any_form_have_names() -> None:
    found = within_rounding(lambda x, y: {"a": (x * 2, [x @ y["b"]]), "n": 3}, drawn(6, 4), {"b": drawn(4, 4)})
    assert found
    names = ["result['a'][0]", "result['a'][1][0]", "result['n']", "gradient of input 0", "gradient of input 1['b']"]
    assert [one.name for one in found.results] == names


def test_inputs_are_rounded_once_and_not_changed() -> None:
    x = drawn(32, 16)
    kept = x.clone()
    assert within_rounding(lambda x: x.clone(), x, dtype=torch.bfloat16).results[0].error == 0
    assert torch.equal(x, kept)
    assert not x.requires_grad


def test_a_function_that_writes_in_place_is_judged_by_what_it_leaves() -> None:
    def adds(x: torch.Tensor, y: torch.Tensor) -> None:
        x.add_(y * y)

    assert within_rounding(adds, drawn(16, 16), drawn(16, 16, seed=1))

    def adds_otherwise(x: torch.Tensor, y: torch.Tensor) -> None:
        x.add_(y.abs())

    wrong = within_rounding(adds_otherwise, drawn(16, 16), drawn(16, 16, seed=1), reference=adds, gradients=False)
    assert [one.name for one in wrong.results if one.status == "outside"] == ["input 0 after the call"]
    clobbers = within_rounding(lambda x: (x * 2, x.zero_())[0], drawn(8, 8), reference=lambda x: x * 2, gradients=False)
    assert "the function changes it, and its reference does not: consumes= says that it may" in str(clobbers)


def test_random_numbers_are_the_same_in_each_pass() -> None:
    def noisy(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return functional.dropout(x, 0.4) + torch.rand_like(x) * torch.randn(x.shape, dtype=dtype)

    state = torch.get_rng_state()
    for dtype in (torch.float32, torch.bfloat16):
        assert within_rounding(lambda x, dtype=dtype: noisy(x, dtype), drawn(32, 32), dtype=dtype)
    assert torch.equal(torch.get_rng_state(), state)
    generator = torch.Generator().manual_seed(3)
    assert within_rounding(lambda x, g: x * torch.rand(x.shape, generator=g), drawn(8, 8), generator)


class TransposedWeightGradient(torch.autograd.Function):
    """A product whose backward pass returns the gradient of the weight transposed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return incoming[0] @ weight.T, (x.T @ incoming[0]).T


@pytest.mark.parametrize("seed", [0, 1, 42])
def test_incoming_gradients_are_not_what_the_inputs_were_drawn_as(seed: int) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(64, 64), torch.randn(64, 64)
    wrong = within_rounding(TransposedWeightGradient.apply, x, weight, reference=torch.matmul, dtype=torch.bfloat16)
    assert [result.name for result in wrong.results if result.status == "outside"] == ["gradient of input 1"]


@pytest.mark.parametrize("seed", [0, 1, 42])
def test_random_numbers_are_not_what_the_inputs_were_drawn_as(seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(64, 64)

    def with_other_noise(x: torch.Tensor) -> torch.Tensor:
        return x * x

    def with_noise(x: torch.Tensor) -> torch.Tensor:
        return x * torch.randn(x.shape)

    assert within_rounding(with_other_noise, x, reference=with_noise, gradients=False).status == "outside"


class ReadsGradientInOrder(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(_: Any, *incoming: torch.Tensor) -> torch.Tensor:
        return read_in_order(incoming[0]) * 2


def test_a_result_that_is_transposed_brings_the_kernel_a_gradient_that_is_not_contiguous() -> None:
    doubled: Callable[[torch.Tensor], torch.Tensor] = ReadsGradientInOrder.apply
    wrong = within_rounding(lambda x: doubled(x).T, drawn(8, 8), reference=lambda x: twice(x).T)
    assert [result.name for result in wrong.results if result.status == "outside"] == ["gradient of input 0"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_of_inputs_have_their_strides(dtype: torch.dtype) -> None:
    columns = drawn(16, 32)[:, ::2]
    wrong = within_rounding(lambda x: read_in_order(x) * 2, columns, reference=twice, dtype=dtype, gradients=False)
    assert wrong.status == "outside"
    assert within_rounding(twice, columns, dtype=dtype)


@pytest.mark.parametrize("first", [1, 40])
def test_copies_of_inputs_do_not_start_where_their_memory_does(first: int) -> None:
    rows = drawn(64, 16)[first : first + 16]

    def from_the_start(x: torch.Tensor) -> torch.Tensor:
        return read_in_order(x, offset=0) * 2

    assert within_rounding(from_the_start, rows, reference=twice, gradients=False).status == "outside"
    places: list[int] = []

    def noting_where(x: torch.Tensor) -> torch.Tensor:
        places.append(int(x.storage_offset()))
        return x * 2

    assert within_rounding(noting_where, rows, reference=twice)
    assert {place % 256 for place in places} == {first * 16 % 256}
    assert places[0] < 512


def test_whole_numbers_are_equal_where_rounding_decides_nothing() -> None:
    x = drawn(64, 32)
    assert within_rounding(lambda x: (x @ x.T).argmax(-1), x)
    wrong = within_rounding(lambda x: (x @ x.T).argmin(-1), x, reference=lambda x: (x @ x.T).argmax(-1))
    assert wrong.status == "outside"
    assert within_rounding(lambda x: x > 0.5, x, reference=lambda x: x >= 0.5)
    assert not within_rounding(lambda x: x > 0.5, x, reference=lambda x: x > 0.4)


def test_a_cast_of_what_is_whole_already_decides_nothing() -> None:
    def counted(x: torch.Tensor) -> torch.Tensor:
        return (x * 1000).round().to(torch.int64)

    x = drawn(16, 16)
    for offset in (1, 5):
        wrong = within_rounding(lambda x, by=offset: counted(x) + by, x, reference=counted, gradients=False)
        assert wrong.status == "outside"
    near = torch.tensor([[0.5, 1.5, 2.5]] * 4) / 1000  # where rounding decides
    assert within_rounding(lambda x: (x * 1000 + 1e-6).round().to(torch.int64), near, reference=counted)


def nearly_tied() -> tuple[torch.Tensor, torch.Tensor]:
    """Return operands of which two columns of the product differ by what few of the passes with noise are off by."""
    x, weight = drawn(256, 512), drawn(512, 8, seed=1)
    weight[:, 1] = weight[:, 0] * (1 + 1e-6)
    return x, weight


Choice = Callable[[torch.Tensor], torch.Tensor]


@pytest.mark.parametrize(
    ("choose", "otherwise"),
    [
        (lambda s: s.argmax(-1), lambda s: s.argmin(-1)),
        (lambda s: s.topk(2).indices, lambda s: s.topk(2, largest=False).indices),
        (lambda s: s[:, :1] > s[:, 1:3], lambda s: s[:, :1] > s[:, 2:4]),
    ],
    ids=["argmax", "topk", "comparison"],
)
def test_another_index_is_right_where_the_margin_is_below_rounding(choose: Choice, otherwise: Choice) -> None:
    x, weight = nearly_tied()

    def other(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scores = x @ weight
        scores[:, 0] += 3e-5 * torch.where(torch.arange(len(x)) % 2 == 0, 1.0, -1.0)
        return choose(scores)

    def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return choose(x @ weight)

    def wrong(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return otherwise(x @ weight)

    assert not torch.equal(other(x, weight), exact(x, weight))
    assert within_rounding(other, x, weight, reference=exact, gradients=False)
    assert within_rounding(wrong, x, weight, reference=exact, gradients=False).status == "outside"


def test_nan_and_infinity_are_in_equal_places() -> None:
    x = drawn(16, 16)
    x[2, 3], x[4, 5] = torch.nan, torch.inf
    assert within_rounding(lambda x: x * 2, x)
    moved = within_rounding(lambda x: (x * 2).roll(1), x, reference=lambda x: x * 2)
    assert "not the same NaN or infinity" in str(moved)
    filled = within_rounding(lambda x: (x * 2).nan_to_num(), x, reference=lambda x: x * 2)
    assert filled.status == "outside"


def test_a_reference_that_is_nan_is_an_error_unless_that_is_meant() -> None:
    x = drawn(8, 8)
    with pytest.raises(UsageError, match="the reference is NaN in its result"):
        within_rounding(torch.log, x)
    assert within_rounding(torch.log, x, gradients=False, allow=Allow(nan=True))


def test_values_beyond_the_dtype_are_infinite_and_what_overflows_on_the_way_is_inconclusive() -> None:
    x = drawn(16, 16) * 300
    assert within_rounding(lambda x: x * x, x, dtype=torch.float16, gradients=False)
    lost = within_rounding(lambda x: (x * x * x) / x / x, x, dtype=torch.float16, gradients=False)
    assert lost.status == "inconclusive"
    assert "passes with noise overflow" in str(lost)


def test_complex_numbers_are_judged_by_their_parts() -> None:
    x = torch.complex(drawn(16, 16), drawn(16, 16, seed=1))
    assert within_rounding(lambda x: torch.fft.fft(x) * x.conj(), x)
    assert not within_rounding(lambda x: (x * x).conj(), x, reference=lambda x: x * x)


def test_a_module_is_a_function_of_its_parameters() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False), torch.nn.BatchNorm1d(16))
    found = within_rounding(layer, drawn(32, 16))
    assert found
    assert {"gradient of 0.weight", "1.running_mean after the call"} <= {one.name for one in found.results}
    other = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False), torch.nn.BatchNorm1d(16, eps=1e-3))
    assert within_rounding(layer, drawn(32, 16), reference=other).status == "outside"
    with pytest.raises(UsageError, match="a module needs a module"):
        within_rounding(layer, drawn(32, 16), reference=torch.relu)
    with pytest.raises(UsageError, match="parameters of other names") as raised:
        within_rounding(layer, drawn(32, 16), reference=torch.nn.Sequential(layer))
    assert "0.0.weight" in str(raised.value)


def test_autocast_rounds_in_the_passes_too() -> None:
    x, weight = drawn(16, 64), drawn(64, 32, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = within_rounding(torch.matmul, x, weight)
    assert found
    assert found.results[0].error > 1e-3
    assert not within_rounding(lambda x, w: (x.bfloat16() @ w.bfloat16()).float(), x, weight, reference=torch.matmul)


def test_autocast_keeps_nothing_that_noise_has_moved() -> None:
    x, weight = drawn(16, 64), torch.nn.Parameter(drawn(64, 32, seed=1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = x @ weight
        torch.clear_autocast_cache()
        assert within_rounding(lambda x: x @ weight, x)
        assert torch.equal(x @ weight, before)


def test_a_few_elements_may_be_off_where_no_pass_is() -> None:
    """Of one element all passes may be exact by chance, and a library's exponential is off by a unit."""

    def off_by_one(x: torch.Tensor) -> torch.Tensor:
        return torch.nextafter(torch.exp(x), torch.zeros(()))

    for seed in range(40):
        assert within_rounding(off_by_one, drawn(1, seed=seed), reference=torch.exp, gradients=False)
    assert not within_rounding(lambda x: x.exp() * (1 + 1e-4), drawn(1), reference=torch.exp, gradients=False)


def test_what_was_compiled_runs_as_written_in_the_passes() -> None:
    def kernel(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        """Compute as Inductor's kernels do, which no mode sees."""

        def called(*inputs: torch.Tensor) -> object:
            with _disable_current_modes():
                return graph(*inputs)

        return called

    found = within_rounding(torch.compile(rms_norm, backend=kernel), drawn(16, 32), drawn(32, seed=1))
    assert found
    assert found.results[0].allowed > 0


def test_a_function_without_float64_needs_a_reference() -> None:
    def fixed(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().nbytes() != 2 * x.numel():  # as code in C++ would see it
            raise TypeError("only bfloat16")
        return x * 2

    with pytest.raises(UsageError, match="reference= takes a function"):
        within_rounding(fixed, drawn(8, 8), dtype=torch.bfloat16)
    assert within_rounding(fixed, drawn(8, 8), dtype=torch.bfloat16, reference=lambda x: x + x)
    with pytest.raises(UsageError, match="no input has a dtype whose rounding is known"):
        within_rounding(torch.exp, drawn(4).double())


def test_a_missing_gradient_is_outside_and_values_alone_can_be_asked_for() -> None:
    x = drawn(8, 8)
    found = within_rounding(lambda x: (x * 2).detach(), x, reference=lambda x: x * 2)
    assert "gradients=False compares values alone" in str(found)
    assert within_rounding(lambda x: (x * 2).detach(), x, reference=lambda x: x * 2, gradients=False)
    chosen = within_rounding(torch.mul, x, drawn(8, 8, seed=1).requires_grad_())
    assert [one.name for one in chosen.results] == ["result", "gradient of input 1"]


def test_a_wrong_shape_is_outside() -> None:
    found = within_rounding(lambda x: x.T, drawn(4, 6), reference=lambda x: x * 1.0, gradients=False)
    assert "its shape is (6, 4), the reference's (4, 6)" in str(found)


def narrowed_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x @ weight).to(torch.bfloat16)


def test_a_result_of_another_dtype_than_the_references_is_outside() -> None:
    operands = drawn(16, 32), drawn(32, 8, seed=1)
    narrow = within_rounding(narrowed_product, *operands, reference=torch.matmul)
    assert [result.name for result in narrow.results if result.status == "outside"] == ["result"]
    assert "its dtype is bfloat16, the reference's float32 for the same inputs: allow=Allow(dtype=True)" in str(narrow)
    assert within_rounding(narrowed_product, *operands, reference=torch.matmul, allow=Allow(dtype=True))
    assert within_rounding(narrowed_product, *operands, reference=narrowed_product)


def test_a_reference_in_float32_of_a_kernel_in_a_half_type_is_said_to_be_one() -> None:
    def in_float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x.float() @ weight.float()

    def stored(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return in_float32(x, weight).to(x.dtype)

    operands = drawn(16, 32), drawn(32, 8, seed=1)
    wide = within_rounding(torch.matmul, *operands, reference=in_float32, dtype=torch.bfloat16)
    assert "its dtype is bfloat16, the reference's float32" in str(wide)
    assert within_rounding(torch.matmul, *operands, reference=in_float32, dtype=torch.bfloat16, allow=Allow(dtype=True))
    assert within_rounding(torch.matmul, *operands, reference=stored, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert within_rounding(torch.matmul, *operands, reference=torch.matmul)


def test_whole_numbers_of_another_dtype_are_outside_before_they_wrap_around() -> None:
    def counted(x: torch.Tensor) -> torch.Tensor:
        return (x * 1000).round().to(torch.int64)

    def wrapped(x: torch.Tensor) -> torch.Tensor:
        return counted(x).to(torch.int8)

    x = drawn(16, 16)
    assert "its dtype is int8, the reference's int64" in str(within_rounding(wrapped, x, reference=counted))
    allow = Allow(dtype=True)
    assert within_rounding(wrapped, x, reference=counted, allow=allow).status == "outside"
    assert within_rounding(wrapped, x / 100, reference=counted, allow=allow)
    kinds = within_rounding(counted, x, reference=lambda x: x * 1000, allow=allow, gradients=False)
    assert str(kinds).endswith("its dtype is int64, the reference's float32 for the same inputs")


class NarrowGradient(torch.autograd.Function):
    """A function whose backward pass computes in bfloat16: autograd widens what it returns."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(_: Any, *incoming: torch.Tensor) -> torch.Tensor:
        return incoming[0].to(torch.bfloat16) * 1.3


def test_a_gradient_in_a_narrower_dtype_is_outside_by_its_values() -> None:
    wrong = within_rounding(NarrowGradient.apply, drawn(16, 16), reference=lambda x: x * 1.3 + x.detach() * 0.7)
    assert [result.name for result in wrong.results if result.status == "outside"] == ["gradient of input 0"]


def test_the_message_has_element_error_and_allowance() -> None:
    def wrong(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        found = rms_norm(x, weight)
        found[3, 7] *= 1.001
        return found

    with pytest.raises(AssertionError) as raised:
        assert_within_rounding(wrong, drawn(16, 64), drawn(64, seed=1), reference=rms_norm, gradients=False)
    text = str(raised.value)
    for part in ("wrong (float32, cpu, 8 passes", "beyond what rounding may do", "worst element [3, 7]: got ", "exact ",
                 " ulp, allowed ", " % of the values"):  # fmt: skip
        assert part in text
    assert_within_rounding(rms_norm, drawn(16, 64), drawn(64, seed=1))


def test_the_caller_chooses_what_inconclusive_means() -> None:
    def cancels(x: torch.Tensor) -> torch.Tensor:
        return (x + 4096) - 4096

    x = drawn(16, 16)
    with pytest.raises(AssertionError, match="inconclusive"):
        assert_within_rounding(cancels, x, dtype=torch.bfloat16, gradients=False)
    with pytest.raises(unittest.SkipTest):
        assert_within_rounding(cancels, x, dtype=torch.bfloat16, gradients=False, allow=Allow(inconclusive="skip"))
    assert_within_rounding(cancels, x, dtype=torch.bfloat16, gradients=False, allow=Allow(inconclusive="pass"))


@pytest.mark.parametrize(
    ("option", "wanted"),
    [
        ({"inconclusive": "Fail"}, "fail, skip, pass"),
        ({"inconclusive": True}, "fail, skip, pass"),
        ({"products": "tf32"}, "consistency.testing.Products"),
        ({"products": Products(matmul="tf32")}, "consistency.testing.Precision"),  # type: ignore[arg-type]
        ({"products": Products(partial_terms={"bf16": 32})}, "float16, bfloat16"),
        ({"products": Products(partial_terms={"bfloat16": 0})}, "1 or more"),
        ({"toward_zero": "yes"}, "True or False"),
        ({"nan": 1}, "True or False"),
        ({"dtype": torch.bfloat16}, "True or False"),
    ],
)
def test_what_is_allowed_has_only_values_that_can_be_used(option: dict[str, Any], wanted: str) -> None:
    with pytest.raises(UsageError) as raised:
        Allow(**option)
    assert raised.value.where == f"Allow({next(iter(option))}=)"
    assert wanted in str(raised.value.wanted)


@pytest.mark.parametrize(
    ("option", "wanted"),
    [
        ({"dtype": torch.int32}, "torch.bfloat16"),
        ({"dtype": torch.float64}, "torch.bfloat16"),
        ({"dtype": "bfloat16"}, "torch.bfloat16"),
        ({"allow": "skip"}, "consistency.testing.Allow"),
        ({"passes": 1}, "2 or more"),
        ({"passes": 2.5}, "2 or more"),
        ({"passes": True}, "2 or more"),
        ({"gradients": "no"}, "True or False"),
        ({"device": "cuad"}, "torch.device"),
        ({"reference": 3}, "a function or a module"),
    ],
)
def test_options_have_only_values_that_can_be_used(option: dict[str, Any], wanted: str) -> None:
    name = next(iter(option))
    callers: list[Callable[..., object]] = [within_rounding, assert_within_rounding]
    if name not in ("gradients", "reference"):
        callers.append(rounding_tolerance)
    for caller in callers:
        with pytest.raises(UsageError) as raised:
            caller(torch.exp, drawn(4, 4), **option)
        assert raised.value.where == f"{name}="
        assert raised.value.got is not None
        assert wanted in str(raised.value.wanted)


def test_what_is_tested_is_a_function() -> None:
    with pytest.raises(UsageError) as raised:
        within_rounding(drawn(4, 4))  # type: ignore[arg-type]
    assert (raised.value.where, raised.value.got) == ("function", "<class 'torch.Tensor'>")


def cut(values: torch.Tensor) -> torch.Tensor:
    """Return float32 values as TF32 has them."""
    return (values.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def truncating(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply with one accumulator that is cut toward zero."""
    total = torch.zeros(len(x), weight.shape[1], dtype=torch.float32)
    for k in range(x.shape[1]):
        exact = total.double() + x[:, k : k + 1].double() * weight[k : k + 1].double()
        nearest = exact.float()
        total = torch.where(nearest.double().abs() > exact.abs(), torch.nextafter(nearest, torch.zeros(())), nearest)
    return total


def test_what_a_device_may_do_otherwise_has_a_name() -> None:
    x, weight = drawn(32, 256).abs(), drawn(256, 32, seed=1).abs()

    def judged(function: Callable[..., torch.Tensor], allow: Allow | None = None) -> WithinRounding:
        return within_rounding(function, x, weight, reference=torch.matmul, gradients=False, allow=allow)

    def in_tf32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return cut(x) @ cut(weight)

    assert not judged(in_tf32)
    assert judged(in_tf32, Allow(products=Products(matmul=Precision.TF32)))
    assert not judged(truncating)
    assert judged(truncating, Allow(toward_zero=True))
    assert not judged(in_tf32, Allow(toward_zero=True))


def test_a_tolerance_covers_two_healthy_results_and_no_fault() -> None:
    x, weight = drawn(64, 128), drawn(128, seed=1)
    for dtype in (torch.float32, torch.bfloat16):
        low = x.to(dtype), weight.to(dtype)
        tolerance = rounding_tolerance(rms_norm, *low)
        assert set(tolerance) == {"rtol", "atol"}
        exact = rms_norm(low[0].double(), low[1].double())
        torch.testing.assert_close(rms_norm(*low), exact.to(dtype), **tolerance)
        allowed = tolerance.allowed["result"]
        assert bool((2 * allowed <= tolerance["atol"] + tolerance["rtol"] * exact.abs() + 1e-12).all())
        with pytest.raises(AssertionError):
            torch.testing.assert_close(rms_norm(*low) * 1.2, exact.to(dtype), **tolerance)


def test_a_tolerance_of_complex_numbers_covers_two_healthy_results_and_no_fault() -> None:
    x = torch.complex(drawn(16, 64), drawn(16, 64, seed=1))

    def spectrum(x: torch.Tensor) -> torch.Tensor:
        transformed: torch.Tensor = torch.fft.fft(x)
        return transformed * x.conj()

    tolerance = rounding_tolerance(spectrum, x)
    exact = spectrum(x.to(torch.complex128)).to(x.dtype)
    torch.testing.assert_close(spectrum(x), exact, **tolerance)
    for wrong in (spectrum(x) * 1.0001, spectrum(x).conj()):
        with pytest.raises(AssertionError):
            torch.testing.assert_close(wrong, exact, **tolerance)
    allowed = tolerance.allowed["result"]
    assert allowed.shape == x.shape
    assert bool((2 * allowed <= tolerance["atol"] + tolerance["rtol"] * exact.abs().double() + 1e-9).all())
    assert bool(((spectrum(x) - exact).abs() <= allowed).all())


def test_python_numbers_have_a_tolerance_and_are_judged() -> None:
    def total(x: torch.Tensor) -> float:
        return float((x * x).detach().sum())

    def both_totals(x: torch.Tensor) -> complex:
        return complex(total(x), total(x * 3))

    x = drawn(64, 64)
    for function in (total, both_totals):
        tolerance = rounding_tolerance(function, x)
        assert 0 < tolerance["atol"] + tolerance["rtol"] < 1e-3 * abs(function(x))
        torch.testing.assert_close(function(x), function(x.double()), **tolerance)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(function(x) * 1.001, function(x.double()), **tolerance)
        reversed_order = within_rounding(lambda x, of=function: of(x.flip(0, 1)), x, reference=function)
        assert reversed_order.status == "within"
        wrong = within_rounding(lambda x, of=function: of(x) * 1.001, x, reference=function)
        assert wrong.status == "outside"


def test_what_has_no_tolerance_is_refused_in_words() -> None:
    x = drawn(8, 8)
    for function in (lambda x: int(x.sum()), lambda x: x.argmax(), lambda x: x > 0, lambda _: "text"):
        with pytest.raises(UsageError, match="no result has floating-point numbers"):
            rounding_tolerance(function, x)
    with pytest.raises(UsageError, match="a dtype whose rounding is not known"):
        rounding_tolerance(lambda x: x.to(torch.float8_e5m2), x)
    assert rounding_tolerance(lambda x: (x @ x).max(-1), x)["atol"] > 0


def test_a_gradient_that_cancels_is_inconclusive() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16))
    found = within_rounding(layer, drawn(32, 16))
    assert [one.name for one in found.results if one.status == "inconclusive"] == ["gradient of 0.bias"]


def test_the_fixture_takes_the_devices_of_the_plugin(consistency_within_rounding: Callable[..., None]) -> None:
    consistency_within_rounding(rms_norm, drawn(16, 64), drawn(64, seed=1))
    with pytest.raises(AssertionError, match=r"\(float32, cpu, 8 passes"):
        consistency_within_rounding(lambda x: x * 1.01, drawn(16, 64), reference=lambda x: x * 1.0)


@pytest.mark.process
def test_importing_it_imports_no_model_library() -> None:
    code = (
        "import sys, consistency.testing\n"
        "print(*[m for m in ('transformers', 'peft', 'accelerate', 'pytest', 'torch._dynamo') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.process
def test_the_first_assertion_imports_no_compiler() -> None:
    code = (
        "import sys, torch\n"
        "from consistency.testing import assert_within_rounding\n"
        "assert_within_rounding(lambda x, y: (x @ y).relu(), torch.ones(4, 4), torch.ones(4, 4))\n"
        "print(*[m for m in ('sympy', 'torch._dynamo') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


class NormInFloat32(torch.autograd.Function):
    """A layer norm whose backward pass adds up the gradient of its weight in float32, as kernels for GPUs do."""

    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return functional.layer_norm(x.float(), weight.shape, weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = (tensor.detach().float().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            result = functional.layer_norm(x, weight.shape, weight)
        of_x, of_weight = torch.autograd.grad(result, (x, weight), incoming[0].float())
        scaled = of_weight * NormInFloat32.factor
        return of_x.to(incoming[0].dtype), scaled.to(incoming[0].dtype)


def test_sums_in_a_half_type_are_noise_for_torchs_own_norms_on_the_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, weight.shape, weight)

    inputs = drawn(1024, 64), drawn(64, seed=1)
    in_float32: Callable[..., torch.Tensor] = NormInFloat32.apply
    # torch's own kernel for the CPU adds up 1024 rows in bfloat16
    assert within_rounding(norm, *inputs, dtype=torch.bfloat16).status != "outside"
    healthy = within_rounding(in_float32, *inputs, dtype=torch.bfloat16, reference=norm)
    assert healthy, str(healthy)
    assert healthy.results[2].share < 0.02
    monkeypatch.setattr(NormInFloat32, "factor", 1.1)
    wrong = within_rounding(in_float32, *inputs, dtype=torch.bfloat16, reference=norm)
    assert [result.name for result in wrong.results if result.status == "outside"] == ["gradient of input 1"]


def routed(x: torch.Tensor, gate: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Send each token to two experts, chosen by scores in the tokens' dtype."""
    weights, chosen = (x @ gate).softmax(-1).topk(2, -1)
    return (torch.einsum("th,tkhd->tkd", x, experts[chosen]) * weights[..., None]).sum(1)


@pytest.mark.parametrize("seed", range(4))
def test_a_router_in_a_half_type_is_judged_by_its_own_choices(seed: int) -> None:
    x, gate, experts = drawn(256, 64, seed=seed), drawn(64, 32, seed=seed + 10) / 8, drawn(32, 64, 64, seed=20) / 8
    healthy = within_rounding(routed, x, gate, experts, dtype=torch.bfloat16, gradients=False)
    assert healthy, str(healthy)

    def other_experts(x: torch.Tensor, gate: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        weights, chosen = (x @ gate).softmax(-1).topk(3, -1)
        return (torch.einsum("th,tkhd->tkd", x, experts[chosen[:, 1:]]) * weights[:, 1:, None]).sum(1)

    def wrong_scale(x: torch.Tensor, gate: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return routed(x, gate, experts) * 1.05

    for wrong in (other_experts, wrong_scale):
        judgement = within_rounding(
            wrong, x, gate, experts, dtype=torch.bfloat16, reference=routed, gradients=False, allow=Allow(dtype=True)
        )
        assert judgement.status == "outside"


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:ComplexHalf")
def test_sparse_inputs_and_complex_halves_are_judged() -> None:
    x, y = drawn(8, 8).relu(), drawn(8, 8, seed=1)
    assert within_rounding(torch.sparse.mm, x.to_sparse(), y, gradients=False)
    assert within_rounding(lambda sparse, y: sparse.to_dense() @ y, x.to_sparse_csr(), y, gradients=False)
    wrong = within_rounding(
        lambda sparse, y: torch.sparse.mm(sparse, y) * 1.01,
        x.to_sparse(),
        y,
        reference=torch.sparse.mm,
        gradients=False,
    )
    assert wrong.status == "outside"
    assert within_rounding(torch.view_as_complex, drawn(8, 2).half(), gradients=False)
    assert within_rounding(lambda x: torch.view_as_complex(x) * 2, drawn(8, 2), dtype=torch.float16, gradients=False)
