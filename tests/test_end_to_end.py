"""The main job on real models, as a user starts it."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import struct
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from consistency.case.builtin import builtin_folder
from consistency.comparison.result import BAD
from tests.conftest import Cli, FinishedRun
from tests.reported import rows

Report = dict[str, Any]


def read(folder: Path) -> Report:
    found: Report = json.loads((folder / "report.json").read_text())
    return found


def test_main_job_is_consistent(finished_run: FinishedRun) -> None:
    assert finished_run.process.returncode == 0, finished_run.process.stderr
    assert "CONSISTENT" in finished_run.process.stdout
    report = read(finished_run.folder)
    assert report["schema"] == "consistency.report/1"
    assert report["verdict"] == "consistent"
    assert [f for f in report["findings"] if f["severity"] != "note"] == []


def test_main_job_has_a_worker_per_architecture(finished_run: FinishedRun) -> None:
    report = read(finished_run.folder)
    names = [worker["name"] for worker in report["workers"]]
    assert names[0] == "cpu"
    assert {name for group in report["architectures"] for name in group["workers"]} == set(names)
    if {"cpu@baseline", "cpu@avx2"} <= set(names):
        assert len(report["architectures"]) >= 3


def test_base_and_adapter_are_equal_everywhere(finished_run: FinishedRun) -> None:
    report = read(finished_run.folder)
    found = list(rows(report, "base", "adapter"))
    assert len(found) > 90 * len(report["workers"])
    assert {row["status"] for row in found} == {"equal"}
    assert {row["bits"] for row in found if row["rule"] != "limit"} == {0}


def test_computed_stages_differ_in_bits_and_stay_within(finished_run: FinishedRun) -> None:
    report = read(finished_run.folder)
    if len(report["architectures"]) < 2:
        pytest.skip("this processor has one kernel variant")
    for stage in ("operators", "merged", "forward", "gradient"):
        assert {row["status"] for row in rows(report, stage)} <= {"within", "equal"}
        assert any(row["bits"] for row in rows(report, stage))
        # outputs from end to end, and whole numbers, have none
        ratios = [row["ratio"] for row in rows(report, stage) if row["ratio"] is not None]
        assert 0 < max(ratios) <= 1


def test_second_run_on_a_device_repeats_the_bits(finished_run: FinishedRun) -> None:
    repeated = [
        row.get("repeated")
        for row in rows(read(finished_run.folder), "operators", "adapter", "merged", "forward", "gradient")
    ]
    assert repeated.count(True) > 100
    assert False not in repeated


@pytest.mark.slow
def test_bfloat16_and_other_models(cli: Cli, tmp_path: Path) -> None:
    cases = (("gpt2", "float32"), ("bert", "bfloat16"), ("llama", "bfloat16"))
    tables = [f'[[case]]\nname = "{name}"\nbase = "builtin:{name}"\ndtype = "{dtype}"\n' for name, dtype in cases]
    (tmp_path / "cases.toml").write_text("".join(tables))
    out = tmp_path / "out"
    done = cli("run", tmp_path / "cases.toml", "--devices", "cpu,cpu@baseline", "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, dtype in cases:
        report = read(out / "cases" / name)
        assert report["dtype"] == dtype
        assert {row["status"] for row in rows(report, "base", "adapter")} == {"equal"}
        assert not any(row["status"] in BAD for row in rows(report, "operators", "merged", "forward", "gradient"))


@pytest.mark.slow
def test_one_token_is_judged_by_more_passes(cli_here: Cli, tmp_path: Path) -> None:
    """One row has one independent error, of which a single pass would say nothing; embeddings are exact bits."""
    inputs = {"input_ids": np.array([[5]]), "attention_mask": np.array([[1]])}
    save_file(inputs, tmp_path / "one.safetensors")
    done = cli_here(
        "run", "--devices", "cpu", "--stages", "forward", "--inputs", tmp_path / "one.safetensors",
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = read(tmp_path / "out")["outcomes"]
    assert {one["status"] for one in found if ".input.hidden_states" in one["tensor"]} == {"equal"}
    assert {one["status"] for one in found if one["ratio"]} == {"within"}
    assert {one["status"] for one in found} == {"equal", "within"}


@pytest.mark.slow
def test_a_nan_in_the_adapter_is_no_agreement(cli: Cli, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(builtin_folder("llama") / "adapter", adapter)
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = next(name for name in sorted(tensors) if "layers.1.self_attn.q_proj.lora_B" in name)
    tensors[name][0, 0] = np.nan
    save_file(tensors, adapter / "adapter_model.safetensors")
    done = cli(
        "run", "--base", builtin_folder("llama") / "base", "--adapter", adapter, "--devices", "cpu",
        "--stages", "adapter,forward", "--out", tmp_path / "out",
    )  # fmt: skip
    assert done.returncode == 3, done.stdout + done.stderr
    text = " ".join(done.stdout.split())
    assert "of 1024 values of lora_B of model.layers.1.self_attn.q_proj" in text
    assert "the logits are NaN or infinite in the unmerged model too" in text
    report = read(tmp_path / "out")
    (finding,) = (f for f in report["findings"] if f["severity"] == "error")
    assert finding["kind"] == "nothing-compared"
    judged = [row for row in rows(report, "forward") if row["status"] in ("equal", "within")]
    # the file's NaN reaches what comes after its layer, with the adapter alone
    assert {t["tensor"] for t in judged if t["layer"] == "logits"} == {
        "adapter_off", "adapter_off.end_to_end",
    }  # fmt: skip


def flip_bit(file: Path, tensor: str, element: int, bit: int) -> tuple[str, list[int]]:
    """Flip one bit of a float32 element; return the tensor's full name and its shape."""
    raw = bytearray(file.read_bytes())
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    name = next(key for key in sorted(header) if tensor in key)
    raw[8 + length + header[name]["data_offsets"][0] + 4 * element + bit // 8] ^= 1 << bit % 8
    file.write_bytes(raw)
    return name, header[name]["shape"]


FLIPPED = {"bert": (37, 3), "gpt2": (11, 31)}


@dataclasses.dataclass(frozen=True)
class Flipped:
    """Two captures of a model, by `host-a` and `host-b`, which has another bit in its copy of the adapter's file."""

    folder: Path
    key: str
    shape: list[int]


@pytest.fixture(scope="module")
def flipped(cli_here: Cli, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Flipped]:
    home = tmp_path_factory.mktemp("apart")
    found: dict[str, Flipped] = {}
    for name, (element, bit) in FLIPPED.items():
        adapter = home / "copied" / name
        shutil.copytree(builtin_folder(name) / "adapter", adapter)
        key, shape = flip_bit(adapter / "adapter_model.safetensors", "lora_B", element, bit)
        (home / name).mkdir()
        found[name] = Flipped(home / name, key, shape)
    for host in ("host-a", "host-b"):
        config = home / f"{host}.toml"
        config.write_text('devices = "cpu"\nstages = "base,adapter,merged"\n')
        with config.open("a") as file:
            for name in FLIPPED:
                copied = f'adapter = "copied/{name}"\n' if host == "host-b" else ""
                file.write(f'[[case]]\nname = "{name}"\nbase = "builtin:{name}"\n{copied}')
        assert cli_here("capture", config, "--out", home / host).returncode == 0
        for name in FLIPPED:
            (home / host / "cases" / name).rename(home / name / host)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "element", "bit"), [(name, *where) for name, where in FLIPPED.items()])
def test_one_flipped_bit_between_captures_made_apart(
    cli_here: Cli, tmp_path: Path, flipped: dict[str, Flipped], name: str, element: int, bit: int
) -> None:
    made, key, shape = flipped[name].folder, flipped[name].key, flipped[name].shape

    done = cli_here("compare", made / "host-a", made / "host-b", "--out", tmp_path / "report")

    assert done.returncode == 1, done.stdout + done.stderr
    report = read(tmp_path / "report")
    wrong = [row for row in rows(report) if row["status"] in BAD]
    assert {f"base_model.model.{t['layer']}.{t['tensor']}.weight" for t in wrong} == {key}
    assert {t["load_path"] for t in wrong} == {"isolated", "isolated+low-memory"}
    assert [finding["kind"] for finding in report["findings"] if finding["severity"] == "error"] == ["bit-flip"]
    row = wrong[0]
    place = (row["layer"], row["tensor"])
    bits = {one["worker"]: one["bits"] for one in rows(report) if (one["layer"], one["tensor"]) == place}
    assert bits == {"host-a:cpu": 0, "host-b:cpu": 1}
    assert (row["worker"], row["status"]) == ("host-b:cpu", "outside")
    assert row["reference"] == "host-a:cpu"
    assert row["word"] == "bit-flip"
    assert row["mismatched"] == 1
    assert row["worst_index"] == [element // shape[1], element % shape[1]]
    assert row["evidence"]["bits"] == [bit]
    assert int(row["evidence"]["actual_bits"], 16) ^ int(row["evidence"]["expected_bits"], 16) == 1 << bit
    assert str(row["worst_index"]) in done.stdout


def test_a_capture_agrees_with_itself_and_is_small(cli: Cli, finished_run: FinishedRun) -> None:
    done = cli("compare", finished_run.folder, finished_run.folder)
    assert done.returncode == 0, done.stdout
    kept = sum(file.stat().st_size for file in (finished_run.folder / "captures" / "blobs").iterdir())
    adapter = (builtin_folder("llama") / "adapter" / "adapter_model.safetensors").stat().st_size
    assert kept < 1.5 * adapter  # one copy for all workers, with a header per tensor


@pytest.mark.slow
@pytest.mark.usefixtures("warm_pytest")
def test_pytest_says_the_same(pytester: pytest.Pytester, finished_run: FinishedRun) -> None:
    """Under xdist; a whole run without it is made on the double (test_runs_on_double.py)."""
    done = pytester.runpytest_subprocess("--consistency-base", "builtin:llama", "--junitxml", "out.xml", "-n", "2")
    assert done.ret == 0
    done.stdout.fnmatch_lines(["*consistent: base and adapter agree on*"])
    suite = ElementTree.parse(pytester.path / "out.xml").getroot()
    seen = {(c.get("classname"), c.get("name")) for c in suite.iter("testcase")}
    report = read(finished_run.folder)
    workers = [worker["name"] for worker in report["workers"]]
    expected = {
        (f"consistency.llama.{tensor['stage']}", f"{tensor['layer']}.{tensor['tensor']}[{worker}]")
        for tensor in report["outcomes"]
        if tensor["stage"] in ("base", "adapter", "merged", "forward") and "+" not in tensor["load_path"]
        # a buffer is in no header, nor is what a block is given: they are part of everything else
        if not tensor["layer"].endswith("rotary_emb") and not re.search(r"\.(input\.|given$)", tensor["tensor"])
        for worker in workers
    }
    assert expected <= seen
    stages = {outcome["stage"] for outcome in report["outcomes"]}
    assert {(f"consistency.llama.{s}", f"everything_else[{worker}]") for s in stages for worker in workers} <= seen
