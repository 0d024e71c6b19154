"""Captures that are damaged, of another version, or edited by hand, among good ones: said, and the rest is compared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from consistency.capture.folder import Capture
from consistency.capture.json_codec import decode_json, encode_json
from consistency.capture.reader import read_capture
from consistency.capture.records import TensorRecord
from consistency.comparison.result import Comparison
from consistency.errors import CaptureError, ConsistencyError
from consistency.report.json import as_bytes
from consistency.workflows import comparing
from tests.capture.resealing import reseal
from tests.comparison.made_records import computed, digest, errors, forward, measured, moved
from tests.conftest import Cli, MakeCapture
from tests.report.printed import printed

Damage = Callable[[Path], None]

RECORDS = [
    moved(), moved(tensor="lora_A"), computed(), forward(),
    moved("x", "x", stage="base", layer="embed", tensor="weight", blocks="0" * 16),
]  # fmt: skip


def write(make_capture: MakeCapture, damage: Damage | None) -> list[Path]:
    """Write three captures of two workers each and damage the second."""
    folders = [make_capture(name, {"cpu": RECORDS, "cuda:0": RECORDS}) for name in ("a", "b", "c")]
    if damage is not None:
        damage(folders[1])
    return folders


def records_of(folder: Path) -> Path:
    return folder / "workers" / "cuda_0.isolated" / "records.jsonl"


def edited(path: str, **changes: Any) -> Damage:
    def edit(folder: Path) -> None:
        file = folder / path
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


def on_purpose(damage: Damage) -> Damage:
    def edit(folder: Path) -> None:
        damage(folder)
        reseal(folder)

    return edit


def edited_record(**changes: Any) -> Damage:
    """Edit the third line, the merged weight; a NaN becomes the bare word that Python writes."""

    def edit(folder: Path) -> None:
        lines = records_of(folder).read_text().splitlines()
        lines[2] = json.dumps(json.loads(lines[2]) | changes)
        records_of(folder).write_text("\n".join(lines) + "\n")

    return edit


def with_measure(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(encode_json(measured()))
    return {"measure": found | changes}


def cut(folder: Path) -> None:
    path = records_of(folder)
    path.write_bytes(path.read_bytes()[:-40])


def lines_cut(folder: Path) -> None:
    path = records_of(folder)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))


def flipped(path: str, before: bytes) -> Damage:
    """Flip a bit of the last letter of the first such word."""

    def flip(folder: Path) -> None:
        raw = bytearray((folder / path).read_bytes())
        raw[raw.index(before) + len(before) - 1] ^= 1
        (folder / path).write_bytes(raw)

    return flip


def doubled(folder: Path) -> None:
    again = msgspec.structs.replace(RECORDS[0], digest=digest("y"), order=9)
    with records_of(folder).open("ab") as file:
        file.write(encode_json(again) + b"\n")


def remove(path: str) -> Damage:
    def take(folder: Path) -> None:
        shutil.rmtree(folder / path) if (folder / path).is_dir() else (folder / path).unlink()

    return take


WORKER = "workers/cuda_0.isolated"
B_ALONE = {"a:cpu", "a:cuda:0", "b:cpu", "c:cpu", "c:cuda:0"}
B_GONE = {"a:cpu", "a:cuda:0", "c:cpu", "c:cuda:0"}

CASES: dict[str, tuple[Damage, set[str], str]] = {
    "another schema": (
        edited("capture.json", schema="consistency.capture/9"),
        B_GONE,
        "b: left out: a capture of another schema (consistency.capture/9, wanted consistency.capture/1)",
    ),
    "no commit mark": (remove("capture.json"), B_GONE, "b: left out: no capture here"),
    "a manifest that was edited": (
        edited("capture.json", host=7),
        B_GONE,
        "b: left out: capture.json is damaged (Expected `str`, got `int` - at `$.host`)",
    ),
    "a manifest that forgets a worker": (
        on_purpose(edited("capture.json", workers=["cpu.isolated"])),
        B_ALONE,
        "b: worker cuda_0.isolated: capture.json does not name it",
    ),
    "a manifest without workers": (
        on_purpose(edited("capture.json", workers=[])), B_GONE, "b: capture.json names no worker"
    ),
    "a manifest with another bit": (flipped("capture.json", b"host"), B_GONE, "b: left out: capture.json is damaged"),
    "a manifest with another word": (
        flipped("capture.json", b"\"adapter\": \"adapter"),
        B_GONE,
        "b: left out: capture.json was changed since it was written",
    ),
    "a worker with another word": (
        flipped(f"{WORKER}/worker.json", b"chip"),
        B_ALONE,
        "b: worker cuda_0.isolated: worker.json was changed since it was written",
    ),
    "a record with another word": (
        flipped(f"{WORKER}/records.jsonl", b"layers.0"),
        B_ALONE,
        "b: worker cuda_0.isolated: records.jsonl was changed since it was written",
    ),
    "a record with another name of a field": (
        flipped(f"{WORKER}/records.jsonl", b"status"), B_ALONE, "b: worker cuda_0.isolated: line 1 is damaged"
    ),
    "records cut at the end of a line": (
        lines_cut, B_ALONE,
        "b: worker cuda_0.isolated: records.jsonl was changed since it was written (2 of 5 records)",
    ),
    "no folder of a worker": (remove(WORKER), B_ALONE, "b: worker cuda_0.isolated: worker.json is missing"),
    "a worker that was edited": (
        edited(f"{WORKER}/worker.json", elapsed_s="long"),
        B_ALONE,
        "b: worker cuda_0.isolated: worker.json is damaged (Expected `float`, got `str` - at `$.elapsed_s`)",
    ),
    "no records": (
        remove(f"{WORKER}/records.jsonl"), B_ALONE, "b: worker cuda_0.isolated: records.jsonl is missing"
    ),
    "records cut short": (cut, B_ALONE, "b: worker cuda_0.isolated: records.jsonl ends in the middle of line 5"),
    "the same tensor twice": (
        on_purpose(doubled),
        B_ALONE,
        "b: worker cuda_0.isolated: line 6 names the same tensor as line 1 (adapter::layers.0.q.lora_B)",
    ),
    "NaN as a number": (
        edited_record(**with_measure(max_abs=float("nan"))), B_ALONE, "b: worker cuda_0.isolated: line 3 is damaged"
    ),
    "NaN as a count": (
        edited_record(**with_measure(mismatched="nan")), B_ALONE, "b: worker cuda_0.isolated: line 3 is damaged"
    ),
    "null as a number": (
        edited_record(**with_measure(max_abs=None)), B_ALONE, "b: worker cuda_0.isolated: line 3 is damaged"
    ),
    "a name of a megabyte": (edited_record(layer="x" * 2**20), B_ALONE, "b: worker cuda_0.isolated: line 3 is damaged"),
    "a rule that there is not": (
        edited_record(rule="lenient"), B_ALONE, "b: worker cuda_0.isolated: line 3 is damaged"
    ),
}  # fmt: skip


def reported(given: Sequence[Capture | Path], *, briefly: bool = True) -> Comparison:
    """Compare, and write every report there is; of a few tensors the long one has all that the brief one has."""
    found = comparing.compare_folders(given, None)
    if briefly:
        printed(found)
    printed(found, verbose=True)
    json.loads(as_bytes(found))
    return found


def test_undamaged_they_are_consistent(make_capture: MakeCapture) -> None:
    found = reported(write(make_capture, None))
    assert (found.verdict, found.findings) == ("consistent", ())


@pytest.mark.parametrize("name", CASES)
def test_damage_is_said_and_the_rest_is_compared(name: str, make_capture: MakeCapture) -> None:
    damage, workers, message = CASES[name]
    found = reported(write(make_capture, damage))
    assert (found.verdict, found.exit_status) == ("incomplete", 3)
    assert [(f.kind, f.severity) for f in found.findings] == [("damaged-capture", "error")]
    assert found.findings[0].message.startswith(message)
    assert {worker.name for worker in found.workers} == workers
    assert all({worker for worker, row in tensor.by_worker()} == workers for tensor in found.tensors)


def test_it_is_the_same_when_the_first_is_damaged(make_capture: MakeCapture) -> None:
    first, second, third = write(make_capture, edited("capture.json", schema="consistency.capture/9"))
    found = reported([second, first, third])
    assert found.reference == "a:cpu"
    assert found.verdict == "incomplete"


def test_where_none_can_be_read_that_is_an_error(make_capture: MakeCapture) -> None:
    folder = write(make_capture, edited("capture.json", schema="consistency.capture/9"))[1]
    for folders in ([folder], [folder, folder]):
        with pytest.raises(CaptureError, match="a capture of another schema"):
            comparing.compare_folders(folders, None)


def test_a_path_that_leads_nowhere_is_an_error(make_capture: MakeCapture, tmp_path: Path) -> None:
    """A damaged capture is one thing, a mistyped name another: with it, nobody knows what was meant."""
    (tmp_path / "empty").mkdir()
    folders = write(make_capture, None)
    for wrong in (tmp_path / "d", tmp_path / "empty", folders[0] / "capture.json"):
        with pytest.raises(CaptureError, match="no capture here"):
            comparing.compare_folders([*folders, wrong], None)


def test_the_command_says_it_and_ends_as_incomplete(make_capture: MakeCapture, cli_here: Cli) -> None:
    done = cli_here("compare", *write(make_capture, edited("capture.json", schema="consistency.capture/9")))
    assert done.returncode == 3, done.stderr
    assert "b: left out: a capture of another schema" in done.stdout
    assert "Traceback" not in done.stderr


def test_other_inputs_are_a_finding_and_the_rest_is_compared(make_capture: MakeCapture) -> None:
    folders = write(make_capture, None)
    for folder, inputs in zip(folders, "112", strict=True):
        for slug in ("cpu.isolated", "cuda_0.isolated"):
            on_purpose(edited(f"workers/{slug}/worker.json", inputs_digest=inputs * 32))(folder)
    found = reported(folders)
    assert [f.kind for f in errors(found)] == ["inputs"]
    assert found.findings[0].message == (
        "forward · c:cpu, c:cuda:0 had different inputs than a:cpu, a:cuda:0, b:cpu, b:cuda:0: "
        "outputs cannot be compared"
    )
    assert {t.stage for t in found.tensors} == {"base", "adapter", "merged", "forward"}


def test_a_kept_tensor_that_is_missing_is_said_where_it_is_needed(make_capture: MakeCapture) -> None:
    kept = {"blob": "ab" * 32, "reference_blob": "ab" * 32}
    one = make_capture("a", {"cpu": [moved("x", "x", **kept)]})
    two = make_capture("b", {"cpu": [moved("y", "y", blocks="0" * 16, blob="cd" * 32, reference_blob="cd" * 32)]})
    found = reported([one, two])
    assert [f.kind for f in errors(found)] == ["differs"]
    assert "a stored tensor cannot be read" in errors(found)[0].detail[0]
    assert "blocks [0] of 256 KiB" in errors(found)[0].detail[0], "what is left still tells where"
    assert reported([one, one]).verdict == "consistent", "nobody needs it where the digests are equal"


# --- edited by hand, and still a record -----------------------------------------------------------------------------


def test_no_digest_is_no_agreement(make_capture: MakeCapture) -> None:
    nothing = moved(digest=None, reference_digest=None)
    assert reported([make_capture("a", {"cpu": [nothing], "cuda:0": [nothing]})]).verdict == "inconsistent"


@pytest.mark.parametrize("status", ["within", "equal"])
def test_a_word_does_not_outweigh_its_own_numbers(status: str, make_capture: MakeCapture) -> None:
    folders = write(make_capture, on_purpose(edited_record(status=status, **with_measure(ratio=7.0))))
    found = reported(folders)
    assert [f.workers for f in errors(found)] == [("b:cuda:0",)]


def test_a_dtype_of_unknown_rounding_is_skipped_with_a_reason(make_capture: MakeCapture) -> None:
    other = msgspec.structs.replace(forward(), dtype="posit16")
    found = reported([make_capture("a", {"cpu": [other]})])
    assert [f.kind for f in found.findings] == ["nothing-compared", "skipped"]
    assert all("the rounding of posit16 is not known" in f.message for f in found.findings)


NASTY = [None, True, -1, 10**30, 1.5, 1e308, "nan", "", "\x1b[31m", [], {}, [None], [2**62, 2**62], {"a": 1}]
EVIDENCE = ("actual", "expected", "bits", "fields", "blocks", "inactive", "got", "wanted", "own_file", "kept", "values")


def is_record(line: bytes) -> bool:
    try:
        decode_json(line, TensorRecord)
    except msgspec.MsgspecError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("value", NASTY, ids=repr)
def test_whatever_stands_in_a_record_no_report_breaks(value: object, make_capture: MakeCapture) -> None:
    """Every field of a record takes values of other types and sizes: damage, or a report."""
    bad: list[tuple[TensorRecord, TensorRecord]] = [
        (RECORDS[0], moved("x", evidence={"bits": [3], "fields": ["exponent"], "blocks": [1]})),
        (RECORDS[2], computed("b", 3.0)),
        (RECORDS[3], forward("c", 1e-3)),
        (RECORDS[4], moved("y", "y", stage="base", layer="embed", tensor="weight", blocks="1" * 16)),
    ]
    beside = RECORDS[1]  # which the edited capture lacks: no edit hides that
    folder = make_capture("b", {"cuda:0": RECORDS[:1]})
    for number, (right, record) in enumerate(bad):
        seen = [right, beside]
        good = read_capture(make_capture(f"a{number}", {"cpu": seen, "cuda:0": seen}))
        whole = {name: getattr(record, name) for name in record.__struct_fields__}
        plain = json.loads(encode_json(whole))
        edits = [{name: value} for name in plain]
        edits += [{"evidence": {**plain["evidence"], word: value}} for word in EVIDENCE]
        edits += [{"measure": {**(plain["measure"] or {}), name: value}} for name in plain["measure"] or ()]
        for edit in edits:
            line = json.dumps(plain | edit).encode()
            records_of(folder).write_bytes(line + b"\n")
            other = read_capture(reseal(folder))
            if not is_record(line):  # CASES has the reports of that
                assert other.workers == ()
                assert "line 1 is damaged" in other.damage[0]
                continue
            try:
                found = reported([good, other], briefly=False)
            except ConsistencyError:
                continue
            assert found.verdict != "consistent", edit
