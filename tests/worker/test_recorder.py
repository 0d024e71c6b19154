"""What a record holds of a computed tensor, and what it leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from consistency.capture.folder import read_records, unpack_blocks
from consistency.capture.records import RecordStatus, TensorMeasure, TensorRecord
from consistency.numerics.bound import UserAllowance, measure_against_exact
from consistency.numerics.digest import digest
from consistency.worker.recorder import Recorder

EXACT = torch.linspace(-1, 1, 100_000, dtype=torch.float64)


def recorded(folder: Path, actual: torch.Tensor, *, status: RecordStatus, measured: bool = True) -> TensorRecord:
    blobs = folder / "blobs"
    blobs.mkdir()
    found = measure_against_exact(actual, EXACT, UserAllowance(atol=1e-3, rtol=0.0)) if measured else None
    with Recorder(folder, blobs) as record:
        record.computed(
            stage="merged", layer="layers.0", tensor="weight", actual=actual, rule="bound", found=found, status=status,
            diagnosis=None, digests=[digest(actual)],
        )  # fmt: skip
    (back,) = read_records(folder / "records.jsonl")
    assert back.digest == digest(actual).value
    assert (back.measure is not None) is measured
    if found is not None:
        whole = TensorMeasure.of(found)
        # what is inside its bound has no values to show
        assert back.measure == (whole if status == "outside" else whole.without_values())
        assert whole.without_values() != whole
    return back


@pytest.mark.parametrize("status", ["within", "equal", "measured"])
def test_blocks_of_what_is_inside_its_rule_are_left_out(tmp_path: Path, status: RecordStatus) -> None:
    assert recorded(tmp_path, EXACT.float(), status=status).blocks == ""


def test_blocks_of_what_is_outside_are_kept(tmp_path: Path) -> None:
    actual = EXACT.float() + 1
    back = recorded(tmp_path, actual, status="outside")
    assert unpack_blocks(back.blocks) == digest(actual).blocks
    assert len(digest(actual).blocks) == 2


def test_blocks_of_what_only_other_workers_can_judge_are_kept(tmp_path: Path) -> None:
    actual = EXACT.float()
    back = recorded(tmp_path, actual, status="measured", measured=False)
    assert unpack_blocks(back.blocks) == digest(actual).blocks


def test_one_block_is_what_the_digest_says_already(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    small = torch.arange(8.0)
    with Recorder(tmp_path, tmp_path / "blobs") as record:
        record.moved(stage="base", layer="l", tensor="weight", actual=small, expected=small)
    (back,) = read_records(tmp_path / "records.jsonl")
    assert (back.digest, back.blocks) == (digest(small).value, "")
