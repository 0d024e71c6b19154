"""Planted faults in functions that people test, and the same functions without one."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from benchmarks.rounding import OneAccumulator
from consistency.numerics.dtype import UNIT_ROUNDOFF
from consistency.testing import within_rounding
from tests.testing.functions import CASES, Case, Function

HALF = torch.bfloat16


def faults(case: Case, dtype: torch.dtype) -> Iterator[tuple[str, Function]]:
    """Yield the faults of a function that are above what rounding may do in a dtype."""
    factor = 1 + 4 * UNIT_ROUNDOFF[dtype] * math.sqrt(case.terms)

    def scaled(*inputs: torch.Tensor) -> torch.Tensor:
        return (case.function(*inputs).double() * factor).to(dtype)

    def one_wrong(*inputs: torch.Tensor) -> torch.Tensor:
        found = case.function(*inputs).clone()
        place = int(found.reshape(-1).abs().argmax())
        found.view(-1)[place] *= 1.5
        return found

    yield "scale", scaled
    yield "one element", one_wrong
    for name, wrong in case.wrong.items():
        if name == "rounded products" and dtype == torch.float32:
            continue  # that is one accumulator
        if name == "epsilon" and dtype != torch.float32:
            continue  # 1e-3 of a variance of 1 is a fifth of a unit of bfloat16
        yield name, wrong


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_fault_above_rounding_is_found(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    missed = []
    for fault, wrong in faults(case, dtype):
        found = within_rounding(wrong, *case.inputs(), reference=case.function, dtype=dtype, gradients=False)
        if found.status != "outside":
            missed.append((fault, str(found)))
    assert missed == []


@pytest.mark.parametrize("dtype", [torch.float32, HALF, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_of_a_healthy_function_are_within(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    found = within_rounding(case.function, *case.inputs(1), dtype=dtype)
    assert found.status == "within", str(found)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.terms > 1])
def test_one_accumulator_for_each_product_is_within(name: str) -> None:
    """So do GPUs add: at 64 terms twice the error of the CPU's blocks."""
    case = CASES[name]

    def on_device(*inputs: torch.Tensor) -> torch.Tensor:
        with OneAccumulator():
            return case.function(*inputs)

    found = within_rounding(on_device, *case.inputs(2), reference=case.function, gradients=False)
    assert found.status == "within", str(found)


def test_there_are_thirty() -> None:
    assert len(CASES) >= 30
