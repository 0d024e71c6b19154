"""What several calls show: kernels that differ between calls, spoil what they are given, or need it contiguous."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from consistency.errors import UsageError
from consistency.testing import Allow, WithinRounding, within_rounding
from consistency.testing.calls import FunctionCall
from consistency.testing.passes import noise_of
from tests.testing.functions import drawn, read_in_order, twice


def outside(judgement: WithinRounding) -> list[str]:
    return [result.name for result in judgement.results if result.status == "outside"]


class WrongInOneCall:
    """Doubles its input, and in one call differently."""

    def __init__(self, number: int, wrong: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._number = number
        self._wrong = wrong
        self._calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        return self._wrong(x) if self._calls == self._number else x * 2


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_kernel_that_is_wrong_in_one_of_three_calls_is_outside(number: int) -> None:
    wrong = within_rounding(WrongInOneCall(number, lambda x: x * 3), drawn(8, 8), reference=twice, gradients=False)
    assert outside(wrong) == ["result"]
    if number > 1:
        assert f"in call {number} of 3, and not in the first: rows" in str(wrong)
    healthy = WrongInOneCall(4, lambda x: x * 3)
    assert within_rounding(healthy, drawn(8, 8), reference=twice, gradients=False)


def test_other_bits_within_rounding_are_told_and_outside_where_the_same_are_wanted() -> None:
    def one_ulp_off(x: torch.Tensor) -> torch.Tensor:
        return torch.nextafter(x * 2, torch.zeros(()))

    def judged(**options: Any) -> WithinRounding:
        flaky = WrongInOneCall(2, one_ulp_off)
        return within_rounding(flaky, drawn(8, 8), reference=twice, gradients=False, **options)

    assert judged()  # as torch's own sums by index are on several threads
    assert "result: within\n  other bits in call 2 of 3 with equal inputs" in str(judged())
    assert "result: outside, other bits in call 2 of 3 with equal inputs" in str(judged(nondeterministic=False))
    assert "other bits" not in str(judged(nondeterministic=True))
    assert within_rounding(twice, drawn(8, 8), nondeterministic=False)
    still_wrong = WrongInOneCall(2, lambda x: x * 3)
    assert not within_rounding(still_wrong, drawn(8, 8), reference=twice, gradients=False, nondeterministic=True)


def test_a_later_call_that_raises_is_outside_and_the_first_raises() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no workspace is left")

    wrong = within_rounding(WrongInOneCall(2, fails), drawn(8, 8), reference=twice, gradients=False)
    assert "call 2 of 3: outside, it raises an error, and the first call none: RuntimeError" in str(wrong)
    with pytest.raises(RuntimeError, match="no workspace"):
        within_rounding(WrongInOneCall(1, fails), drawn(8, 8), reference=twice, gradients=False)


def test_memory_that_a_kernel_leaves_unwritten_is_nan_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)  # which another test may have imported
    filled: list[bool] = []

    def without_last_row(x: torch.Tensor) -> torch.Tensor:
        doubled = torch.empty_like(x)
        filled.append(bool(doubled.isnan().all()))
        doubled[:-1] = x[:-1] * 2
        return doubled

    def backward(x: torch.Tensor, incoming: torch.Tensor) -> torch.Tensor:
        gradient = torch.empty_like(x)
        filled.append(bool(gradient.isnan().all()))
        gradient.copy_(incoming * 2)
        return gradient

    wrong = within_rounding(without_last_row, drawn(64, 64), reference=twice, gradients=False)
    assert outside(wrong) == ["result"]
    assert filled[1]
    filled.clear()
    assert within_rounding(doubling(backward), drawn(64, 64), reference=twice)
    assert filled[1]
    assert torch.empty_like(torch.ones(3, dtype=torch.int64)).dtype == torch.int64


def doubling(backward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """Return a function that doubles its input, with a backward pass that gets that input and the incoming gradient."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.x = x.detach()
            return x * 2

        @staticmethod
        def backward(ctx: Any, *incoming: torch.Tensor) -> torch.Tensor:
            return backward(ctx.x, incoming[0])

    apply: Callable[..., Any] = Doubled.apply
    return apply


def spoil_input(x: torch.Tensor, incoming: torch.Tensor) -> torch.Tensor:
    return torch.mul(incoming, 2, out=x)


def spoil_incoming(_: torch.Tensor, incoming: torch.Tensor) -> torch.Tensor:
    return incoming.mul_(2)


def test_what_a_backward_pass_writes_to_is_a_result_unless_it_is_consumed() -> None:
    x = drawn(8, 8)
    spoils = within_rounding(doubling(spoil_input), x, reference=twice)
    assert outside(spoils) == ["input 0 after the backward pass"]
    assert "consumes= says that it may" in str(spoils)
    spoils = within_rounding(doubling(spoil_incoming), x, reference=twice)
    assert outside(spoils) == ["incoming gradient of result after the backward pass"]
    for name in (0, "input 0"):
        assert within_rounding(doubling(spoil_input), x, reference=twice, consumes=[name])
    assert within_rounding(doubling(spoil_incoming), x, reference=twice, consumes=["incoming gradient"])
    assert within_rounding(doubling(lambda _, incoming: incoming * 2), x, reference=twice)
    # what both do is right
    assert within_rounding(doubling(spoil_input), x)


def test_a_consumed_input_may_be_changed_by_the_call_and_others_may_not() -> None:
    def overwriting(inputs: dict[str, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
        doubled = inputs["a"] * 2 + y
        inputs["a"].zero_()
        return doubled

    def plain(inputs: dict[str, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
        return inputs["a"] * 2 + y

    inputs = {"a": drawn(8, 8)}, drawn(8, 8, seed=1)

    def judged(*consumes: int | str) -> WithinRounding:
        return within_rounding(overwriting, *inputs, reference=plain, gradients=False, consumes=consumes)

    assert judged(0)
    assert judged("input 0['a']")
    assert outside(judged(1)) == ["input 0['a'] after the call"]
    with pytest.raises(UsageError, match="no input has this name") as raised:
        judged("input 7")
    assert "input 0['a'], input 1, incoming gradient" in str(raised.value)


def needs_contiguous(_: torch.Tensor, incoming: torch.Tensor) -> torch.Tensor:
    if not incoming.is_contiguous():
        raise ValueError("not contiguous")
    return incoming * 2


def reads_in_order(_: torch.Tensor, incoming: torch.Tensor) -> torch.Tensor:
    return read_in_order(incoming) * 2


@pytest.mark.parametrize("shape", [(6, 8), (32,), (2, 3, 4)])
def test_incoming_gradients_are_not_contiguous_in_one_call(shape: tuple[int, ...]) -> None:
    x = drawn(*shape)
    wrong = within_rounding(doubling(reads_in_order), x, reference=twice)
    assert outside(wrong) == ["gradient of input 0"]
    assert "in call 3 of 3 with incoming gradients that are not contiguous, and not in the first" in str(wrong)
    assert within_rounding(doubling(reads_in_order), x, reference=twice, allow=Allow(contiguous=True))
    assert within_rounding(doubling(reads_in_order), x, reference=twice, calls=1)
    assert within_rounding(doubling(lambda _, incoming: incoming.contiguous() * 2), x, reference=twice)


def test_a_kernel_that_refuses_such_a_gradient_is_told_what_says_that_it_may() -> None:
    refused = within_rounding(doubling(needs_contiguous), drawn(8, 8), reference=twice)
    assert "not contiguous, and the first call none: ValueError: not contiguous: allow=Allow(contiguous=True)" in str(
        refused
    )
    assert within_rounding(doubling(needs_contiguous), drawn(8, 8), reference=twice, allow=Allow(contiguous=True))


def test_strides_of_results_are_compared_where_that_is_asked_for() -> None:
    def transposed_in_memory(x: torch.Tensor) -> torch.Tensor:
        return (x.mT.contiguous() * 2).mT

    x = drawn(6, 8)
    assert within_rounding(transposed_in_memory, x, reference=twice)
    wrong = within_rounding(transposed_in_memory, x, reference=twice, strides=True)
    assert "result: outside, its strides are (1, 6), the reference's (8, 1)" in str(wrong)
    assert within_rounding(transposed_in_memory, x, strides=True)
    one_row = drawn(1, 8)
    assert within_rounding(lambda x: (x.mT * 2).mT, one_row, reference=twice, strides=True)


@pytest.mark.parametrize(
    ("option", "wanted"),
    [
        ({"calls": 0}, "1 or more"),
        ({"strides": "yes"}, "True or False"),
        ({"nondeterministic": 1}, "True or False"),
        ({"consumes": "input 0"}, "in a list or tuple"),
        ({"consumes": 0}, "in a list or tuple"),
        ({"consumes": [1.5]}, "in a list or tuple"),
    ],
)
def test_options_of_calls_have_only_values_that_can_be_used(option: dict[str, Any], wanted: str) -> None:
    with pytest.raises(UsageError) as raised:
        within_rounding(torch.exp, drawn(4, 4), **option)
    assert wanted in str(raised.value.wanted)


def decayed(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute a recurrence in more operations than passes are computed one by one for."""
    state = torch.zeros(x.shape[0], x.shape[2], dtype=torch.float32)
    states = []
    for step in range(x.shape[1]):
        state = state * gate[:, step].float().sigmoid() + x[:, step].float()
        states.append((state @ weight.float()).softmax(-1))
    return torch.stack(states, 1).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_passes_of_a_recurrence_are_computed_together(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    inputs = drawn(2, 40, 8), drawn(2, 40, 8, seed=1), drawn(8, 8, seed=2)
    apart = within_rounding(decayed, *inputs, dtype=dtype)
    computed: list[int] = []
    compute = FunctionCall._passes_together

    def counting(call: FunctionCall, count: int, mode: Any) -> list[Any] | None:
        passes = compute(call, count, mode)
        computed.append(0 if passes is None else len(passes))
        return passes

    monkeypatch.setattr(FunctionCall, "_passes_together", counting)
    together = within_rounding(decayed, *inputs, dtype=dtype)
    assert together, str(together)
    assert computed == [8]
    monkeypatch.setattr(FunctionCall, "_passes_together", lambda *_: None)
    apart = within_rounding(decayed, *inputs, dtype=dtype)
    for one, other in zip(together.results, apart.results, strict=True):
        assert one.name == other.name
        assert one.exact == other.exact or one.worst != other.worst
        assert 0.3 < one.share / other.share < 3  # limits of few passes vary

    def without_last_gate(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return decayed(x, torch.cat([gate[:, :-1], gate[:, -1:] * 0.9], 1), weight)

    monkeypatch.setattr(FunctionCall, "_passes_together", counting)
    wrong = within_rounding(without_last_gate, *inputs, dtype=dtype, reference=decayed)
    assert "result" in outside(wrong)


@pytest.mark.parametrize("extra", ["number", "draw", "norm", "write", "attention"])
def test_passes_that_cannot_be_computed_together_are_computed_one_by_one(extra: str) -> None:
    def function(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if extra == "number":
            x = x * float(weight.detach().abs().max())
        elif extra == "draw":
            x = x + torch.rand_like(x)
        elif extra == "norm":
            x = torch.nn.functional.layer_norm(x, x.shape[-1:])
        elif extra == "write":
            x = x.clone()
            torch.zeros(x.shape, dtype=x.dtype).add_(x)
        elif extra == "attention":
            x = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        return decayed(x, gate, weight)

    inputs = drawn(2, 40, 8), drawn(2, 40, 8, seed=1), drawn(8, 8, seed=2)
    healthy = within_rounding(function, *inputs)
    assert healthy, str(healthy)
    call = FunctionCall(function, None, inputs)
    call.exact()
    passes: list[int] = []
    noise = noise_of(Allow(), torch.device("cpu"), sums_in_half=False)

    def counted(seed: int, *, together: bool = False) -> Any:
        passes.append(seed)
        return noise(seed, together=together)

    assert len(call.with_noise(range(3), counted)) == 3
    assert passes == ([0, 1, 2] if extra == "attention" else [0, 0, 1, 2])
