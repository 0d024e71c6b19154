"""The drill as a user runs it; that every single fault is found and named is seen in test_faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from consistency.case.stages import Stage
from consistency.comparison.result import Comparison, Finding
from consistency.errors import UsageError
from consistency.worker.faults.catalogue import FAULTS, Fault
from consistency.workflows import drill
from consistency.workflows.drill import _row, choose
from tests.conftest import Cli


def test_drill_of_two_faults(cli: Cli, tmp_path: Path) -> None:
    chosen = ("--only", "adapter-bit-flip", "--only", "killed")
    done = cli("drill", *chosen, "--json", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)
    assert [(row["fault"], row["expected"], row["named"], row["found"]) for row in rows] == [
        ("adapter-bit-flip", "bit-flip", "bit-flip", True),
        ("killed", "lost-worker", "lost-worker", True),
    ]
    assert all({"case", "worker"} <= set(row) for row in rows)
    for row in rows:
        report = json.loads((tmp_path / row["fault"] / "report.json").read_text())
        assert report["verdict"] != "consistent"
    again = cli("drill", *chosen, "--out", tmp_path)
    assert again.returncode == 2
    assert "in the way" in again.stderr


def test_unknown_fault(cli: Cli) -> None:
    with pytest.raises(UsageError, match="unknown fault: rain"):
        choose(["rain"])
    assert cli("drill", "--only", "rain").returncode == 2


def test_fault_that_needs_two_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drill, "accelerators", lambda: ("npu:0", "npu:1"))
    assert choose([]) == tuple(FAULTS.values())
    (fault,) = choose(["bytes-elsewhere"])
    assert fault.two_devices
    monkeypatch.setattr(drill, "accelerators", lambda: ("npu:0",))
    assert set(FAULTS.values()) - set(choose([])) == {fault}
    with pytest.raises(UsageError, match="needs two accelerators"):
        choose(["bytes-elsewhere"])


def comparison(*findings: Finding) -> Comparison:
    return Comparison(
        case="x", dtype="float32", level="quick", load_paths=("isolated",), verdict="consistent", reference="cpu",
        workers=(), architectures=(), tensors=(), findings=findings,
    )  # fmt: skip


def finding(kind: str, *workers: str, message: str = "outside the bound") -> Finding:
    return Finding(kind=kind, severity="error", message=message, workers=workers)


def test_what_is_missed_misnamed_or_blamed_on_others_does_not_pass() -> None:
    fault = Fault(name="merge-off", plant="", expected="unknown", stages=(Stage.MERGED,), words="outside the bound")
    assert _row(fault, "w", comparison(finding("unknown", "w"))).passed
    assert not _row(fault, "w", comparison()).passed
    assert not _row(fault, "w", comparison(finding("zeros", "w"))).passed
    assert not _row(fault, "w", comparison(finding("unknown", "w", message="other bits"))).passed
    assert not _row(fault, "w", comparison(finding("unknown", "w"), finding("zeros", "cpu"))).passed
