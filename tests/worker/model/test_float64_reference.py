"""The float64 reference: whoever waits for it gets it, or the reason why it never comes."""

from __future__ import annotations

from pathlib import Path

import torch

from consistency.numerics.error_spread import Spread
from consistency.worker.model.float64_reference import Reference, Tables, give_up, publish, wait_for
from consistency.worker.protocol import GRADIENT_FILE, REFERENCE_FILE, STEP_FILE, TRAJECTORY_FILE, EventLog


def test_one_of_the_two_references_can_be_given_up(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as events:
        give_up(tmp_path, GRADIENT_FILE, "cpu, which computes it, failed: IndexError")
        tables = Tables(failures={}, names=())
        publish(tmp_path, {}, tables)
        lost = wait_for(tmp_path, events, GRADIENT_FILE)
        assert lost == "no float64 reference: cpu, which computes it, failed: IndexError"
        assert isinstance(wait_for(tmp_path, events, REFERENCE_FILE), Reference)
        give_up(tmp_path, REFERENCE_FILE, "too late: it is there")
        assert isinstance(wait_for(tmp_path, events, REFERENCE_FILE), Reference)


def test_its_maker_reads_from_memory_what_others_read_from_the_file(tmp_path: Path) -> None:
    exact = {"on::logits": torch.rand(3, 4, dtype=torch.float64).t(), "on::hidden_states.0": torch.ones(2)}
    limits = Spread.of([torch.rand(3, 4) for _ in range(3)], torch.rand(3, 4, dtype=torch.float64)).limits
    tables = Tables(limits={"float32": {"on::logits": limits}}, failures={}, names=tuple(exact))
    own = Reference(path=tmp_path / REFERENCE_FILE, tables=tables, in_memory=exact)
    assert own.read("on::logits") is exact["on::logits"]
    assert own.read("off::logits") is None
    publish(tmp_path, exact, tables)
    with EventLog(tmp_path / "events.jsonl") as events:
        found = wait_for(tmp_path, events)
    assert isinstance(found, Reference)
    assert found.tables == tables
    for name, tensor in exact.items():
        read = found.read(name)
        assert isinstance(read, torch.Tensor)
        assert torch.equal(read, tensor)


def test_the_steps_of_a_trajectory_are_given_up_with_it(tmp_path: Path) -> None:
    """Also where the first ones are there."""
    with EventLog(tmp_path / "events.jsonl") as events:
        publish(tmp_path, {}, Tables(failures={}, names=()), STEP_FILE.format(0))
        give_up(tmp_path, TRAJECTORY_FILE, "it insists on float32")
        assert isinstance(wait_for(tmp_path, events, STEP_FILE.format(0)), Reference)
        assert wait_for(tmp_path, events, STEP_FILE.format(1)) == "no float64 reference: it insists on float32"
