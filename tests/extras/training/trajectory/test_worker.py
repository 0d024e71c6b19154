"""Trainings of real workers, each alone: a healthy one is right in every step, and a wrong one from its first on."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from consistency.capture.folder import SCHEMA, CaptureManifest, worker_slug
from consistency.capture.reader import read_capture
from consistency.capture.records import WorkerInfo
from consistency.capture.writer import CaptureWriter
from consistency.case import standard
from consistency.case.budget.costs import TRAINING_PARTS
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.case.stage import Level
from consistency.comparison.compare import compare
from consistency.comparison.result import Comparison, Finding
from consistency.extras.training.step_judging import StepJudge
from consistency.extras.training.trajectory import passes, step_checks
from consistency.extras.training.trajectory import worker as stage
from consistency.extras.training.trajectory.spec import TRAJECTORY
from consistency.extras.training.trajectory.yardstick import FIGURES
from consistency.worker import session
from consistency.worker.decisions.replay import Replay
from consistency.worker.decisions.track import Flip
from consistency.worker.protocol import STEP_FILE, TRAJECTORY_FILE, EventLog, Job
from tests.conftest import RunSuiteWithFaults
from tests.worker.model.made_models import a_llama, on_llama, saved, t5_with_units_at_zero

pytestmark = pytest.mark.slow

STEPS = 6
FAULTY = "cpu@baseline"
FAULTS = ("trajectory-gradient-scaled", "trajectory-forward-off", "trajectory-optimizer-off")
CASES: dict[str, dict[str, Any]] = {
    "healthy": {"stages": ("trajectory",), "steps": STEPS},
    "half": {"stages": ("trajectory",), "steps": STEPS, "dtype": "bfloat16"},
}

Train = Callable[..., Comparison]


def errors(comparison: Comparison) -> list[Finding]:
    return [finding for finding in comparison.findings if finding.severity == "error"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    torch.manual_seed(0)
    base = saved(a_llama(num_hidden_layers=2), tmp_path_factory.mktemp("small") / "base")
    adapter = on_llama(base, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    return {"base": str(base), "adapter": str(adapter)}


@pytest.fixture
def train(tmp_path: Path, small: dict[str, str]) -> Train:
    """Train one worker in this process, with a fault planted in it."""

    def run(fault: str | None = None, **options: Any) -> Comparison:
        given = {**small, "stages": (TRAJECTORY,), "level": Level.QUICK, "steps": STEPS}
        case = prepare_case(Options(**{**given, **options}))
        slug = worker_slug(FAULTY, "isolated")
        with CaptureWriter(tmp_path / "capture") as writer:
            folder = writer.worker_folder(slug)
            job = Job(
                case=case, name=FAULTY, device="cpu", load_path="isolated", folder=str(folder),
                blobs=str(writer.blobs), scratch=str(tmp_path), settings={}, makes_reference=True, threads=1,
                parent_pid=os.getpid(), fault=fault,
            )  # fmt: skip
            with EventLog(folder / "events.jsonl") as events:
                session.run(job, events)
            info = WorkerInfo(name=FAULTY, load_path="isolated", architecture=FAULTY, model="chip", status="ok")
            writer.write_worker(slug, info)
            manifest = CaptureManifest(
                schema=SCHEMA, tool="0", created="2026-01-01", host="here", case=case, workers=(slug,)
            )
            return compare([read_capture(writer.commit(manifest))])

    return run


def curve_of(found: Comparison, worker: str = FAULTY) -> dict[str, Any]:
    (curve,) = (tensor for tensor in found.tensors if tensor.tensor == "curve")
    row = curve.outcome(worker)
    assert row is not None
    return row.evidence


@pytest.fixture(scope="module")
def healthy(run_suite_with_faults: RunSuiteWithFaults) -> dict[str, Comparison]:
    return run_suite_with_faults(CASES, {}, forked=True, devices=("cpu", FAULTY))


@pytest.mark.parametrize("case", CASES)
def test_healthy_devices_are_right_in_every_step(healthy: dict[str, Comparison], case: str) -> None:
    found = healthy[case]
    assert found.verdict == "consistent", found.findings
    (note,) = (finding for finding in found.findings if finding.kind == "kept-trajectory")
    assert note.workers == ("cpu", FAULTY)
    assert f"{STEPS} steps: every step is what rounding makes" in note.message
    kinds = {tensor.tensor.rpartition(".")[2] for tensor in found.tensors}
    assert kinds == {"curve", "gradient", "updated"}
    for worker in ("cpu", FAULTY):
        curve = curve_of(found, worker)
        assert {len(curve[figure]) for figure in FIGURES} == {STEPS}
        assert curve["loss"][0] == pytest.approx(curve["float64_loss"][0], rel=1e-2)
        assert curve["distance"][-1] <= 10 * curve["noise_most_distance"][-1]
        assert curve["loss"][TRAINING_PARTS] < curve["loss"][0], "it learns: both steps are of the same sequences"


def test_two_devices_with_other_kernels_part_and_stay_healthy(healthy: dict[str, Comparison]) -> None:
    found = healthy["healthy"]
    assert any(len(tensor.classes) > 1 for tensor in found.tensors), "else this compares nothing"
    assert errors(found) == []


@pytest.mark.parametrize(
    ("fault", "place"),
    [
        (FAULTS[0], "at step 5, in the gradient of lora_B of model.layers.0.self_attn.q_proj: "),
        (FAULTS[1], "at step 4, in the gradient of "),
        (FAULTS[2], "at step 3, in lora_A of model.layers.0.self_attn.q_proj after the optimizer's step: "),
    ],
)
def test_the_first_wrong_step_is_named_and_what_follows_is_no_finding(train: Train, fault: str, place: str) -> None:
    (finding,) = errors(train(fault))
    assert finding.kind == "left-trajectory"
    assert finding.message.startswith(f"trajectory · {FAULTY} · leaves the float64 trajectory {place}")
    assert finding.message.endswith("are within tolerance")


@pytest.mark.parametrize("fault", FAULTS)
def test_before_a_fault_begins_nothing_is_found(train: Train, fault: str) -> None:
    """Two steps are right in all three: without the later ones, nobody sees them."""
    assert errors(train(fault, steps=2)) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_without_the_detection_a_fault_is_missed(train: Train, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_checks, "block_ratio", lambda *_: None)
    monkeypatch.setattr(step_checks, "record_block", lambda *_, **__: None)
    monkeypatch.setattr(StepJudge, "judge_parameter", lambda *_: None)
    assert errors(train(fault)) == []


def test_the_stages_that_take_one_step_miss_a_fault_of_a_later_one(train: Train) -> None:
    asked = (standard.FORWARD, standard.GRADIENT, TRAJECTORY)
    found = train(FAULTS[2], stages=asked)
    assert {finding.kind for finding in errors(found)} == {"left-trajectory"}
    wrong = {tensor.stage for tensor in found.tensors if tensor.is_wrong}
    assert wrong == {"trajectory"}


def test_the_adapter_is_put_back(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = stage.run

    def run(context: Any) -> None:
        def bytes_now() -> dict[str, torch.Tensor]:
            return {name: p.detach().clone() for name, p in context.model.named_parameters()}

        before = bytes_now()
        real(context)
        after = bytes_now()
        seen.append(all(torch.equal(before[name], after[name]) for name in before))
        seen.append(all(parameter.grad is None for parameter in context.model.parameters()))

    monkeypatch.setattr(stage, "run", run)
    train(steps=2)
    assert seen == [True, True]


def test_only_published_files_stay_in_the_scratch_folder(train: Train, tmp_path: Path) -> None:
    train(steps=2)
    left = {path.name for path in tmp_path.iterdir() if path.is_file()}
    of_decisions = {f"decisions-trajectory-{step}.bin" for step in range(2)}
    files = {TRAJECTORY_FILE, *(STEP_FILE.format(step) for step in range(2)), *of_decisions}
    assert left == files | {f"{Path(file).stem}.json" for file in files}


def test_with_other_operations_that_decide_the_optimizer_alone_is_judged(
    train: Train, relu: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Replay, "is_complete", lambda _: False)
    found = train(steps=2, **relu)
    assert found.verdict == "consistent"
    (skipped,) = (finding for finding in found.findings if finding.kind == "skipped")
    assert step_checks.OTHER_DECISIONS.format(2, 2) in skipped.message
    (note,) = (finding for finding in found.findings if finding.kind == "kept-trajectory")
    assert "every step of the optimizer is what rounding makes" in note.message
    assert {tensor.tensor.rpartition(".")[2] for tensor in found.tensors} == {"curve", "steps", "updated"}


def test_a_reference_that_fails_leaves_the_steps_judged(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("it insists on float32")

    monkeypatch.setattr(step_checks, "in_float64", fails)
    found = train(steps=2)
    assert errors(found) == []
    assert "distance" not in {name for name, values in curve_of(found).items() if values}
    (skipped,) = (finding for finding in found.findings if finding.kind == "skipped")
    assert "it insists on float32" in skipped.message
    (note,) = (finding for finding in found.findings if finding.kind == "kept-trajectory")
    assert "every step of the optimizer is what rounding makes" in note.message


def test_twenty_steps_are_trained_where_nobody_says_how_many(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "STEPS", 3)
    assert curve_of(train(steps=None))["steps"] == 3


@pytest.fixture(scope="module")
def relu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return a T5 whose ReLUs decide for thousands of units, two of each with the value zero before the training."""
    base, adapter = t5_with_units_at_zero(tmp_path_factory.mktemp("t5"), layers=2)
    return {"base": str(base), "adapter": str(adapter)}


def test_a_fault_that_turns_decisions_is_found_from_its_first_step_on(train: Train, relu: dict[str, str]) -> None:
    found = train(FAULTS[1], **relu, steps=5)
    (finding,) = errors(found)
    assert "leaves the float64 trajectory at step 4, in the gradient of " in finding.message
    assert not [one for one in found.findings if one.kind == "skipped"], "every step is judged"


def _relus_off_by(value: float, monkeypatch: pytest.MonkeyPatch, *, begin: int) -> None:
    """Let the device's own passes add to the values before each ReLU, from a step on."""
    real = passes.own_pass

    def own_pass(of_device: Any, step: int, run: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if step >= begin:
                patch.setattr(torch.nn.ReLU, "forward", lambda _, x: torch.relu(x + value))
            return real(of_device, step, run)

    monkeypatch.setattr(passes, "own_pass", own_pass)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_with_undecided_units_are_judged_and_no_finding(
    train: Train, relu: dict[str, str], monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    seen: list[Flip] = []
    real = Replay.is_complete

    def is_complete(replay: Replay) -> bool:
        seen.extend(replay.flips)
        return real(replay)

    monkeypatch.setattr(Replay, "is_complete", is_complete)
    _relus_off_by(1e-9, monkeypatch, begin=0)
    found = train(**relu, dtype=dtype, steps=3)
    assert seen, "the device decided otherwise by itself"
    assert all(flip.is_undecided for flip in seen)
    assert found.verdict == "consistent", found.findings
    assert not [one for one in found.findings if one.kind == "skipped"]


def test_decisions_that_rounding_does_not_explain_are_named(
    train: Train, relu: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _relus_off_by(1e-2, monkeypatch, begin=2)
    found = train(**relu, steps=4)
    (finding,) = errors(found)
    assert "leaves the float64 trajectory at step 3, in " in finding.message
    flipped = [t for t in found.tensors if t.tensor == "relu.decisions"]
    assert {row.evidence["step"] for t in flipped for row in t.outcomes} == {3}
    assert any("DenseReluDense.act" in t.layer for t in flipped)


def test_a_fault_is_found_in_a_half_type(train: Train) -> None:
    found = train(FAULTS[2], dtype="bfloat16")
    assert [finding.kind for finding in errors(found)] == ["left-trajectory"]


def test_a_case_says_so_where_it_asks_for_steps() -> None:
    case = prepare_case(dataclasses.replace(Options(base="builtin:llama"), steps=7))
    assert (case.steps, TRAJECTORY in case.stages) == (7, True)
    without = prepare_case(Options(base="builtin:llama"))
    assert (without.steps, TRAJECTORY in without.stages) == (None, False)
