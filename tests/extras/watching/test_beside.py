"""The CPU's part of a check runs in a process beside the training, and says the same as in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import consistency
from consistency.extras.diagnosis.reproduce.folder import reproduce
from consistency.extras.watching import beside
from consistency.extras.watching.beside import JudgeBeside, free_threads
from consistency.extras.watching.watch import TrainingError
from tests.extras.watching.trainings import (
    Training,
    block,
    is_of_the_device,
    on_ranks,
    scaled_three_times,
    tiny_llama,
    trainer,
)

pytestmark = pytest.mark.process

CHECK = "the CPU says the same"


def lines_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "watch.jsonl").read_text().splitlines()]
    return [line for line in lines if line["check"] == CHECK]


def scale(module: Any, args: Any, output: Any) -> Any:
    """Compute wrongly, as a hook that another process can have too."""
    return output * 1.02 if is_of_the_device() else output


def scaled(step: int, training: Training) -> None:
    if step == 1:
        block(training).self_attn.o_proj.register_forward_hook(scale)


def waiting_for_answer(step: int, training: Training) -> None:
    """Train as slowly as the process beside computes."""
    judge = training.watch._blocks._beside
    if judge is not None and judge.waiting is not None:
        assert judge._answer(judge.waiting, 120.0) is not None


def test_a_healthy_block_is_judged_beside_the_training(tmp_path: Path) -> None:
    plain, watched = Training(steps=5), Training(steps=5, options={"beside": True})
    plain.run(tmp_path / "plain")
    assert watched.run(tmp_path / "watched", waiting_for_answer) == []
    assert watched.losses == plain.losses
    told = [line for line in lines_of(tmp_path / "watched") if "of step" in line]
    assert [(line["of step"], line["block"]) for line in told] == [
        (1, "model.layers.0"),
        (2, "model.layers.1"),
        (4, "model.layers.2"),
    ]
    assert all(line["status"] == "ok" and 0 < line["ratio"] < 1 for line in told), told
    assert not any("judged once more" in line for line in told), told


def test_a_block_that_waits_holds_no_batch() -> None:
    """A gradient of logits is as large as several blocks."""
    held = []

    def look(step: int, training: Training) -> None:
        if step == 2:
            held.append(training.watch._blocks._beside.waiting.batch)

    Training(steps=2, every=2, options={"beside": True}).run(None, look)
    (batch,) = held
    assert batch.tensors() == []
    assert batch.marks is None


def test_a_training_by_the_trainer_is_judged_beside(tmp_path: Path) -> None:
    callback = consistency.watch.Callback(every=2, beside=True)
    options: dict[str, Any] = {"bf16": True, "gradient_checkpointing": True}
    trainer(tmp_path, tiny_llama(dropout=0.1), [callback], **options).train()
    assert callback.findings == []
    told = [line for line in lines_of(tmp_path / "watch") if "of step" in line]
    assert told
    assert all(line["status"] == "ok" for line in told), told


def test_a_wrong_block_is_named_with_the_weights_that_it_had(tmp_path: Path) -> None:
    """At the end too, where there is no further check."""
    training = Training(steps=1, every=1, on_finding="raise", options={"beside": True})
    with pytest.raises(TrainingError, match=r"computes model\.layers\.1 wrong: .* between steps 0 and 1"):
        training.run(tmp_path, scaled)
    told = [line for line in lines_of(tmp_path) if line.get("of step") == 1]
    assert [line["judged once more"] for line in told] == ["not within rounding"]
    reproduced = reproduce(tmp_path, 1, tmp_path / "repro")
    assert reproduced.happens_here, reproduced.output


def test_a_block_that_was_wrong_once_is_found_beside_too(tmp_path: Path) -> None:
    """The device's results are judged as they were sent: a fault that comes and goes would be gone."""
    training = Training(steps=1, every=1, options={"beside": True})
    (found,) = training.run(tmp_path, scaled_three_times)
    assert found.kind == "wrong-block"
    assert not (tmp_path / "captures").exists()


def scaled_and_no_value(step: int, training: Training) -> None:
    scaled(step, training)
    block(training).mlp.ballast = lambda: None


def scaled_with_ballast(step: int, training: Training) -> None:
    scaled(step, training)
    block(training).mlp.ballast = [torch.zeros(2**23)]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(scaled_and_no_value, "lambda"), (scaled_with_ballast, "it holds more than its own weights")],
)
def test_a_block_that_cannot_be_sent_is_judged_in_the_training(
    fault: Any, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (found,) = Training(steps=1, every=1, options={"beside": True}).run(None, fault)
    assert found.kind == "wrong-block"
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "not beside it" in line]
    assert reason in said


def test_a_hook_that_cannot_be_sent_keeps_no_block_from_being_sent(tmp_path: Path) -> None:
    """transformers hangs local functions on the blocks of models with experts."""
    seen = []

    def look(module: Any, args: Any, output: Any) -> None:
        seen.append(module)

    def looked_at(step: int, training: Training) -> None:
        if step == 1:
            block(training).register_forward_hook(look)

    assert Training(steps=2, every=1, options={"beside": True}).run(tmp_path, looked_at) == []
    assert [line["status"] for line in lines_of(tmp_path) if line.get("of step") == 1] == ["ok"]
    assert len(seen) > 2


def test_what_a_process_that_is_killed_had_is_judged_in_the_training() -> None:
    def kill(step: int, training: Training) -> None:
        scaled(step, training)
        if step == 2:
            training.watch._blocks._beside._process.kill()
            training.watch._blocks._beside._process.wait()

    (found,) = Training(steps=2, every=1, options={"beside": True}).run(None, kill)
    assert found.kind == "wrong-block"
    assert "between steps 0 and 1" in found.message


def train(rank: int, world: int, folder: str, is_wrong: bool) -> Any:
    # the second rank alone has room for a process beside it
    training = Training(rank=rank, world=world, steps=1, every=1, options={"timeout_s": 60.0, "beside": rank == 1})
    found = training.run(Path(folder), scaled if is_wrong and rank == 1 else None)
    return [[one.kind, list(one.ranks), one.message] for one in found]


@pytest.mark.parametrize("is_wrong", [False, True])
def test_ranks_of_which_one_judges_beside_are_told_the_same(tmp_path: Path, is_wrong: bool) -> None:
    first, second = on_ranks(2, train, str(tmp_path), is_wrong)
    assert first == second
    named = [one for one in first if one[0] == "wrong-block"]
    assert [one[1] for one in named] == ([[1]] if is_wrong else [])
    assert bool(first) == is_wrong


def test_cores_are_left_to_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "available_cores", lambda: 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    places = [f"host{number // 8}, cuda:{number % 8} H100" for number in range(16)]
    assert free_threads(places, places[3], torch.device("cuda:3")) == 7
    assert free_threads(["host0, cpu"] * 8, "host0, cpu", torch.device("cpu")) == 2


def test_a_process_beside_ends_with_the_watch() -> None:
    judge = JudgeBeside(1)
    judge.close()
    assert judge._process.returncode is not None
    assert not Path(judge._folder.name).exists()
