"""What a ledger makes of the tensors of repeats."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from consistency.capture.soak import ChangedTensor, Condition
from consistency.numerics.digest import digest
from consistency.worker import ledger as module
from consistency.worker.ledger import Ledger
from consistency.worker.recorder import Recorder

LABEL = ("merged", "layer", "weight")
RIGHT = torch.arange(8, dtype=torch.float32)
WRONG = RIGHT.clone()
WRONG.view(torch.int32)[3] ^= 1 << 20


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Recorder]:
    with Recorder(tmp_path, tmp_path) as found:
        yield found


def soaked(record: Recorder, *values: torch.Tensor, own: bool = False) -> Ledger:
    ledger = Ledger(record, {LABEL: digest(RIGHT).value}, condition=lambda repeat: Condition(at="now", repeat=repeat))
    for repeat, value in enumerate(values, start=1):
        ledger.begin(repeat)
        ledger.see(LABEL, value, own=own)
    return ledger


def only(ledger: Ledger) -> ChangedTensor:
    (change,) = ledger.changes()
    return change


def test_equal_bits_are_no_change(record: Recorder, tmp_path: Path) -> None:
    ledger = soaked(record, RIGHT, RIGHT.clone())
    assert ledger.changes() == ()
    assert ledger.any.summary() is None
    assert (ledger.stage("merged", 2).tensors, ledger.stage("merged", 2).changed) == (1, None)
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_change_is_counted_stored_and_named(record: Recorder, tmp_path: Path) -> None:
    ledger = soaked(record, RIGHT, WRONG, RIGHT, RIGHT, WRONG)
    change = only(ledger)
    assert (change.occurrences.count, change.occurrences.numbers) == (2, (2, 5))
    assert (change.values, change.returned) == (1, True)
    assert (change.word, change.evidence["bits"]) == ("bit-flip", [20])
    assert change.measure is not None
    assert change.measure.mismatched == 1
    assert change.condition == Condition(at="now", repeat=2)
    assert {path.stem for path in tmp_path.glob("*.safetensors")} == {change.blob, change.reference_blob}


def test_the_right_bits_are_waited_for(record: Recorder) -> None:
    ledger = soaked(record, RIGHT, WRONG)
    waited = ledger.is_waiting
    ledger.begin(3)
    ledger.see(LABEL, RIGHT)
    assert (waited, ledger.is_waiting) == (True, False)
    assert only(ledger).reference_blob is not None


def test_other_wrong_bits_are_another_value(record: Recorder) -> None:
    change = only(soaked(record, WRONG, RIGHT, WRONG + 1))
    assert change.values == 2


def test_what_stays_wrong_is_compared_with_the_bits_from_elsewhere(record: Recorder) -> None:
    ledger = soaked(record)
    ledger.begin(1)
    ledger.see(LABEL, WRONG, expected=lambda: RIGHT)
    ledger.finish()
    change = only(ledger)
    assert not change.returned
    assert change.word == "bit-flip"


def test_what_the_first_run_has_not_recorded_is_left_out(record: Recorder) -> None:
    ledger = soaked(record)
    ledger.see(("merged", "other", "weight"), WRONG)
    assert ledger.changes() == ()
    assert ledger.stage("merged", 1).tensors == 0


def test_a_tensor_may_be_compared_with_its_first_repeat(record: Recorder) -> None:
    """One whose operands were elsewhere in memory in the first run; nothing is compared in that repeat."""
    assert soaked(record, WRONG, WRONG, own=True).changes() == ()
    assert soaked(record, WRONG, own=True).stage("merged", 1).tensors == 0
    assert only(soaked(record, WRONG, RIGHT, own=True)).occurrences.numbers == (2,)


def test_a_tensor_that_changes_twice_in_a_repeat_has_changed_once(record: Recorder) -> None:
    ledger = soaked(record)
    ledger.begin(1)
    ledger.see(LABEL, WRONG)
    ledger.see(LABEL, WRONG)
    assert only(ledger).occurrences.count == 1


def test_few_tensors_are_stored_and_all_are_counted(
    record: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_CHANGES", 20)
    labels = [("forward", f"hidden_states.{number}", "adapter_on") for number in range(30)]
    ledger = Ledger(
        record, dict.fromkeys(labels, digest(RIGHT).value), condition=lambda repeat: Condition(at="", repeat=repeat)
    )
    for repeat, base in enumerate((WRONG, RIGHT), start=1):
        ledger.begin(repeat)
        for number, label in enumerate(labels):
            ledger.see(label, base if repeat > 1 else base + number)
    assert len(ledger.changes()) == 20
    assert ledger.stage("forward", 1).changed_tensors == 30
    assert len(list(tmp_path.glob("*.safetensors"))) == module.KEPT_PER_STAGE + 1


def test_a_stored_tensor_and_its_number_are_limited(record: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEEP_BYTES", WRONG.nbytes - 1)
    change = only(soaked(record, WRONG, RIGHT))
    assert (change.blob, change.reference_blob, change.word) == (None, None, None)
    assert change.shape == tuple(WRONG.shape)
    assert len(only(soaked(record, *[WRONG] * 30)).occurrences.numbers) == 20
