"""What a device needs to hold the base, and when the plan offloads it."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import transformers

from consistency.case import standard
from consistency.case.budget.estimate import PlannedWorker
from consistency.case.budget.fit import make_budget
from consistency.case.budget.placement import is_offloaded, needed_bytes
from consistency.case.budget.shape import read_shape
from consistency.case.builtin import builtin_folder
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.devices.spec import parse_device
from consistency.extras.peft_api.sharding.spec import SHARDING
from tests.case.budget.shapes import GIB, LARGE


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_it_is_more_than_the_tensors_that_are_loaded(dtype: Any) -> None:
    case = prepare_case(Options(base="builtin:llama", dtype=dtype))
    folder = builtin_folder("llama")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype)
    model = peft.PeftModel.from_pretrained(base, folder / "adapter")
    loaded = sum(parameter.nbytes for parameter in model.parameters())
    shape = read_shape(case)
    assert shape.loaded_bytes + shape.adapter_bytes == loaded
    assert loaded < needed_bytes(case, shape) < loaded + GIB


def test_another_copy_of_the_base_is_not_needed() -> None:
    case, more = (prepare_case(Options(stages=stages)) for stages in ((standard.BASE,), (standard.BASE, SHARDING)))
    assert needed_bytes(case, LARGE) == needed_bytes(more, LARGE)


@pytest.mark.parametrize("placement", ["auto", "device", "offload"])
def test_the_plan_offloads_what_the_device_does_not_hold(placement: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consistency.case.budget.fit.read_shape", lambda _: LARGE)
    case = prepare_case(Options(stages=(standard.BASE, standard.MERGED), placement=placement))

    def planned(device_gib: float | None) -> str:
        memory_bytes = None if device_gib is None else int(device_gib * GIB)
        worker = PlannedWorker(label="x", spec=parse_device("cuda:0"), device_memory_bytes=memory_bytes)
        return make_budget(case, [worker], available_bytes=None).workers[0].placement

    assert (planned(80), planned(15), planned(None)) == {
        "auto": ("device", "offload", "device"), "device": ("device",) * 3, "offload": ("offload",) * 3,
    }[placement]  # fmt: skip


def test_exactly_what_does_not_fit_is_offloaded() -> None:
    case = prepare_case(Options())
    needed = needed_bytes(case, LARGE)
    assert not is_offloaded(case, LARGE, needed)
    assert is_offloaded(case, LARGE, needed - 1)
