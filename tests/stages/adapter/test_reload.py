"""Loading over poison: what does not come is told, and the parameters stay as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import peft
import pytest
import torch
from msgspec.structs import asdict
from safetensors.torch import load_file

from consistency.capture.names import LOADED_AGAIN
from consistency.capture.records import TensorRecord
from consistency.case.case import Case
from consistency.numerics.digest import digest
from consistency.stages.adapter.load_paths import reload, skipping
from consistency.worker import recorder
from consistency.worker.context import Context
from consistency.worker.model.loading import ADAPTER_NAME
from consistency.worker.model.poison import POISON
from tests.worker.model.made_models import a_llama, perturb

pytestmark = [pytest.mark.filterwarnings("ignore")]  # PEFT and transformers warn while saving

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FORMATS = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_poison_is_no_number_in_any_format(dtype: torch.dtype) -> None:
    bits = torch.tensor([POISON[dtype.itemsize]], dtype=torch.int64).to(_INTEGERS[dtype.itemsize])
    assert bool(torch.isnan(bits.view(dtype).to(torch.float32)).all())


class Recorder:
    skipping, skipped = recorder.Recorder.skipping, recorder.Recorder.skipped

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []

    def wants(self, *_: str) -> bool:
        return True

    def write(self, row: TensorRecord) -> None:
        self.said.append(asdict(row))

    def computed(self, row: TensorRecord, _: torch.Tensor) -> None:
        self.write(row)


class Made:
    """As much of a context as loading again looks at, on a model of one layer."""

    def __init__(self, folder: Path, *, repeat: int = 1) -> None:
        base = a_llama()
        first = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        perturb(first)
        first.save_pretrained(folder)
        self.model = peft.PeftModel.from_pretrained(first.unload(), folder, adapter_name=ADAPTER_NAME)
        self.state = self.model.state_dict(keep_vars=True)
        self.names = [name for name in self.state if "lora_" in name]
        self.record = Recorder()
        self.expected = dict.fromkeys(self.names)
        self.case = Case(name="x", base="base", adapter=str(folder), repeat=repeat)
        self.bits = {name: digest(tensor).value for name, tensor in self.state.items()}
        self.device = torch.device("cpu")
        self.job = self

    def reload(self) -> dict[str, Any]:
        context = cast("Context", self)
        with skipping(context):
            return cast("dict[str, Any]", reload(context, self.state))
        return {}

    def is_untouched(self) -> bool:
        return {name: digest(tensor).value for name, tensor in self.state.items()} == self.bits


def test_a_sound_load_gives_the_same_again(tmp_path: Path) -> None:
    made = Made(tmp_path, repeat=3)
    found = made.reload()
    assert found.keys() == set(made.names)
    assert len(made.names) == 4
    assert {loads.wrong for loads in found.values()} == {None}
    assert all(loads.digests == (made.bits[name],) * 2 for name, loads in found.items())
    assert made.is_untouched()
    assert [(r["tensor"], r["status"]) for r in made.record.said] == [(LOADED_AGAIN, "measured")]


def test_a_copy_that_never_arrives_leaves_the_poison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(tmp_path)
    lost = made.names[1]

    def load(*_: object) -> None:
        held = load_file(tmp_path / "adapter_model.safetensors")
        with torch.no_grad():
            for name in made.names:
                if name != lost:
                    made.state[name].copy_(held[name.replace(f".{ADAPTER_NAME}", "")])

    monkeypatch.setattr(made.model, "load_adapter", load)
    found = made.reload()
    assert [name for name, loads in found.items() if loads.wrong is not None] == [lost]
    assert (found[lost].wrong.view(torch.int32) == POISON[4]).all()
    assert bool(torch.isnan(found[lost].wrong).all())
    assert made.is_untouched()


@pytest.mark.parametrize("error", [RuntimeError, ValueError, KeyError, IndexError, TypeError])
def test_a_load_that_fails_is_skipped_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    made = Made(tmp_path)

    def fail(*_: object) -> None:
        raise error("not twice")

    monkeypatch.setattr(made.model, "load_adapter", fail)
    assert made.reload() == {}
    assert made.is_untouched()
    (said,) = made.record.said
    assert (said["tensor"], said["status"]) == (LOADED_AGAIN, "skipped")
    assert error.__name__ in said["reason"]


def test_an_error_that_nobody_expects_loses_nothing_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(tmp_path)

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(made.model, "load_adapter", fail)
    with pytest.raises(MemoryError):
        made.reload()
    assert made.is_untouched()
