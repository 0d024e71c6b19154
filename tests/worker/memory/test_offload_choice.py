"""Where the base is put: exactly what does not fit is offloaded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from consistency.case.budget.placement import needed_bytes
from consistency.case.budget.shape import read_shape
from consistency.case.case import Case
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.worker.memory import offload_choice
from consistency.worker.memory.offload_choice import choose

NPU = torch.device("meta")  # any device that is not the host


@pytest.fixture
def case() -> Case:
    return prepare_case(Options(base="builtin:llama"))


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda count: monkeypatch.setattr(offload_choice, "_room", lambda _: count)


def test_what_fits_to_the_byte_is_on_the_device(case: Case, free: Any) -> None:
    needed = needed_bytes(case, read_shape(case))
    free(needed)
    assert str(choose(case, NPU)) == "device"
    free(needed - 1)
    found = choose(case, NPU)
    assert found.offload
    assert str(found).startswith("offload: the stages need 6")
    assert str(found).endswith("2.8 MiB of it for the base, and 63.0 MiB are free")


@pytest.mark.parametrize(
    ("placement", "said"), [("device", "device: as requested"), ("offload", "offload: as requested")]
)
def test_a_request_is_followed_whatever_fits(placement: Any, said: str, free: Any) -> None:
    case = prepare_case(Options(base="builtin:llama", placement=placement))
    for count in (0, 2**40, None):
        free(count)
        assert str(choose(case, NPU)) == said


def test_the_host_holds_its_base_itself(free: Any) -> None:
    free(0)
    for placement in ("auto", "offload"):
        case = prepare_case(Options(base="builtin:llama", placement=placement))
        assert not choose(case, torch.device("cpu")).offload


def test_unknown_sizes_are_tried_on_the_device(case: Case, free: Any) -> None:
    free(None)
    assert str(choose(case, NPU)) == "device"
    free(0)
    assert not choose(prepare_case(Options(base="python:tests.worker.model.made_models:perturb")), NPU).offload


def test_a_quantized_base_is_not_offloaded(free: Any, tmp_path: Path) -> None:
    built_in = Path(prepare_case(Options(base="builtin:llama")).base)
    (tmp_path / "model.safetensors").symlink_to(built_in / "model.safetensors")
    config = json.loads((built_in / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "x"}}))
    free(0)
    found = choose(prepare_case(Options(base=str(tmp_path))), NPU)
    assert not found.offload
    assert str(found).endswith("but a quantized base is not offloaded")


@pytest.mark.parametrize(("devices", "taken"), [(1, 0), (8, 7)])
def test_each_other_worker_that_sees_a_device_takes_a_context_of_it(
    devices: int, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(device_count=lambda: devices)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(offload_choice, "free_bytes", lambda _: 24 << 30)
    assert offload_choice._room(torch.device("cuda:0")) == (24 << 30) - taken * (1 << 29)
    module.simulated = True
    assert offload_choice._room(torch.device("cuda:0")) == 24 << 30
