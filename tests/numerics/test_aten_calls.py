from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from consistency.numerics import aten_calls
from consistency.numerics.aten_calls import (
    AtenCall,
    CallsError,
    allowed_operation,
    blamed,
    largest_ratio,
    read_calls,
    run_calls,
    run_exactly,
)
from consistency.numerics.error_spread import Spread

aten = torch.ops.aten


def test_calls_are_what_their_text_says() -> None:
    lines = [
        "# so",
        "v1 = aten.t.default(in1)",
        "v2 = aten.mm.default(in2, v1)",
        "v3, v4 = aten.split.Tensor(v2, 1, -1)",
    ]
    text = "\n".join([*lines, "return v4"])
    weight, rows = torch.randn(2, 3), torch.randn(4, 3)
    calls, result = read_calls(text, ["in1", "in2"])
    found = run_calls(calls, {"in1": weight, "in2": rows}, "cpu")
    assert torch.equal(found[result], (rows @ weight.T)[:, 1:])
    again, _ = read_calls("\n".join([*map(str, calls), f"return {result}"]), ["in1", "in2"])
    assert again == calls


def test_every_kind_of_argument_is_written_and_read() -> None:
    lines = [
        "v1 = aten.scalar_tensor.default(-inf, dtype=torch.float32, layout=torch.strided, device=here)",
        "v2 = aten.clone.default(v1, memory_format=torch.contiguous_format)",
        "v3 = aten.gelu.default(v2, approximate='tanh')",
        "v4 = aten.mean.dim(in1, [-1], True)",
        "v5 = aten.add.Tensor(v4, 9.999999747378752e-06)",
        "v6 = aten.sum.default(v5, dtype=None)",
    ]
    calls, _ = read_calls("\n".join([*lines, "return v6"]), ["in1"])
    assert [str(call) for call in calls] == lines


HOSTILE = [
    "import os",
    "__import__('os').system('id')",
    "v1 = __import__('os').system('id')",
    "v1 = aten.__class__.mro()",
    "v1 = aten.mm.__init__(in1, in1)",
    "v1 = aten.mm.default.__class__(in1)",
    "v1 = aten.mm(in1, in1)",
    "v1 = torch.load('x')",
    "v1 = prims.add.default(in1, in1)",
    "v1 = aten.add.Tensor(in1, other)",
    "v1 = aten.add.Tensor(in1, (lambda: 1)())",
    "v1 = aten.add.Tensor(in1, torch.save)",
    "v1 = aten.add.Tensor(in1, torch.ops)",
    "v1 = aten.add.Tensor(*in1)",
    "v1 = aten.add.Tensor(in1, **{'alpha': 1})",
    "v1 = aten.add.Tensor(in1, f'{in1}')",
    "v1 = aten.add.Tensor(in1, b'x')",
    "v1 = aten.add.Tensor(in1, 'x')",
    "v1 = aten.from_file.default('none', True, 100)",
    "v1 = aten.set_.source_Tensor(in1, in1)",
    "v1 = aten.resize_.default(in1, [9])",
    "v1 = aten._cudnn_rnn.default(in1)",
    "v1 = aten._embedding_bag.default(in1, in1, in1)",
    "v1.x = aten.t.default(in1)",
    "v1[0] = aten.t.default(in1)",
    "v1 = v2 = aten.t.default(in1)",
    "v1: int = aten.t.default(in1)",
    "v1 = [aten.t.default(in1) for _ in in1]",
    "return in2",
    "return os",
    "v1 = " + "(" * 500,
    "v1 = aten.view.default(in1, " + "[" * 250 + "]" * 250 + ")",
    "v1 = aten.add.Tensor(in1, " + "-" * 3000 + "1)",
    "v1 = aten.add.Tensor(in1, " + "9" * 4000 + ")",
    "v1 = aten.t.default(in1) # " + "x" * 5000,
    "\0",
    "v1 = aten.t.default(\ud800)",
]


@pytest.mark.parametrize("line", HOSTILE)
def test_a_strangers_text_is_refused(line: str) -> None:
    with pytest.raises(CallsError):
        read_calls(f"{line}\nreturn v1", ["in1"])


def test_more_calls_than_a_module_makes_are_refused() -> None:
    with pytest.raises(CallsError):
        read_calls("v1 = aten.t.default(in1)\n" * 3000 + "return v1", ["in1"])


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="abv1.=()[]'\"_ \n,-*#:{}@torchen", max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        calls, _ = read_calls(text, ["in1", "v1"])
    except CallsError:
        return
    assert all(allowed_operation(call.operation) for call in calls)


def test_no_operation_that_may_be_called_takes_a_path_or_has_no_tensor() -> None:
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    allowed: dict[str, Any] = {}
    for name in names:
        packet, _, overload = name.removeprefix("aten::").partition(".")
        operation = getattr(getattr(aten, packet, None), overload or "default", None)
        if allowed_operation(operation):
            allowed[name] = operation
    assert {"aten::mm", "aten::add.Tensor", "aten::add_.Tensor", "aten::_to_copy", "aten::gelu"} <= allowed.keys()
    assert not {"aten::from_file", "aten::set_.source_Tensor", "aten::resize_", "aten::_cudnn_rnn"} & allowed.keys()
    arguments = {argument.name for one in allowed.values() for argument in one._schema.arguments}
    assert "approximate" in arguments
    assert "filename" not in arguments


def calls_of(text: str, *inputs: str) -> tuple[list[AtenCall], str]:
    return read_calls(text, inputs)


TEXT = """
v1 = aten.mm.default(in1, in2)
v2 = aten.silu.default(v1)
v3 = aten.add.Tensor(v2, v1)
v4 = aten.full_like.default(v3, -inf)
v5 = aten.exp.default(v4)
v6 = aten.add.Tensor(v3, v5)
return v6
"""


def test_the_operation_that_is_off_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, result = calls_of(TEXT, "in1", "in2")
    inputs = {"in1": torch.randn(4, 8), "in2": torch.randn(8, 4)}
    exact = run_exactly(calls, inputs)[result]
    assert exact.dtype == torch.float64
    allowed = torch.full_like(exact, 1e-5)

    def share(values: dict[str, torch.Tensor]) -> float:
        return largest_ratio(values[result], exact, allowed)[0]

    assert share(run_calls(calls, inputs, "cpu")) < 1

    class OffBy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            found = func(*args, **(kwargs or {}))
            return found * 1.01 if func is aten.silu.default and args[0].dtype == torch.float32 else found

    with OffBy():  # type: ignore[no-untyped-call]
        assert share(run_calls(calls, inputs, "cpu")) > 1
        assert blamed(calls, inputs, "cpu", share) == [1]  # type: ignore[arg-type]


def test_several_calls_that_are_off_are_blamed_together() -> None:
    text = "v1 = aten.silu.default(in1)\nv2 = aten.silu.default(in2)\nv3 = aten.silu.default(in3)\n"
    calls, result = calls_of(f"{text}v4 = aten.cat.default([v1, v2, v3])\nreturn v4", "in1", "in2", "in3")
    inputs = {name: torch.randn(4) for name in ("in1", "in2", "in3")}
    exact = run_exactly(calls, inputs)[result]

    class OffBy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            found = func(*args, **(kwargs or {}))
            is_wrong = func is aten.silu.default and args[0].dtype == torch.float32
            return found * 1.01 if is_wrong and not torch.equal(args[0], inputs["in2"]) else found

    with OffBy():  # type: ignore[no-untyped-call]
        limit = torch.full_like(exact, 1e-5)
        assert blamed(calls, inputs, "cpu", lambda found: largest_ratio(found[result], exact, limit)[0]) == [0, 2]


def test_inputs_stay_as_they_are_where_calls_write_into_them() -> None:
    calls, result = calls_of("v1 = aten.mul_.Tensor(in1, 2.0)\nreturn in1", "in1")
    one = torch.ones(3)
    assert run_calls(calls, {"in1": one}, "cpu")[result].tolist() == [2.0] * 3
    assert run_exactly(calls, {"in1": one})[result].tolist() == [2.0] * 3
    assert one.tolist() == [1.0] * 3


def test_attention_by_a_kernel_that_is_not_here_is_computed_by_torchs_own() -> None:
    calls, result = calls_of(
        "v1, v2, v3, v4 = aten._scaled_dot_product_efficient_attention.default(in1, in2, in2, None, False, 0.0, True,"
        " scale=0.5)\nreturn v1",
        "in1",
        "in2",
    )
    inputs = {"in1": torch.randn(2, 4, 6, 8), "in2": torch.randn(2, 4, 6, 8)}
    wanted = torch.nn.functional.scaled_dot_product_attention(
        inputs["in1"], inputs["in2"], inputs["in2"], is_causal=True, scale=0.5
    )
    assert torch.equal(run_calls(calls, inputs, "cpu")[result], wanted)
    torch.testing.assert_close(run_exactly(calls, inputs)[result].float(), wanted)


def test_nan_is_worse_than_any_number() -> None:
    actual = torch.tensor([1.0, float("nan")])
    assert largest_ratio(actual, torch.ones(2), torch.ones(2)) == (float("inf"), 1, "element")


def test_rows_and_the_scale_are_judged_as_the_rule_does() -> None:
    """The figures of `Spread`, whose variance the allowance of an element tells."""
    torch.manual_seed(0)
    exact = torch.randn(16, 32, dtype=torch.float64)
    drawn = [(exact + 1e-4 * torch.randn(16, 32)).float() for _ in range(4)]
    spread = Spread.of(drawn, exact)
    allowed = spread.allowed(exact, torch.float32)
    for actual in (drawn[0], exact.float() * 1.01, exact.float().index_fill(0, torch.tensor([3]), 0.0)):
        wanted = spread.figures(actual, exact)
        share, _, whose = largest_ratio(actual, exact, allowed, spread.limits.of_figures())
        assert share == pytest.approx(wanted.ratio)
        assert getattr(wanted, whose) == wanted.ratio


def test_the_copy_in_a_reproducer_needs_torch_alone() -> None:
    assert "consistency" not in "".join(
        line for line in Path(aten_calls.__file__).read_text().splitlines() if line.startswith(("import ", "from "))
    )
