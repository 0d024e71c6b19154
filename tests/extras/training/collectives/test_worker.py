"""Real ranks, by gloo, on kernel variants of this machine's CPU."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from consistency.capture.names import SUM_OVER_RANKS
from consistency.capture.reader import read_capture
from consistency.capture.writer import CaptureWriter
from consistency.case import standard
from consistency.case.options import Options
from consistency.case.stage import Level
from consistency.devices.discovery import discover
from consistency.extras.diagnosis.drill.drill import DrillRow, choose, drill, prepare_trials
from consistency.extras.training.collectives.operations import (
    EVERY_COLLECTIVE,
    SIZES,
    SIZES_OF_SOME,
    groups_of,
)
from consistency.extras.training.collectives.spec import COLLECTIVES
from consistency.launch.local import _form_groups
from consistency.numerics.rules import Rule
from consistency.worker.faults.catalogue import FAULTS
from consistency.worker.faults.fault import Need
from tests.accelerator.fixtures import Warm
from tests.conftest import Cli
from tests.launch.made_assignments import on_devices
from tests.launch.warm import forked_workers

pytestmark = pytest.mark.process

DEVICES = [info.spec.name for info in discover() if info.spec.is_cpu and info.spec.name != "cpu@avx512"]
RANK_LEAVES = {
    "rank-killed": ("killed by SIGKILL", ""),
    "rank-hangs": ("gave no sign of life", "in hangs"),
    "rank-frozen": ("gave no sign of life", "in frozen"),
    "rank-raises": ("IndexError: planted", ""),
}
OF_A_GROUP = [
    fault.name
    for fault in FAULTS.values()
    if Need.RANKS in fault.needs and Need.THREE_RANKS not in fault.needs and fault.name not in RANK_LEAVES
]
STALL_S = 12


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.skipif(len(DEVICES) < 2, reason="this processor has one kernel variant: there is no group")
@pytest.mark.parametrize("level", [Level.QUICK, pytest.param(Level.STANDARD, marks=pytest.mark.slow)])
def test_healthy_ranks_are_consistent(tmp_path: Path, cli: Cli, level: Level) -> None:
    words = ("run", "--stages", "collectives", "--level", level, "--devices", ",".join(DEVICES))
    done = cli(*words, "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = report(tmp_path / "out")
    assert {finding["severity"] for finding in found["findings"]} <= {"note"}
    names = {outcome["layer"] for outcome in found["outcomes"]}
    assert names == {collective.name for collective in EVERY_COLLECTIVE}
    sizes = {outcome["tensor"] for outcome in found["outcomes"] if outcome["layer"] == "all_reduce.sum"}
    assert {f"bfloat16 {size} of {len(DEVICES)} ranks" for size in SIZES[level]} <= sizes
    for members in groups_of(len(DEVICES)):
        some = "+".join(DEVICES[member] for member in members)
        assert {f"bfloat16 {size} of {some}" for size in SIZES_OF_SOME[level]} <= sizes
    (note,) = (finding["message"] for finding in found["findings"] if finding["kind"] == "skipped")
    assert "gloo adds up a tensor with gaps as if it had none" in note, "all else can be done"
    for worker in read_capture(tmp_path / "out").workers:
        excused = {one.layer for one in worker.records if one.nondeterministic == (SUM_OVER_RANKS,)}
        sums = {one.layer for one in worker.records if one.rule == Rule.BOUND and one.digest}
        assert excused == (sums if len(DEVICES) > 2 else set()), "another host may add up three ranks in another order"


@pytest.mark.slow
def test_one_device_forms_no_group(tmp_path: Path, cli: Cli) -> None:
    done = cli("run", "--stages", "collectives", "--devices", "cpu", "--out", "out", cwd=tmp_path)
    assert done.returncode == 3, "nothing was compared"
    assert "no other worker runs beside this one" in done.stdout


def drilled(warm: Warm, out: Path, faults: Iterable[str], devices: Sequence[str]) -> tuple[DrillRow, ...]:
    """Drill at the smallest sizes, which every fault is planted in: large ones take most of the time."""
    options = Options(level=Level.QUICK, devices=tuple(devices), stall=STALL_S)
    with forked_workers(warm().address):
        trials = prepare_trials(choose(tuple(faults)), options, several=None, out=None, watch=lambda *_: None)
        return drill(trials, out=out, watch=lambda *_: None)


Drilled = tuple[Path, tuple[DrillRow, ...]]


@pytest.fixture(scope="module")
def of_two(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Drilled:
    """Drill a group of two, in one set of workers: while one rank is waited for, the next fault is planted."""
    out = tmp_path_factory.mktemp("drill") / "out"
    return out, drilled(warm, out, (*RANK_LEAVES, *OF_A_GROUP), ("cpu", "cpu@baseline"))


@pytest.mark.slow
@pytest.mark.skipif(len(DEVICES) < 2, reason="this processor has one kernel variant: there is no group")
def test_every_fault_of_a_group_is_found_and_named(of_two: Drilled) -> None:
    folder, rows = of_two
    assert {row.fault for row in rows} == {*RANK_LEAVES, *OF_A_GROUP}
    assert [row for row in rows if not row.passed] == []
    again = report(folder / "sum-other-order-again")
    assert again["verdict"] == "consistent"
    (note,) = (finding["message"] for finding in again["findings"] if finding["kind"] == "not-repeatable")
    assert note.endswith("within tolerance, when repeated: the order is not fixed (gloo)")


@pytest.mark.slow
@pytest.mark.skipif(len(DEVICES) < 3, reason="this processor has two kernel variants: no pair is a part of the group")
def test_a_fault_of_pairs_alone_is_found(tmp_path: Path, warm: Warm) -> None:
    (row,) = drilled(warm, tmp_path / "out", ["sum-wrong-in-pairs"], DEVICES)
    assert row.passed, row
    found = report(tmp_path / "out" / "sum-wrong-in-pairs")
    wrong = {row["tensor"] for row in found["outcomes"] if row["status"] == "outside"}
    assert wrong
    assert all("+" in tensor for tensor in wrong), "it is no fault of all ranks together"


@pytest.mark.slow
@pytest.mark.skipif(len(DEVICES) < 2, reason="this processor has one kernel variant: there is no group")
@pytest.mark.parametrize("name", RANK_LEAVES)
def test_a_rank_that_leaves_is_named_and_the_others_keep_what_they_have(of_two: Drilled, name: str) -> None:
    reason, stack = RANK_LEAVES[name]
    found = report(of_two[0] / name)
    assert found["verdict"] == "incomplete", "a run with this verdict ends with status 3"
    (left,) = (finding for finding in found["findings"] if finding["severity"] == "error")
    assert left["workers"] == ["cpu@baseline"]
    assert reason in left["message"]
    assert any(line.endswith(stack) for line in left["detail"] or [""]), "where it was, innermost first"
    notes = [finding["message"] for finding in found["findings"] if "skipped on cpu: " in finding["message"]]
    (note,) = (text for text in notes if "cpu@baseline" in text)
    assert reason in note, "the other rank says for whom it waited"
    assert "during broadcast float32 1 of 2 ranks" in note, "and in what"
    kept = {row["tensor"] for row in found["outcomes"] if row["layer"] == "all_reduce.sum"}
    assert f"float32 {SIZES[Level.QUICK][-1]} of 2 ranks" in kept, "what was done before is kept"


def test_ranks_are_workers_of_one_kind_that_run_side_by_side(tmp_path: Path) -> None:
    with CaptureWriter(tmp_path / "capture") as writer:
        of_cpu = on_devices(writer, COLLECTIVES, "cpu", "cpu@baseline")
        mixed = on_devices(writer, COLLECTIVES, "cpu", "cuda:0", "cuda:1", "npu:0")
        other = on_devices(writer, standard.OPERATORS, "cpu", "cpu@baseline")
    _form_groups(of_cpu, stall_s=60)
    assert [one.group and one.group.ranks for one in of_cpu] == [("cpu", "cpu@baseline")] * 2
    assert [one.group and one.group.rank for one in of_cpu] == [0, 1]
    _form_groups(mixed, stall_s=60)
    assert [one.group and one.group.ranks for one in mixed] == [None, ("cuda:0", "cuda:1"), ("cuda:0", "cuda:1"), None]
    _form_groups(other, stall_s=60)
    assert [one.group for one in other] == [None, None]
