"""The drill as a user runs it; that every single fault is found and named is seen in test_faults."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from consistency.case import standard
from consistency.case.load_path import LoadPath
from consistency.case.options import Options
from consistency.case.stage import Level
from consistency.comparison.outcomes import Outcome
from consistency.comparison.result import Comparison, Finding, TensorComparison
from consistency.devices.spec import DeviceInfo, parse_device
from consistency.errors import InputError, UsageError
from consistency.extras.diagnosis.drill import drill
from consistency.extras.diagnosis.drill.drill import Trial, _not_planted, _row, check_healthy, choose
from consistency.extras.diagnosis.drill.plantable import several_adapters
from consistency.worker.faults.catalogue import FAULTS
from consistency.worker.faults.fault import Fault
from consistency.workflows import pipeline, planning
from consistency.workflows.suite import PlannedCase
from tests.accelerator.fixtures import Warm
from tests.conftest import Cli
from tests.launch.in_this_process import in_this_process
from tests.launch.warm import forked_workers


def test_drill_of_two_faults(cli_here: Cli, tmp_path: Path) -> None:
    chosen = ("--only", "adapter-bit-flip", "--only", "out-of-memory")
    done = cli_here("drill", *chosen, "--json", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)
    assert [(row["fault"], row["expected"], row["named"], row["found"]) for row in rows] == [
        ("adapter-bit-flip", "bit-flip", "bit-flip", True),
        ("out-of-memory", "lost-worker", "lost-worker", True),
    ]
    assert all({"case", "worker"} <= set(row) and row["planted"] for row in rows)
    for row in rows:
        report = json.loads((tmp_path / row["fault"] / "report.json").read_text())
        assert report["verdict"] != "consistent"
    again = cli_here("drill", *chosen, "--out", tmp_path)
    assert again.returncode == 2
    assert "in the way" in again.stderr


@pytest.mark.slow
def test_drill_of_a_case_of_ones_own(cli_here: Cli, tmp_path: Path) -> None:
    """What cannot be planted has a row with the reason, and fails nothing."""
    chosen = ("--only", "adapter-zeros", "--only", "merge-zeros", "--only", "base-through-bfloat16")
    case = ("--base", "builtin:gpt2", "--dtype", "bfloat16", "--devices", "cpu,cpu@baseline")
    done = cli_here("drill", *case, *chosen, "--json", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    by_name = {row["fault"]: row for row in json.loads(done.stdout)}
    for fault in ("adapter-zeros", "merge-zeros"):
        row = by_name[fault]
        assert (row["planted"], row["found"], row["named"]) == (True, True, row["expected"])
        assert json.loads((tmp_path / fault / "report.json").read_text())["verdict"] == "inconsistent"
    left_out = by_name["base-through-bfloat16"]
    assert (left_out["planted"], left_out["found"], left_out["named"]) == (False, False, None)
    assert left_out["message"] == "the base is loaded in bfloat16, whose rounding is larger than this fault"
    assert not (tmp_path / "base-through-bfloat16").exists()
    assert json.loads((tmp_path / "no-fault" / "report.json").read_text())["verdict"] == "consistent"


@pytest.mark.process
def test_fail_fast_plants_nothing_after_a_fault_that_is_not_named() -> None:
    faults = choose(["adapter-bit-flip", "adapter-zeros"])
    with in_this_process():
        trials = drill.prepare_trials(faults, Options(), several=None, out=None, watch=lambda *_: None)
        trials = (dataclasses.replace(trials[0], expected="another"), *trials[1:])
        first, second = drill.drill(trials, out=None, watch=lambda *_: None, fail_fast=True)
    assert (first.planted, first.passed) == (True, False)
    assert (second.planted, second.message) == (False, "--fail-fast: adapter-bit-flip was not found and named")


def test_a_case_with_findings_of_its_own_is_refused() -> None:
    """Nobody could tell which finding is the fault's."""
    check_healthy(comparison(Finding(kind="planted", severity="note", message="for tests")))
    with pytest.raises(InputError, match="without any fault planted") as refused:
        check_healthy(comparison(finding("zeros", "cuda:1", message="adapter · cuda:1 · zeros")))
    assert refused.value.parts["got"] == "adapter · cuda:1 · zeros"


def test_a_warning_of_the_case_itself_is_no_sign_of_a_fault() -> None:
    """Such as that a torch built for CUDA finds no GPU."""
    warning = Finding(kind="no-accelerator", severity="warning", message="no device", workers=("cpu",))
    check_healthy(comparison(warning))
    fault = Fault(name="merge-off", plant="", expected="differs", stages=(standard.MERGED,))
    trial = Trial(fault=fault, worker="w", expected="differs", known=frozenset({("no-accelerator", "cpu")}))
    assert _row(trial, comparison(warning, finding("differs", "w"))).passed
    assert not _row(dataclasses.replace(trial, known=frozenset()), comparison(warning, finding("differs", "w"))).passed
    assert not _row(trial, comparison(warning)).passed


def test_a_fault_in_a_base_of_the_drill_itself_is_refused_with_the_reason(cli_here: Cli) -> None:
    done = cli_here("drill", "--base", "builtin:gpt2", "--only", "router-flipped")
    assert done.returncode == 2
    assert "none of these faults can be planted in this case" in done.stderr
    assert "a base that the drill makes itself" in done.stderr


def test_unknown_fault(cli_here: Cli) -> None:
    with pytest.raises(UsageError, match="unknown fault: rain"):
        choose(["rain"])
    assert cli_here("drill", "--only", "rain").returncode == 2


def test_fault_that_needs_two_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drill, "accelerators", lambda: ("npu:0", "npu:1"))
    (fault,) = choose(["bytes-elsewhere"])
    assert fault.two_devices
    monkeypatch.setattr(drill, "accelerators", lambda: ("npu:0",))
    assert set(choose([])) == set(FAULTS.values())
    with pytest.raises(UsageError, match="needs two accelerators"):
        choose(["bytes-elsewhere"])
    row = _not_planted(Trial(fault=fault, worker="", expected=fault.expected, why_not="needs two accelerators"))
    assert (row.planted, row.message, row.expected) == (False, "needs two accelerators", "touched")


def comparison(*findings: Finding) -> Comparison:
    return Comparison(
        case="x", dtype="float32", level="quick", load_paths=("isolated",), verdict="consistent", reference="cpu",
        workers=(), architectures=(), tensors=(), findings=findings,
    )  # fmt: skip


def finding(kind: str, *workers: str, message: str = "outside the bound") -> Finding:
    return Finding(kind=kind, severity="error", message=message, workers=workers)


def test_what_is_missed_misnamed_or_blamed_on_others_does_not_pass() -> None:
    fault = Fault(name="merge-off", plant="", expected="differs", stages=(standard.MERGED,), words="outside the bound")
    trial = Trial(fault=fault, worker="w", expected="differs")
    assert _row(trial, comparison(finding("differs", "w"))).passed
    assert not _row(trial, comparison()).passed
    assert not _row(trial, comparison(finding("zeros", "w"))).passed
    assert not _row(trial, comparison(finding("differs", "w", message="other bits"))).passed
    assert not _row(trial, comparison(finding("differs", "w"), finding("zeros", "cpu"))).passed
    assert _row(dataclasses.replace(trial, expected="zeros"), comparison(finding("zeros", "w"))).passed


def test_a_fault_of_a_load_path_that_is_not_taken_is_not_planted() -> None:
    """As with transformers' loader on a quantized base."""
    fault = FAULTS["load-path-transformers-zeros"]
    trial = Trial(fault=fault, worker="w", expected="zeros")
    row = Outcome(workers=("w",), reference=None, status="skipped", reason="transformers cannot load this adapter")
    table = TensorComparison(
        stage="adapter", load_path="isolated+transformers", layer="x", tensor="y", shape=(), dtype="", rule="bitwise",
        classes=(), outcomes=(row,),
    )  # fmt: skip
    found = _row(trial, msgspec.structs.replace(comparison(), tensors=(table,)))
    assert not found.planted
    assert found.message == "load path isolated+transformers: transformers cannot load this adapter"
    judged = msgspec.structs.replace(table, outcomes=(msgspec.structs.replace(row, status="equal", reason=None),))
    assert _row(trial, msgspec.structs.replace(comparison(), tensors=(table, judged))).planted


@pytest.mark.slow
@pytest.mark.process
def test_an_adapter_in_a_half_type_is_known_by_its_bytes_too(tmp_path: Path, llama_adapter: Path, warm: Warm) -> None:
    """PEFT loads it as float32, so what another tensor's file holds is not bit for bit what is in the model."""
    adapter = tmp_path / "adapter"
    shutil.copytree(llama_adapter, adapter)
    file = adapter / "adapter_model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    devices = ("cpu", "cpu@baseline")
    options = Options(base="builtin:llama", adapter=str(adapter), devices=devices, level=Level.QUICK)
    faults = choose(["adapter-layers-swapped", "hotswap-leaves-one"])
    with forked_workers(warm().address), several_adapters(adapter) as several:
        trials = drill.prepare_trials(faults, options, several=several, out=None, watch=lambda *_: None)
        rows = drill.drill(trials, out=None, watch=lambda *_: None)
    assert [(row.fault, row.named) for row in rows] == [
        ("adapter-layers-swapped", "swapped"),
        ("hotswap-leaves-one", "stale"),
    ]


def test_on_the_cpu_a_trial_goes_on_while_another_one_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(base="builtin:llama", devices=("cpu",))
    plan = pipeline.prepare(options)

    def at_once(**changed: Any) -> int:
        return drill._at_once([PlannedCase(options=options, plan=dataclasses.replace(plan, **changed))])

    assert at_once() == drill.TRIALS_AT_ONCE > 1
    planned = PlannedCase(options=dataclasses.replace(options, name="zeros"), plan=plan)
    trial = Trial(fault=FAULTS["adapter-zeros"], worker="cpu", expected="zeros", planned=planned)
    assert drill.plan_of([trial]).limits.cases_at_once == drill.TRIALS_AT_ONCE
    assert at_once(limits=dataclasses.replace(plan.limits, threads=1)) == 1
    accelerator = DeviceInfo(spec=parse_device("cuda:0"), architecture="a", model="m")
    assert at_once(devices=(*plan.devices, accelerator)) == 1, "it has one process at a time"
    monkeypatch.setattr(planning, "available_bytes", lambda: 600 << 20)
    assert at_once() == 1


def test_a_case_is_run_without_a_fault_by_the_load_paths_of_the_faults() -> None:
    """What a loader does wrong by itself is known then, and no fault is blamed for it."""
    plan = pipeline.prepare(Options(devices=("cpu",)))
    default = drill._load_paths([FAULTS["adapter-zeros"]], plan)
    assert LoadPath.ISOLATED in default
    added = set(drill._load_paths([FAULTS["load-path-transformers-zeros"]], plan)) - set(default)
    assert added == {LoadPath.ISOLATED_TRANSFORMERS}


def test_the_second_adapter_of_a_drill_is_kept_where_its_reports_are(tmp_path: Path) -> None:
    """The commands that reports print name it: in a folder that is gone they end with status 2."""
    with several_adapters(keep=tmp_path / "out") as adapters:
        assert adapters is not None
    assert Path(adapters[1].path).is_relative_to(tmp_path / "out")
    assert (Path(adapters[1].path) / "adapter_model.safetensors").exists()
    with several_adapters() as adapters:
        assert adapters is not None
    assert not Path(adapters[1].path).exists()
