from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.capture.folder import (
    MANIFEST,
    SCHEMA,
    Capture,
    CaptureManifest,
    blob_key,
    blob_name,
    pack_blocks,
    unpack_blocks,
    worker_slug,
)
from consistency.capture.json_codec import encode_json
from consistency.capture.reader import read_capture
from consistency.capture.records import SettingChange, TensorRecord, WorkerInfo
from consistency.capture.seal import files_of
from consistency.capture.whole_file import write_fully
from consistency.capture.writer import CaptureWriter, write_json
from consistency.case.case import Case
from consistency.case.load_path import LoadPath
from consistency.case.stage import Level
from consistency.errors import CaptureError
from consistency.numerics import words
from consistency.numerics.measure import Measure
from consistency.numerics.real import Real
from consistency.numerics.rules import RoundingError
from tests.capture.resealing import reseal
from tests.capture.whole import read_records

SLUG = "cuda_1@tf32.shared"
BLOB = "ab" * 32
DEEP = b"[" * 100_000 + b"]" * 100_000


def make_measure(**changes: Any) -> Measure:
    plain = Measure(
        elements=6,
        mismatched=2,
        max_abs=Real("nan"),
        mean_abs=Real("inf"),
        rms=Real(0.1),
        max_rel=Real("-inf"),
        max_ulp=2**64 - 2**54,
        ratio=Real(1.5),
        worst_index=(1, 2),
        worst_actual=Real("nan"),
        worst_expected=Real(-0.0),
        worst_actual_bits="0x7fc00000",
        worst_expected_bits="0x80000000",
        flipped_bits={0: 1, 31: 2},
        first_byte=4,
        last_byte=20,
        magnitude=Real(3.25),
    )
    return msgspec.structs.replace(plain, **changes)


def make_record(**changes: Any) -> TensorRecord:
    plain = TensorRecord(
        rule="bitwise",
        stage="adapter",
        layer="model.layers.0.self_attn.q_proj",
        tensor="lora_A",
        shape=(2, 3),
        dtype="float32",
        status="outside",
        digest="00ff" * 8,
        blocks="0123456789abcdef" * 2,
        reference="file",
        reference_digest="11" * 16,
        rounding=RoundingError(largest=Real("inf"), samples=3, drawn=6),
        measure=make_measure(),
        word=words.ZEROS,
        evidence={"nonzero_in_reference": 6, "where": ["a", 1, None]},
        blob=BLOB,
        repeats=("22" * 16,),
        order=7,
    )
    return msgspec.structs.replace(plain, **changes)


def make_info(**changes: Any) -> WorkerInfo:
    plain = WorkerInfo(
        name="cuda:1@tf32",
        load_path="shared",
        architecture="Ampere sm_86",
        model="RTX A6000",
        status="lost",
        reason="signal 9 after merged · model.layers.3",
        environment={"torch": "2.13", "threads": 1},
        changes=(SettingChange(setting="threads", asked=1, in_force=4, stage="forward"),),
        elapsed_s=1.25,
    )
    return msgspec.structs.replace(plain, **changes)


def make_manifest(*slugs: str) -> CaptureManifest:
    return CaptureManifest(
        schema=SCHEMA,
        tool="0.1.0",
        created="2025-01-01T00:00:00Z",
        host="host-a",
        case=Case(name="llama", base="/b", adapter="/a", level=Level.QUICK, load_paths=(LoadPath.SHARED,)),
        workers=slugs,
    )


def write_records(folder: Path, *records: TensorRecord) -> Path:
    path = folder / "records.jsonl"
    path.write_bytes(b"".join(encode_json(record) + b"\n" for record in records))
    return path


def write_capture(target: Path, *records: TensorRecord, slug: str = SLUG) -> Path:
    with CaptureWriter(target) as writer:
        writer.write_worker(slug, make_info())
        write_records(writer.worker_folder(slug), *records)
        (writer.blobs / f"{BLOB}.safetensors").write_bytes(b"tensor")
        return writer.commit(make_manifest(slug))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# --- there and back -------------------------------------------------------------------------------------------------


def test_a_capture_is_read_as_it_was_written(tmp_path: Path) -> None:
    records = (make_record(), make_record(tensor="lora_B", measure=None, status="equal", evidence={}))
    target = write_capture(tmp_path / "out" / "captures", *records)
    found = read_capture(target)
    assert found.folder == target == tmp_path / "out" / "captures"
    assert found.manifest.files == {SLUG: files_of(target / "workers" / SLUG)}
    assert msgspec.structs.replace(found.manifest, files={}, sha256="") == make_manifest(SLUG)
    assert found.damage == ()
    assert [worker.info for worker in found.workers] == [make_info()]
    assert repr(found.workers[0].records) == repr(records)  # by their text: NaN is not equal to itself
    assert found.blob_path(BLOB).read_bytes() == b"tensor"


def test_the_folder_of_a_run_leads_to_its_capture(tmp_path: Path) -> None:
    write_capture(tmp_path / "out" / "captures")
    assert read_capture(tmp_path / "out").folder == tmp_path / "out" / "captures"


def test_every_measure_is_written_even_where_it_is_zero() -> None:
    import torch

    from consistency.numerics import distance

    found = distance.measure(torch.ones(2), torch.ones(2))
    assert json.loads(encode_json(found)) == {
        "elements": 2, "mismatched": 0, "max_abs": 0.0, "mean_abs": 0.0, "rms": 0.0, "max_rel": 0.0, "max_ulp": 0,
        "ratio": None, "worst_index": None, "magnitude": 0.0,
    }  # fmt: skip


def test_defaults_are_left_out_of_a_line() -> None:
    assert json.loads(
        encode_json(TensorRecord(rule="bitwise", status="equal", stage="base", layer="l", tensor="t"))
    ) == {
        "stage": "base",
        "layer": "l",
        "tensor": "t",
        "rule": "bitwise",
        "status": "equal",
    }


@given(st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=5))
@settings(deadline=None)
def test_block_digests_are_read_back(blocks: list[int]) -> None:
    assert unpack_blocks(pack_blocks(blocks)) == tuple(blocks)


def test_the_only_block_of_a_tensor_is_not_written() -> None:
    """Its digest is the tensor's."""
    assert (pack_blocks([7]), pack_blocks([]), unpack_blocks("")) == ("", "", ())


def test_a_worker_without_records_is_a_worker(tmp_path: Path) -> None:
    with CaptureWriter(tmp_path / "c") as writer:
        writer.write_worker(SLUG, make_info())
        writer.commit(make_manifest(SLUG))
    found = read_capture(tmp_path / "c")
    assert (found.damage, found.workers[0].records) == ((), ())


@pytest.mark.parametrize(
    ("name", "load_path", "slug"),
    [("cpu", "isolated", "cpu.isolated"), ("cuda:1@tf32", "shared", SLUG), ("cpu@avx2", "shared", "cpu@avx2.shared")],
)
def test_a_worker_has_a_folder_of_its_own(name: str, load_path: str, slug: str) -> None:
    assert worker_slug(name, load_path) == slug


def test_a_kept_tensor_is_addressed_by_all_of_its_content() -> None:
    keys = {
        blob_key("float32", (2,), b"12345678"),
        blob_key("int32", (2,), b"12345678"),
        blob_key("float32", (2, 1), b"12345678"),
        blob_key("float32", (2,), b"12345679"),
    }
    assert len(keys) == 4
    assert all(blob_name(key) == key for key in keys)
    assert blob_key("float32", [2], memoryview(b"12345678")) in keys


# --- writing --------------------------------------------------------------------------------------------------------


def test_nothing_is_left_of_a_capture_that_was_not_committed(tmp_path: Path) -> None:
    with CaptureWriter(tmp_path / "case" / "c") as writer:
        writer.write_worker(SLUG, make_info())
        assert any(tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == []


def test_until_it_is_committed_nothing_is_in_its_place(tmp_path: Path) -> None:
    target = tmp_path / "c"
    with CaptureWriter(target) as writer:
        writer.write_worker(SLUG, make_info())
        assert not target.exists()
        assert not (writer.folder / MANIFEST).exists()
        with pytest.raises(CaptureError, match="no capture here"):
            read_capture(target)
        writer.commit(make_manifest(SLUG))
        assert (target / MANIFEST).exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Return a function that fills a disk: a file is written only where some of its room was freed since."""

    def fill(folder: Path) -> None:
        held = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())

        def write(path: Path, parts: Iterable[bytes]) -> None:
            content = b"".join(parts)
            now = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            if now + len(content) > held:
                raise CaptureError("cannot write", where=path, got="No space left on device")
            path.write_bytes(content)

        monkeypatch.setattr("consistency.capture.writer.write_whole", write)

    return fill


def test_a_full_disk_has_room_for_what_was_recorded_until_then(
    tmp_path: Path, full_disk: Callable[[Path], None]
) -> None:
    with CaptureWriter(tmp_path / "c") as writer:
        writer.reserve()
        full_disk(tmp_path)
        writer.write_worker(SLUG, make_info())
        writer.commit(make_manifest(SLUG))
    assert len(read_capture(tmp_path / "c").workers) == 1
    assert not (tmp_path / "c" / ".reserve").exists()


def test_the_reserved_room_is_no_part_of_a_capture(tmp_path: Path) -> None:
    with CaptureWriter(tmp_path / "c") as writer:
        writer.reserve()
        writer.commit(make_manifest())
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["blobs", MANIFEST, "workers"]


def test_all_of_some_bytes_is_written_where_the_system_takes_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last write before a disk is full may be a short one: half a line of JSON, and no error."""
    real = os.write
    monkeypatch.setattr("os.write", lambda descriptor, content: real(descriptor, content[:3]))
    with (tmp_path / "file").open("wb", buffering=0) as file:
        write_fully(file.fileno(), b"0123456789")
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_half_written_tensors_are_no_part_of_it(tmp_path: Path) -> None:
    with CaptureWriter(tmp_path / "c") as writer:
        (writer.blobs / f"{BLOB}.safetensors.tmp").touch()
        (writer.blobs / f"{BLOB}.safetensors").touch()
        writer.commit(make_manifest())
    assert [p.name for p in (tmp_path / "c" / "blobs").iterdir()] == [f"{BLOB}.safetensors"]


@pytest.mark.parametrize("kind", ["capture", "stray", "file"])
def test_what_is_in_the_place_is_not_overwritten(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "c"
    if kind == "capture":
        write_capture(target)
    elif kind == "stray":
        target.mkdir()
        (target / "thesis.txt").write_text("mine")
    else:
        target.write_text("mine")
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    with pytest.raises(CaptureError, match="is not empty") as caught:
        CaptureWriter(target)
    assert caught.value.where == str(target)
    assert "--force" in (caught.value.hint or "")
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before


def test_an_empty_folder_in_the_place_is_taken(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    assert read_capture(write_capture(tmp_path / "c")).manifest.host == "host-a"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CaptureError, match="cannot write the capture") as caught:
        CaptureWriter(tmp_path / "file" / "c")
    assert caught.value.where == str(tmp_path / "file" / "c")


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(NotImplementedError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    with pytest.raises(CaptureError, match="cannot write"):
        write_json(tmp_path / "none" / "x.json", {})
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


# --- the manifest ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", ["consistency.capture/2", "consistency.report/1", "", None, 1])
def test_another_schema_is_refused_with_both_names(schema: object, tmp_path: Path) -> None:
    target = write_capture(tmp_path / "c")
    edit(target / MANIFEST, schema=schema, something_new={"x": 1}, case=None)
    with pytest.raises(CaptureError, match="a capture of another schema") as caught:
        read_capture(target)
    assert caught.value.wanted == SCHEMA
    assert caught.value.got == (None if schema is None else str(schema))


@pytest.mark.parametrize(
    "changes",
    [
        {"workers": "cpu"},
        {"workers": [1]},
        {"workers": None},
        {"case": None},
        {"case": {"name": "x"}},
        {"case": {"name": "x", "base": "/b", "evil": 1}},
        {"case": {"name": "x", "base": "/b", "level": "endless"}},
        {"host": 7},
    ],
)
def test_a_tampered_manifest_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    target = write_capture(tmp_path / "c")
    edit(target / MANIFEST, **changes)
    with pytest.raises(CaptureError, match=r"capture\.json is damaged") as caught:
        read_capture(target)
    assert caught.value.where == str(target / MANIFEST)
    assert next(iter(changes)) in (caught.value.got or "")


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"schema": ' + b"[" * 100_000]
)
def test_a_manifest_that_is_no_json_object_is_refused(raw: bytes, tmp_path: Path) -> None:
    target = write_capture(tmp_path / "c")
    (target / MANIFEST).write_bytes(raw)
    with pytest.raises(CaptureError, match=r"capture\.json is damaged"):
        read_capture(target)


# --- workers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slug", ["..", "../secret", "/etc", "a/b", "", ".hidden", "a\\b", "cpu.isolated\n", "x" * 200])
def test_a_worker_outside_the_capture_is_not_read(slug: str, tmp_path: Path) -> None:
    target = write_capture(tmp_path / "c", make_record())
    # what such a name would lead to is there, and whole
    for place in (target / "workers" / "a" / "b", target / "workers" / ".hidden", target / "secret", target):
        shutil.copytree(target / "workers" / SLUG, place, dirs_exist_ok=True)
    edit(target / MANIFEST, workers=[slug, SLUG])
    reseal(target)
    found = read_capture(target)
    assert len(found.workers) == 1
    assert found.damage == (f"c: worker {slug}: not the name of a worker" + (f" ({slug})" if slug else ""),)


def two_workers(target: Path) -> Path:
    with CaptureWriter(target) as writer:
        for slug in ("cpu.isolated", SLUG):
            writer.write_worker(slug, make_info(name=slug))
            write_records(writer.worker_folder(slug), make_record())
        return writer.commit(make_manifest("cpu.isolated", SLUG))


def damage_of(found: Capture) -> str:
    assert [worker.info.name for worker in found.workers] == ["cpu.isolated"]
    assert len(found.damage) == 1
    assert found.damage[0].startswith(f"c: worker {SLUG}: ")
    return found.damage[0]


# --- records --------------------------------------------------------------------------------------------------------


def test_a_last_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    path = write_records(tmp_path, make_record(order=1), make_record(order=2))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in (first, first + 1, first + 40, len(whole) - 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert [record.order for record in read_records(path)] == [1]
    path.write_bytes(whole[: first - 1])
    assert list(read_records(path)) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "passed"},
        {"shape": ["2"]},
        {"shape": 2},
        {"stage": None},
        {"measure": {"elements": 1}},
        {"evidence": []},
        {"order": "1"},
        {"rounding": {"largest": "huge", "samples": 1, "drawn": 1}},
        {"rounding": {"largest": 10**400, "samples": 1, "drawn": 1}},
        {"rounding": {"largest": 1.0, "samples": 0, "drawn": 1}},
        {"blocks": "zz" * 8},
        {"blocks": "0" * 15},
        {"blocks": "0" * 16 + "\n"},
    ],
)
def test_a_tampered_record_is_named_by_its_line(changes: dict[str, Any], tmp_path: Path) -> None:
    target = two_workers(tmp_path / "c")
    path = target / "workers" / SLUG / "records.jsonl"
    line = path.read_text().splitlines()[0]
    path.write_text(f"{line}\n{json.dumps(json.loads(line) | changes)}\n{line}\n")
    said = damage_of(read_capture(target))
    assert "line 2 is damaged" in said
    assert next(iter(changes)) in said


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b"\xff", b'{"stage": ' + DEEP + b"}"])
def test_a_line_that_is_no_record_is_named(line: bytes, tmp_path: Path) -> None:
    target = two_workers(tmp_path / "c")
    (target / "workers" / SLUG / "records.jsonl").write_bytes(line + b"\n")
    assert "line 1 is damaged" in damage_of(read_capture(target))


def test_evidence_nested_without_end_is_damage_and_no_crash(tmp_path: Path) -> None:
    target = two_workers(tmp_path / "c")
    deep = b'{"stage":"a","layer":"b","tensor":"c","evidence":{"x":' + DEEP + b"}}\n"
    (target / "workers" / SLUG / "records.jsonl").write_bytes(deep)
    assert "line 1 is damaged" in damage_of(read_capture(target))


def test_records_that_cannot_be_read_are_damage(tmp_path: Path) -> None:
    target = two_workers(tmp_path / "c")
    path = target / "workers" / SLUG / "records.jsonl"
    path.unlink()
    path.mkdir()
    assert "cannot read the records" in damage_of(read_capture(target))


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "",
        BLOB[:-1],
        BLOB + "0",
        BLOB.upper(),
        BLOB[:-1] + "g",
        BLOB + "\n",
        "../" + BLOB,
    ],
)
def test_the_name_of_a_kept_tensor_is_no_path(name: str, tmp_path: Path) -> None:
    found = read_capture(write_capture(tmp_path / "c", make_record(blob=name)))
    blob = found.workers[0].records[0].blob
    assert blob is not None
    with pytest.raises(CaptureError, match="not the name of a kept tensor"):
        found.blob_path(blob)
