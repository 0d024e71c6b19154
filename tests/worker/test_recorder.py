"""What a record holds of a tensor, what it leaves out, and which tensors are stored beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from consistency.capture.folder import unpack_blocks
from consistency.capture.json_codec import decode_json
from consistency.capture.records import RecordStatus, TensorRecord
from consistency.case.load_path import LoadPath
from consistency.case.tolerance import Override
from consistency.errors import CaptureError
from consistency.numerics import words
from consistency.numerics.bound import UserAllowance
from consistency.numerics.diagnosis import Diagnosis
from consistency.numerics.digest import digest
from consistency.numerics.error import measure_against_exact
from consistency.numerics.real import Real
from consistency.numerics.rules import Rule
from consistency.worker import recorder as recorder_module
from consistency.worker.recorder import Recorder
from tests.capture.whole import read_records

WEIGHT = TensorRecord("base", "layers.0", "weight", rule=Rule.BITWISE, status="equal")
SKIPPED = replace(WEIGHT, status="skipped", reason="")
EXACT = torch.linspace(-1, 1, 100_000, dtype=torch.float64)


def recorded(folder: Path, actual: torch.Tensor, *, status: RecordStatus, measured: bool = True) -> TensorRecord:
    blobs = folder / "blobs"
    blobs.mkdir()
    found = measure_against_exact(actual, EXACT, UserAllowance(atol=1e-3, rtol=0.0)) if measured else None
    with Recorder(folder, blobs) as record:
        record.computed(
            TensorRecord("merged", "layers.0", "weight", rule=Rule.BOUND, status=status), actual, measure=found
        )  # fmt: skip
    (back,) = read_records(folder / "records.jsonl")
    assert back.digest == digest(actual).value
    assert (back.measure is not None) is measured
    if found is not None:
        # what is inside its bound has no values to show
        assert back.measure == (found if status == "outside" else found.without_values())
        assert found.without_values() != found
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
        record.moved(WEIGHT, actual=small, expected=small)
    (back,) = read_records(tmp_path / "records.jsonl")
    assert (back.digest, back.blocks) == (digest(small).value, "")


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Recorder]:
    (tmp_path / "blobs").mkdir()
    with Recorder(tmp_path, tmp_path / "blobs") as recorder:
        yield recorder


def stored(folder: Path, name: str | None) -> torch.Tensor:
    assert name is not None
    found: torch.Tensor = load_file(folder / "blobs" / f"{name}.safetensors")["tensor"]
    return found


def test_moved_bytes_that_differ_are_measured_named_and_kept(tmp_path: Path, record: Recorder) -> None:
    expected = torch.arange(1.0, 9.0)
    actual = expected.clone()
    actual[3:5] = 0
    record.moved(replace(WEIGHT, evidence={"from": "file"}), actual=actual, expected=expected)
    (back,) = read_records(tmp_path / "records.jsonl")
    assert (back.status, back.rule, back.shape, back.dtype) == ("outside", "bitwise", (8,), "float32")
    assert (back.digest, back.reference_digest) == (digest(actual).value, digest(expected).value)
    assert back.measure is not None
    assert (back.measure.mismatched, back.measure.worst_index) == (2, (4,))
    assert back.word is not None
    assert back.evidence["from"] == "file"
    assert torch.equal(stored(tmp_path, back.blob), actual)
    assert torch.equal(stored(tmp_path, back.reference_blob), expected)


def test_moved_bytes_that_are_equal_are_kept_once_and_only_where_asked(tmp_path: Path, record: Recorder) -> None:
    tensor = torch.arange(8.0)
    record.moved(WEIGHT, actual=tensor, expected=tensor.clone())
    record.moved(WEIGHT, actual=tensor, expected=tensor.clone(), keep=True)
    without, with_blob = read_records(tmp_path / "records.jsonl")
    assert (without.status, without.blob, without.measure) == ("equal", None, None)
    assert with_blob.blob == with_blob.reference_blob
    (file,) = (tmp_path / "blobs").iterdir()
    assert file.stat().st_mode & 0o666 == (tmp_path / "blobs").stat().st_mode & 0o666, "others may read it as the rest"
    assert torch.equal(stored(tmp_path, with_blob.blob), tensor)


def test_another_shape_is_named_and_not_measured(tmp_path: Path, record: Recorder) -> None:
    record.moved(WEIGHT, actual=torch.zeros(2, 4), expected=torch.zeros(8))
    (back,) = read_records(tmp_path / "records.jsonl")
    assert (back.status, back.word, back.measure) == ("outside", "shape", None)


def test_a_tensor_that_is_too_large_is_not_kept(
    tmp_path: Path, record: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "KEEP_BYTES", 31)
    record.moved(WEIGHT, actual=torch.zeros(8), expected=torch.ones(8))
    (back,) = read_records(tmp_path / "records.jsonl")
    assert (back.status, back.blob, back.reference_blob) == ("outside", None, None)
    assert list((tmp_path / "blobs").iterdir()) == []


def test_bytes_that_changed_while_they_were_read_back_are_no_equal_tensor(
    tmp_path: Path, record: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device's digest differs from the file's, and the bytes on the host do not."""
    tensor = torch.arange(8.0)
    found = iter([digest(tensor + 1), digest(tensor)])
    monkeypatch.setattr(recorder_module, "digest", lambda _: next(found))
    record.moved(WEIGHT, actual=tensor, expected=tensor)
    (back,) = read_records(tmp_path / "records.jsonl")
    assert (back.status, back.word, back.evidence["digest_only"]) == ("outside", "differs", True)


def test_a_ratio_by_the_error_of_rounding_judges_and_is_left_to_the_comparison(
    tmp_path: Path, record: Recorder
) -> None:
    tensor = EXACT.float() + 0.5
    found = replace(measure_against_exact(tensor, EXACT, None), ratio=Real(2.0))
    row = replace(WEIGHT, rule=Rule.RELATIVE, status="measured")
    record.computed(row, tensor, measure=found, chunks=tuple, ingredients={"exact": EXACT, "allowed": None})
    (back,) = read_records(tmp_path / "records.jsonl")
    assert (back.rule, back.status, back.measure) == ("relative", "outside", replace(found, ratio=None))
    assert (back.digest, back.ingredients) == (digest(tensor).value, {})
    assert torch.equal(stored(tmp_path, back.reference_blob), EXACT)


def test_the_caller_names_what_it_knows_of_a_tensor_outside_its_rule(tmp_path: Path, record: Recorder) -> None:
    tensor = EXACT.float() + 0.5
    found = measure_against_exact(tensor, EXACT, UserAllowance(atol=1e-3, rtol=0.0))
    row = replace(WEIGHT, rule=Rule.BOUND, status="measured", evidence={"step": 1})
    cause = Diagnosis(word=words.WRONG_SCALE, evidence={"scale_ratio": 2.0})
    record.computed(row, tensor, measure=found, chunks=tuple, diagnose=lambda *_: cause)
    record.computed(
        row, EXACT.float(), measure=replace(found, ratio=Real(0.5)), chunks=tuple, diagnose=lambda *_: cause
    )  # fmt: skip
    outside, within = read_records(tmp_path / "records.jsonl")
    assert (outside.word, outside.evidence) == ("wrong-scale", {"step": 1, "scale_ratio": 2.0})
    assert (within.word, within.evidence) == ("accumulation-order", {"step": 1})


@pytest.mark.parametrize(
    ("status", "diagnosis"),
    [("missing", "missing"), ("unexpected", "unexpected"), ("skipped", None), ("blocked", None)],
)
def test_what_is_absent_has_a_reason(
    tmp_path: Path, record: Recorder, status: RecordStatus, diagnosis: str | None
) -> None:
    record.write(replace(WEIGHT, status=status, reason="why", shape=(2, 2), dtype="float32", evidence={"a": 1}))
    (back,) = read_records(tmp_path / "records.jsonl")
    assert (back.status, back.word, back.reason) == (status, diagnosis, "why")
    assert (back.shape, back.dtype, back.digest, back.evidence) == ((2, 2), "float32", None, {"a": 1})


def test_a_fact_has_a_share_of_its_limit(tmp_path: Path, record: Recorder) -> None:
    record.fact(stage="memory", layer="cuda:0", tensor="peak", status="within", ratio=0.25, evidence={"peak_bytes": 5})
    (back,) = read_records(tmp_path / "records.jsonl")
    assert (back.rule, back.status, back.limit_ratio, back.evidence) == ("limit", "within", 0.25, {"peak_bytes": 5})
    assert back.word is None


def test_what_decides_a_verdict_is_a_field_of_the_record_and_stands_in_the_evidence(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    tensor = torch.arange(8.0)
    with Recorder(tmp_path, tmp_path / "blobs", tolerance=(Override(atol=0.5, rtol=0.0),)) as record:
        record.moved(
            replace(WEIGHT, cast="bfloat16", name_in_file="norm.weight"), actual=tensor, expected=tensor
        )  # fmt: skip
        record.computed(replace(WEIGHT, status="measured", buffer=True, evidence={"buffer": "why"}), tensor)
        record.write(replace(SKIPPED, unsupported=True))
        tolerance = record.tolerance(stage="merged", layer="layers.0", dtype=tensor.dtype)
        found = measure_against_exact(tensor, tensor.double() + 0.25, tolerance)
        record.computed(WEIGHT, tensor, measure=found, tolerance=tolerance, chunks=tuple)
    # not `read_record`, which takes a missing field from the evidence
    lines = (tmp_path / "records.jsonl").read_bytes().splitlines()
    moved, buffer, absent, judged = (decode_json(line, TensorRecord) for line in lines)
    assert (moved.cast, moved.name_in_file) == ("bfloat16", "norm.weight")
    assert moved.evidence == {"cast_on_the_way": "bfloat16", "name_in_file": "norm.weight"}
    assert (buffer.buffer, buffer.evidence) == (True, {"buffer": "why"})
    assert (absent.unsupported, absent.evidence) == (True, {"unsupported": True})
    assert (judged.rule, judged.status, judged.tolerance) == ("user", "within", "atol=0.5,rtol=0.0")
    assert judged.evidence == {"tolerance": "atol=0.5,rtol=0.0"}


def test_records_have_their_order_and_the_load_path_that_they_were_seen_on(tmp_path: Path, record: Recorder) -> None:
    record.write(SKIPPED)
    with suppress(ValueError), record.on_load_path(LoadPath.ISOLATED_CPU):
        record.write(SKIPPED)
        raise ValueError
    record.write(SKIPPED)
    back = read_records(tmp_path / "records.jsonl")
    assert [(r.order, r.load_path) for r in back] == [(1, ""), (2, "isolated+cpu"), (3, "")]


@pytest.mark.parametrize(
    ("only", "wanted"),
    [
        ((), True),
        (("base",), True),
        (("base::layers.1",), True),
        (("base::layers.1.mlp",), True),
        (("base::layers.10",), False),
        (("base::layers.1.m",), False),
        (("adapter", "forward::layers.1"), False),
        (("adapter", "base::layers.1"), True),
    ],
)
def test_only_what_begins_with_a_prefix_is_wanted(tmp_path: Path, only: tuple[str, ...], wanted: bool) -> None:
    with Recorder(tmp_path, tmp_path, only=only) as record:
        assert record.wants("base", "layers.1.mlp") is wanted


def test_a_view_is_stored_without_the_rest_of_its_storage(tmp_path: Path, record: Recorder) -> None:
    whole = torch.arange(100_000.0)
    name = record.keep(whole[10:20])
    assert torch.equal(stored(tmp_path, name), whole[10:20])
    assert (tmp_path / "blobs" / f"{name}.safetensors").stat().st_size < 1000
    assert record.keep(whole[10:20].clone()) == name
    assert record.keep(whole[10:20].to(torch.float64)) != name


def test_a_tensor_that_cannot_be_stored_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with Recorder(tmp_path, tmp_path / "gone") as record, pytest.raises(CaptureError, match="a tensor"):
        record.keep(torch.zeros(8))
    assert [path.name for path in tmp_path.iterdir()] == ["records.jsonl"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_records_that_cannot_be_written_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").symlink_to("/dev/full")
    with Recorder(tmp_path, tmp_path) as record, pytest.raises(CaptureError, match="cannot write the records"):
        record.write(SKIPPED)
