"""A model with ReLU on a device that rounds a little otherwise: its gradients jump, and are no finding."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from consistency.capture.folder import SCHEMA, CaptureManifest
from consistency.capture.reader import read_capture
from consistency.capture.records import WorkerInfo
from consistency.capture.writer import CaptureWriter
from consistency.case import standard
from consistency.case.budget.costs import Setting, cost_of
from consistency.case.budget.shape import read_shape
from consistency.case.case import Case
from consistency.comparison.compare import compare
from consistency.comparison.result import Comparison
from consistency.stages.gradient import worker as stage
from consistency.worker import session
from consistency.worker.decisions.replay import Replay
from consistency.worker.protocol import DECISIONS_FILE, EventLog, Job
from tests.worker.model.made_models import case_of, t5_with_units_at_zero

pytestmark = pytest.mark.process

OTHER = "other"
Compare = Callable[[float], Comparison]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Return a T5 with adapted units whose pre-activation is exactly zero: the gradient of their factors jumps."""
    base, adapter = t5_with_units_at_zero(tmp_path_factory.mktemp("t5"), layers=1)
    return case_of(base, adapter, stages=(standard.GRADIENT,))


@pytest.fixture
def compare_with(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compare:
    """Compare the CPU with a worker whose values before each ReLU are off by so much."""

    def run(off: float) -> Comparison:
        with CaptureWriter(tmp_path / "capture") as writer:
            for name in ("cpu", OTHER):
                if name == OTHER:
                    monkeypatch.setattr(torch.nn.ReLU, "forward", lambda _, x: torch.relu(x + off))
                folder = writer.worker_folder(name)
                job = Job(
                    case=case, name=name, device="cpu", load_path="isolated", folder=str(folder),
                    blobs=str(writer.blobs), scratch=str(tmp_path), settings={}, makes_reference=name == "cpu",
                    threads=1, parent_pid=os.getpid(),
                )  # fmt: skip
                with EventLog(folder / "events.jsonl") as events:
                    session.run(job, events)
                info = WorkerInfo(name=name, load_path="isolated", architecture=name, model="chip", status="ok")
                writer.write_worker(name, info)
            manifest = CaptureManifest(
                schema=SCHEMA, tool="0", created="2026-01-01", host="here", case=case, workers=("cpu", OTHER)
            )
            return compare([read_capture(writer.commit(manifest))])

    return run


def decisions(comparison: Comparison) -> set[tuple[str, str]]:
    return {(t.layer, row.status) for t in comparison.tensors if t.tensor == "relu.decisions" for row in t.outcomes}


PLACES = {f"{part}.block.0.layer.{layer}.DenseReluDense.act" for part, layer in (("encoder", 1), ("decoder", 2))}


@pytest.mark.slow
def test_undecided_units_are_no_finding(compare_with: Compare) -> None:
    found = compare_with(1e-9)
    assert found.verdict == "consistent", found.findings
    assert decisions(found) == {(place, "within") for place in PLACES}
    rows = [
        row for t in found.tensors if t.tensor.endswith(".gradient") for worker, row in t.by_worker() if worker == OTHER
    ]
    assert rows
    assert {row.status for row in rows} <= {"within", "equal", "skipped"}
    assert "within" in {row.status for row in rows}


@pytest.mark.slow
def test_what_decisions_take_of_the_disk_is_in_the_budget(compare_with: Compare, case: Case, tmp_path: Path) -> None:
    shape = read_shape(case)
    costs = [
        cost_of(standard.GRADIENT, Setting(shape=one, case=case, on_device=False, makes_reference=True)).kept_bytes
        for one in (shape, dataclasses.replace(shape, kinked_units=0))
    ]  # fmt: skip
    compare_with(0.0)
    taken = (tmp_path / DECISIONS_FILE.format("gradient")).stat().st_size
    assert taken == pytest.approx(costs[0] - costs[1], rel=0.5)  # masks decide too


@pytest.mark.slow
def test_without_the_track_they_are(compare_with: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replay, "watch_if_any", lambda *_: None)
    monkeypatch.setattr(Replay, "is_complete", lambda _: True)
    found = compare_with(1e-9)
    assert found.verdict == "inconsistent"


@pytest.mark.slow
def test_units_that_no_rounding_lets_through_are_a_finding_of_their_own(compare_with: Compare) -> None:
    found = compare_with(0.05)
    assert found.verdict == "inconsistent"
    kinds = {finding.kind for finding in found.findings if finding.severity == "error"}
    assert "decision-flipped" in kinds
    assert decisions(found) == {(place, "outside") for place in PLACES}
    (finding,) = [f for f in found.findings if f.kind == "decision-flipped"]
    assert finding.workers == (OTHER,)
    assert "decisions of relu in encoder.block.0.layer.1.DenseReluDense.act flipped: margin" in finding.message


@pytest.mark.slow
def test_a_pass_that_cannot_be_replayed_is_skipped_with_that_reason(
    compare_with: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consistency.worker.decisions.replay.Replay.was_complete", lambda *_: False)
    plain = torch.nn.ReLU.forward

    def other_kernels(_: str, gradient: torch.Tensor) -> torch.Tensor:
        return gradient if torch.nn.ReLU.forward is plain else gradient * (1 + 2**-22)

    monkeypatch.setattr(stage, "computed", other_kernels)
    found = compare_with(1e-9)
    assert found.verdict == "consistent", found.findings
    rows = [
        row for t in found.tensors if t.tensor.endswith(".gradient") for worker, row in t.by_worker() if worker == OTHER
    ]
    assert {row.status for row in rows if "decided otherwise" in (row.reason or "")} == {"skipped"}
