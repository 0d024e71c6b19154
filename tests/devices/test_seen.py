"""What the hardware log lists, and who is told that it does not list theirs."""

from __future__ import annotations

from pathlib import Path

from consistency.devices.seen import FIRST_STEPS, SEEN, unseen

ROOT = Path(__file__).resolve().parents[2]


def test_every_model_that_counts_as_seen_is_in_the_hardware_log() -> None:
    log = (ROOT / "docs/hardware-log.md").read_text(encoding="utf-8")
    assert [model for model in SEEN if model not in log] == []
    assert (ROOT / FIRST_STEPS).is_file()


def test_accelerators_that_nobody_has_run_on_are_named_once() -> None:
    assert unseen([("cpu", "AMD EPYC"), ("cuda", "H100"), ("cuda", "H100"), ("xla", "TPU")]) == ("H100",)
    assert unseen([("cuda", model) for model in SEEN]) == ()
