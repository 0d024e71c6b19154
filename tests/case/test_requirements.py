"""What every host of a fleet must have: the same files, and its accelerators."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from consistency.case.case import Case
from consistency.case.preflight import prepare_case
from consistency.case.reading import make_options
from consistency.case.requirements import Requirements, count_accelerators, digests_of, requirements_of
from consistency.devices.spec import DeviceInfo, parse_device
from consistency.errors import InputError, UsageError


@pytest.fixture
def case(llama_base: Path, llama_adapter: Path, tmp_path: Path) -> Case:
    shutil.copytree(llama_base, tmp_path / "base")
    shutil.copytree(llama_adapter, tmp_path / "adapter")
    return prepare_case(make_options({"base": str(tmp_path / "base"), "adapter": str(tmp_path / "adapter")}))


def test_the_same_files_elsewhere(case: Case, tmp_path: Path) -> None:
    wanted = requirements_of(case)
    assert wanted.files.keys() == {"base", "adapter"}
    assert {"model.safetensors", "config.json"} <= wanted.files["base"].keys()
    (tmp_path / "base" / "README.md").write_text("other words")
    moved = msgspec.structs.replace(case, base=str(Path(case.base).rename(tmp_path / "elsewhere")))
    wanted.check_files(moved)


@pytest.mark.parametrize("name", ["base/model.safetensors", "adapter/adapter_model.safetensors", "base/config.json"])
def test_one_changed_byte(case: Case, tmp_path: Path, name: str) -> None:
    wanted = requirements_of(case)
    with (tmp_path / name).open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        last = file.read(1)
        file.seek(-2, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(InputError, match=f"the {name.partition('/')[0]} is not the one of the fleet") as found:
        wanted.check_files(case)
    assert found.value.where == str(tmp_path / name)
    assert found.value.got != found.value.wanted


def test_file_that_one_host_lacks_or_has_alone(case: Case, tmp_path: Path) -> None:
    wanted = requirements_of(case)
    (tmp_path / "adapter" / "extra.json").write_text("{}")
    with pytest.raises(InputError) as found:
        wanted.check_files(case)
    assert found.value.wanted == "no such file"
    (tmp_path / "adapter" / "extra.json").unlink()
    (tmp_path / "adapter" / "adapter_config.json").unlink()
    with pytest.raises(InputError) as found:
        wanted.check_files(case)
    assert found.value.got == "no such file"


def test_base_that_a_function_makes_has_no_files() -> None:
    assert digests_of(Case(name="made", base="python:package.module:function")) == {}


def devices(*names: str) -> list[DeviceInfo]:
    return [DeviceInfo(spec=parse_device(name), architecture="a", model=f"{name.partition(':')[0]}-model")
            for name in names]  # fmt: skip


def test_accelerators_count_once() -> None:
    assert count_accelerators(devices("cpu", "cpu@avx2", "npu:0", "npu:0@medium", "npu:1")) == {"npu-model": 2}
    assert count_accelerators(devices("cpu")) == {}


def test_fewer_accelerators_than_required() -> None:
    wanted = Requirements(accelerators=2)
    wanted.check_devices(devices("cpu", "npu:0", "npu:1"))
    with pytest.raises(UsageError, match="fewer accelerators") as found:
        wanted.check_devices(devices("cpu", "npu:0"))
    assert (found.value.got, found.value.wanted) == ("1 × npu-model", "2")
    with pytest.raises(UsageError, match="fewer accelerators") as found:
        wanted.check_devices(devices("cpu"))
    assert found.value.got == "none"
