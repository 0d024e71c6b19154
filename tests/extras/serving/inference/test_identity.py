"""What identifies a case changes with whatever its outputs depend on, and with nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from consistency.case.builtin import builtin_folder
from consistency.case.case import Case
from consistency.extras.serving.inference import identity
from consistency.extras.serving.inference.identity import adapter_digest, base_digest


@pytest.fixture
def case(tmp_path: Path) -> Case:
    shutil.copytree(builtin_folder("llama"), tmp_path / "llama")
    return Case(name="a", base=str(tmp_path / "llama/base"), adapter=str(tmp_path / "llama/adapter"))


def set_field(folder: str | None, file: str, **fields: object) -> None:
    path = Path(str(folder), file)
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def flip_a_byte(folder: str | None, file: str) -> None:
    path = Path(str(folder), file)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


ANOTHER: dict[str, Callable[[Case], None]] = {
    "alpha": lambda case: set_field(case.adapter, "adapter_config.json", lora_alpha=17),
    "weights": lambda case: flip_a_byte(case.adapter, "adapter_model.safetensors"),
    "base weights": lambda case: flip_a_byte(case.base, "model.safetensors"),
    "base config": lambda case: set_field(case.base, "config.json", rms_norm_eps=1e-5),
}


@pytest.mark.parametrize("changed", ANOTHER)
def test_another_case_has_another_digest(changed: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for whole in (identity._WHOLE_BYTES, 0):  # digested whole, and by samples, which hold both ends of a file
        monkeypatch.setattr(identity, "_WHOLE_BYTES", whole)
        before = base_digest(case), adapter_digest(case)
        ANOTHER[changed](case)
        now = base_digest(case), adapter_digest(case)
        assert (now[0] != before[0]) is ("base" in changed)
        assert (now[1] != before[1]) is ("base" not in changed)
        if "weights" not in changed:
            break  # a field that has its value already changes nothing the second time


def test_the_same_files_elsewhere_are_the_same_case(case: Case, tmp_path: Path) -> None:
    before = base_digest(case), adapter_digest(case)
    moved = shutil.move(tmp_path / "llama", tmp_path / "moved")
    set_field(f"{moved}/adapter", "adapter_config.json", base_model_name_or_path="elsewhere", peft_version="1.0")
    there = Case(name="b", base=f"{moved}/base", adapter=f"{moved}/adapter")
    assert (base_digest(there), adapter_digest(there)) == before


def test_a_base_that_a_function_makes() -> None:
    one, other = (Case(name="a", base=f"python:package:{name}") for name in ("one", "other"))
    assert base_digest(one) != base_digest(other)
    assert adapter_digest(one) == ""
