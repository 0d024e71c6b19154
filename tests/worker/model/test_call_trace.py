from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from consistency.devices.products import Products
from consistency.numerics.aten_calls import largest_ratio, read_calls, run_calls, run_exactly
from consistency.worker.model import call_trace
from consistency.worker.model.block_pass import ResultPlace, run_by_blocks
from consistency.worker.model.call_trace import CallTrace, NotTracedError, Saw, Traced, kept_parts, trace_module
from tests.worker.model.kinds_of_models import GIVEN

CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("make", GIVEN, ids=lambda make: make.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_module_calls_makes_its_result_again(make: Callable[[], Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = make().to(dtype).eval()
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in GIVEN[make].items()}
    found: dict[ResultPlace, torch.Tensor] = {}
    run_by_blocks(model, inputs, lambda _, value: value, lambda place, one: found.update({place: one.detach().clone()}))
    places = [place for place in found if "input." not in place.part and "." in place.layer]

    def run(saw: Saw) -> None:
        run_by_blocks(model, inputs, saw, lambda *_: None)

    for place in places:
        traced = trace_module(model, place.layer, str(place), CPU, run)
        assert torch.equal(traced.result, found[place]), place
        calls, result = read_calls(traced.text, traced.inputs)
        assert torch.equal(run_calls(calls, traced.inputs, CPU)[result], found[place]), place
        if "_grouped_mm" in traced.text:  # which has no float64
            continue
        exact = run_exactly(calls, traced.inputs)[result]
        torch.testing.assert_close(exact.float(), found[place].float(), rtol=0.1, atol=0.1)
    assert all(module._compiled_call_impl is None for module in model.modules())


def test_what_is_made_outside_of_blocks_is_not_traced() -> None:
    make = next(iter(GIVEN))
    with pytest.raises(NotTracedError, match="outside of the blocks"):
        trace_module(make(), "logits", "logits::", CPU, lambda _: None)


def traced_of(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Traced:
    trace = CallTrace(CPU)
    with torch.no_grad(), trace:
        found = function(*inputs)
    return trace.finish(found)


def test_what_is_written_into_is_kept_as_it_was() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x[:, 1:]
        y.mul_(2.0)
        x.sum()  # nothing depends on it
        return x + 1

    start = torch.ones(2, 3)
    traced = traced_of(function, start)
    assert next(iter(traced.inputs.values())).tolist() == [[1.0] * 3] * 2
    calls, result = read_calls(traced.text, traced.inputs)
    assert [str(call.operation) for call in calls] == ["aten.slice.Tensor", "aten.mul_.Tensor", "aten.add.Tensor"]
    assert run_calls(calls, traced.inputs, CPU)[result].tolist() == [[2.0, 3.0, 3.0]] * 2


def test_two_views_of_what_is_written_into_are_refused() -> None:
    start = torch.ones(4)
    with pytest.raises(NotTracedError, match="several views"):
        traced_of(lambda a, b: a.mul_(2.0) + b, start[:2], start[1:3])


def test_an_operation_that_is_not_torchs_is_refused() -> None:
    library = torch.library.Library("made_here", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    with pytest.raises(NotTracedError, match=r"made_here\.twice"):
        traced_of(lambda x: torch.ops.made_here.twice(x) + 1, torch.ones(2))
    library._destroy()


def test_strides_of_inputs_are_kept() -> None:
    traced = traced_of(lambda x: x.clone(), torch.arange(6.0).reshape(2, 3).T.expand(2, 3, 2))
    calls, result = read_calls(traced.text, traced.inputs)
    again = run_calls(calls, traced.inputs, CPU)[result]
    assert torch.equal(again, traced.result)
    assert next(iter(traced.inputs.values())).numel() == 6


@pytest.mark.parametrize("bias", [True, False])
def test_a_large_product_is_cut_to_columns_around_its_fault(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_trace, "MOST_BYTES", 1 << 17)
    torch.manual_seed(0)
    x, weight, more = torch.randn(8, 256), torch.randn(1024, 256), torch.randn(1024)
    real = torch.ops.aten.addmm if bias else torch.ops.aten.mm

    class WrongProduct(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            found = func(*args, **(kwargs or {}))
            if func is real.default and found.dtype == torch.float32:
                marked = args[-1][0] == weight[700, 0]  # a column that the kernel gets wrong, wherever it is
                found[:, marked] = 0
            return found

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight, more if bias else None).relu() + 1

    with WrongProduct():  # type: ignore[no-untyped-call]
        traced = traced_of(function, x)
        calls, result = read_calls(traced.text, traced.inputs)
        exact = run_exactly(calls, traced.inputs)[result]
        limit = torch.full_like(exact, 1e-3)
        parts, share = kept_parts(traced, CPU, Products(), lambda one: largest_ratio(one, exact, limit)[0])
    assert share > 100
    inputs = {name: one for name, one in parts.items() if name.startswith("in")}
    assert sum(one.nbytes for one in inputs.values()) < 1 << 17
    calls, result = read_calls(bytes(parts["calls"].tolist()).decode(), inputs)
    assert str(calls[-1].operation) == str(real.default)
    wrong = (parts["cut.actual"].double() - parts["cut.expected"]).abs() > parts["cut.allowed"]
    assert wrong.any(0).sum() == 1
    own = run_calls(calls, inputs, CPU)[result]
    assert not ((own.double() - parts["cut.expected"]).abs() > parts["cut.allowed"]).any()


def in_one_accumulator(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(left.shape[0], right.shape[1])
    for k in range(left.shape[1]):
        total.addr_(left[:, k].float(), right[k].float())
    return total.to(left.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_healthy_product_is_within_what_it_is_allowed_alone(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(32, 2048).to(dtype), torch.randn(2048, 64).to(dtype)
    traced = traced_of(torch.mm, left, right)
    calls, result = read_calls(traced.text, traced.inputs)
    exact = run_exactly(calls, traced.inputs)[result]
    limit = call_trace._allowed_product(calls, traced, exact, Products())
    for found in (traced.result, in_one_accumulator(left, right)):
        assert largest_ratio(found, exact, limit)[0] < 1
    wrong = traced.result.clone()
    wrong[3, 5] += exact[3, 5].sign() * 4
    assert largest_ratio(wrong, exact, limit)[0] > 1


def test_calls_that_do_not_repeat_are_refused() -> None:
    traced = traced_of(lambda x: x + torch.rand(2), torch.ones(2))
    with pytest.raises(NotTracedError, match="other bits"):
        kept_parts(traced, CPU, Products(), lambda _: 2.0)
