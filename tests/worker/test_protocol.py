from __future__ import annotations

from pathlib import Path

import pytest

from consistency.worker.protocol import EventLog, EventReader


def written(path: Path) -> EventReader:
    with EventLog(path) as log:
        log.stage("base")
        log.step("model.norm", 0, 2)
        log.wait("for another")
        log.step("lm_head", 1, 2)
        log.done()
    return EventReader(path)


def test_events_come_once_and_in_order(tmp_path: Path) -> None:
    reader = written(tmp_path / "events.jsonl")
    assert [event.kind for event in reader.new()] == ["stage", "step", "wait", "step", "done"]
    assert reader.new() == []


def test_a_block_is_of_the_step_before_and_of_its_part_of_the_stage(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        log.stage("gradient")
        with log.part_of_stage(0.0, 0.5), log.part_of_stage(0.5, 1.0):
            log.step("with noise", 1, 2)
            log.block(3, 4, 0.5)
            log.block(4, 4)
        log.step("lm_head", 1, 2)
    _, step, block, block_alone, last = EventReader(tmp_path / "events.jsonl").new()
    assert (step.block_text, step.share) == ("", 0.375)
    assert (block.layer, block.done, block.total, block.block_text) == ("with noise", 1, 2, "block 3 of 4")
    assert block.share == 0.4375
    assert str(block) == "gradient · with noise · block 3 of 4"
    assert (block_alone.block_text, block_alone.share) == ("block 4 of 4", None)
    assert last.share is None, "what says nothing of parts is counted by its steps"


def test_events_of_a_kind_are_dropped_and_the_others_stay_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    reader = written(path)
    before = path.read_bytes().splitlines()
    reader.drop("step")
    assert path.read_bytes().splitlines() == [before[0], before[2], before[4]]
    assert [file.name for file in tmp_path.iterdir()] == ["events.jsonl"]


@pytest.mark.parametrize("damage", [b'{"at": 1.0, "kind": "st', b"\xff\n", b'{"at": 1.0, "kind": "dance"}\n'])
def test_what_cannot_be_read_is_left_as_it_is(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "events.jsonl"
    reader = written(path)
    path.write_bytes(path.read_bytes() + damage)
    before = path.read_bytes()
    reader.drop("step")
    assert path.read_bytes() == before
    EventReader(tmp_path / "none.jsonl").drop("step")


@pytest.mark.parametrize("damage", [b"garbage", b'{"at": 1, "kind": "news"}', b"\xff\xfe", b'{"at": "x"', b"[" * 5000])
def test_a_line_that_is_no_event_costs_no_other(damage: bytes, tmp_path: Path) -> None:
    reader = written(tmp_path / "events.jsonl")
    before = len(written(tmp_path / "others.jsonl").new())
    raw = (tmp_path / "events.jsonl").read_bytes()
    (tmp_path / "events.jsonl").write_bytes(damage + b"\n" + raw)
    assert len(reader.new()) == before > 0
