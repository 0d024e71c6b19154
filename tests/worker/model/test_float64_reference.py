"""The float64 reference: whoever waits for it gets it, or the reason why it never comes."""

from __future__ import annotations

from pathlib import Path

from consistency.worker.model.float64_reference import Reference, Tables, give_up, publish, wait_for
from consistency.worker.protocol import GRADIENT_FILE, REFERENCE_FILE, EventLog


def test_one_of_the_two_references_can_be_given_up(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as events:
        give_up(tmp_path, GRADIENT_FILE, "cpu, which computes it, failed: IndexError")
        tables = Tables(errors={}, samples={}, failures={}, names=())
        publish(tmp_path, {}, tables)
        lost = wait_for(tmp_path, events, GRADIENT_FILE)
        assert lost == "no float64 reference: cpu, which computes it, failed: IndexError"
        assert isinstance(wait_for(tmp_path, events, REFERENCE_FILE), Reference)
        give_up(tmp_path, REFERENCE_FILE, "too late: it is there")
        assert isinstance(wait_for(tmp_path, events, REFERENCE_FILE), Reference)
