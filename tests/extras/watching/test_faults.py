"""Faults planted into real trainings by several processes are found and named; their healthy twins are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import consistency
from consistency.extras.diagnosis.reproduce.folder import reproduce
from consistency.extras.watching.watch import TrainingError
from tests.extras.watching.faults import (
    add_in_half,
    base_bit,
    buffer_bit,
    drop_rank,
    late_sum,
    lora_bit,
    no_fault,
    old_state,
    scaled_attention,
    zero_backward,
)
from tests.extras.watching.trainings import Training, batch, on_ranks

pytestmark = pytest.mark.process

LAYER = "model.layers.1"


def train(rank: int, world: int, fault: Callable[[int, Training], None], accumulate: int, same: bool) -> Any:
    batches = (lambda step, _: batch(step)) if same else batch
    training = Training(rank=rank, world=world, accumulate=accumulate, batches=batches)
    training.options = {"timeout_s": 20.0}
    found = training.run(None, fault)
    return [[one.kind, list(one.ranks), one.tensors[0][0] if one.tensors else "", one.message] for one in found]


def found_on(world: int, fault: Any = no_fault, *, accumulate: int = 1, same: bool = False) -> list[Any]:
    by_rank = on_ranks(world, train, fault, accumulate, same)
    assert all(found == by_rank[0] for found in by_rank), "the ranks were told different things"
    return list(by_rank[0])


@pytest.mark.parametrize(("world", "accumulate"), [(2, 1), (3, 2)])
def test_a_healthy_training_has_no_finding(world: int, accumulate: int) -> None:
    assert found_on(world, accumulate=accumulate) == []


@pytest.mark.parametrize(
    ("fault", "kind", "layer"),
    [
        (lora_bit, "ranks-differ", f"{LAYER}.self_attn.q_proj.lora_B.default"),
        (base_bit, "base-changed", f"{LAYER}.mlp.up_proj"),
        (old_state, "ranks-differ", f"{LAYER}.self_attn.q_proj.lora_B.default.weight"),
        (buffer_bit, "ranks-differ", "model.rotary_emb"),
        (scaled_attention, "wrong-block", LAYER),
        (zero_backward, "wrong-block", LAYER),
        (drop_rank, "wrong-sum", ""),
    ],
)
def test_a_fault_of_one_rank_is_named(fault: Any, kind: str, layer: str) -> None:
    found = found_on(3, fault)
    named = [one for one in found if one[0] == kind]
    assert named, found
    assert named[0][1] == [1], found
    assert layer in named[0][2], found


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [(add_in_half, "wrong-sum", "bfloat16"), (late_sum, "wrong-sum", "off by"), (lora_bit, "ranks-differ", "majority")],
)
def test_a_fault_of_two_ranks_is_found(fault: Any, kind: str, words: str) -> None:
    found = found_on(2, fault)
    assert [one for one in found if one[0] == kind and words in one[3]], found


def test_ranks_with_the_same_batch_are_named() -> None:
    assert [one[:2] for one in found_on(2, same=True)] == [["same-batch", [0, 1]]]


def train_and_raise(rank: int, world: int) -> str:
    training = Training(rank=rank, world=world, on_finding="raise", options={"timeout_s": 20.0})
    try:
        training.run(None, base_bit)
    except TrainingError as error:
        return str(error)
    return ""


def train_into(rank: int, world: int, folder: str) -> int:
    Training(rank=rank, world=world, options={"timeout_s": 20.0}).run(Path(folder), scaled_attention)
    return 0


def test_what_one_fault_does_is_one_finding_in_the_report(tmp_path: Path) -> None:
    on_ranks(3, train_into, str(tmp_path))
    report = consistency.load_report(tmp_path)
    assert report.verdict == "inconsistent"
    (finding,) = report.findings
    assert (finding.kind, finding.workers) == ("wrong-block", ("rank 1",))
    for pair in ("ranks 0 and 1", "ranks 1 and 2"):
        assert any(line.startswith(f"with it: {pair} compute") for line in finding.detail), finding.detail
    assert all((tmp_path / name).is_file() for name in ("report.md", "report.html", "watch.jsonl"))
    # the rank has given the first one what shows it
    reproduced = reproduce(tmp_path, 1, tmp_path / "repro")
    assert reproduced.happens_here, reproduced.output
    facts = json.loads((tmp_path / "repro" / "finding.json").read_text())
    assert (facts["worker"], facts["device"]) == ("rank 1", "cpu")


def test_all_ranks_raise_alike() -> None:
    first, second = on_ranks(2, train_and_raise)
    assert first == second
    assert "rank 1 changed 1 parameter" in first
