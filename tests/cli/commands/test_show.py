"""A report is printed again: of a run, of a suite, one finding, and the layers as CSV."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from pathlib import Path

import msgspec
import pytest

from consistency.cli.main import main
from consistency.comparison.layers import layers_of
from consistency.comparison.result import Comparison
from consistency.report import json as report_json
from consistency.report import layers
from consistency.report.formats import Chosen, View, formats
from tests.report.made_comparisons import comparison, faulty, four_architectures, hostile, tensor
from tests.report.made_suites import case, good, suite, zeros


def saved(found: Comparison, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_bytes(report_json.as_bytes(found))
    return folder


def shown(capsysbinary: pytest.CaptureFixture[bytes], *arguments: object, status: int = 0) -> str:
    assert main(["show", *map(str, arguments)]) == status
    out, err = capsysbinary.readouterr()
    return (err if status else out).decode()


def saved_suite(folder: Path) -> Path:
    found = suite(case("alice", good()), case("bob", zeros(3)))
    folder.mkdir()
    for row in formats(Chosen.OUT, of_suite=True):
        (folder / row.name).write_bytes(b"".join(row.render(found, View())))
    return folder


def test_a_suite_is_printed_again_with_the_folders_of_its_cases(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    folder = saved_suite(tmp_path / "night")
    text = shown(capsysbinary, folder)
    lines = [line.split() for line in text.splitlines()]
    assert ["bob", "inconsistent", "✗", "3/3", "–", "1.5", "s"] in lines
    assert [str(folder / "cases/alice")] in lines
    assert [str(folder / "cases/bob")] in lines
    assert f"next: consistency reproduce {folder}/cases/bob --finding 1 --out repro" in text
    assert json.loads(shown(capsysbinary, folder, "--json")) == json.loads((folder / "suite.json").read_bytes())
    error = shown(capsysbinary, folder, "--layers", status=2)
    assert "--layers of a suite" in error
    assert str(folder / "cases/NAME") in error


def test_a_folder_of_reports_names_them(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    for fault in ("merge-off", "adapter-zeros"):
        saved(faulty(), tmp_path / "drill" / fault)
    error = shown(capsysbinary, tmp_path / "drill", status=2)
    assert f"there are reports in {tmp_path}/drill/adapter-zeros, {tmp_path}/drill/merge-off" in error
    assert "hint" not in shown(capsysbinary, tmp_path, status=2)


def test_one_finding_has_all_of_its_tensors(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    folder = saved(faulty(), tmp_path)
    text = shown(capsysbinary, folder, "--finding", 1)
    finding, note = faulty().findings
    assert [text.count(part) for part in (finding.message, *finding.detail, *finding.tensors)] == [1] * 6
    assert "workers: cuda:1" in text
    assert note.message not in text
    assert f"note: {note.message}" in shown(capsysbinary, folder, "--finding", 2)
    assert json.loads(shown(capsysbinary, folder, "--finding", 2, "--json"))["message"] == note.message
    for number in (0, 3):
        assert "wanted: 1 to 2" in shown(capsysbinary, folder, "--finding", number, status=2)


def test_layers_as_csv(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    found = four_architectures()
    rows = list(csv.DictReader(io.StringIO(shown(capsysbinary, saved(found, tmp_path), "--csv"))))
    cells = [(one, name, cell) for one in layers_of(found) for name, cell in one.architectures.items()]
    assert len(rows) == len(cells) == 64
    for row, (one, name, cell) in zip(rows, cells, strict=True):
        assert (row["stage"], row["layer"], row["tensor"], row["architecture"]) == (
            one.stage,
            one.layer,
            one.tensor,
            name,
        )
        assert (row["status"], int(row["max_ulp"])) == (cell.status, cell.max_ulp)
        assert [float(row[name]) for name in ("max_abs", "allowed", "ratio")] == [
            cell.max_abs, cell.allowed, cell.ratio
        ]  # fmt: skip
    bad = [row for row in rows if row["status"] == "outside"]
    assert [row["classes"] for row in bad] == ["Hopper sm_90:0 | Hopper sm_90:1"]
    chosen = shown(capsysbinary, tmp_path, "--csv", "--layer", "*.1.*", "--arch", "hopper").splitlines()
    assert len(chosen) == 5


def test_no_cell_of_a_csv_is_computed() -> None:
    made = comparison([tensor([["cpu"]], layer=f"{sign}cmd|'/c calc'!A1") for sign in "=+-@"])
    for found in (made, hostile()):
        text = b"".join(layers.render_csv(layers_of(found))).decode()
        cells = [cell for row in csv.reader(io.StringIO(text)) for cell in row]
        assert len(cells) > 12
        assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@"))]


def test_what_excludes_each_other_is_said(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    folder = saved(faulty(), tmp_path)
    for given in (("--csv", "--json"), ("--layers", "--finding", 1), ("--csv", "--finding", 1)):
        assert "only one of them can be printed" in shown(capsysbinary, folder, *given, status=2)
    assert shown(capsysbinary, folder, "--csv", "--layers").startswith("stage,")


def test_an_archive_of_a_report_is_printed_as_its_folder_is(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """What `show --redact --out NAME.zip` wrote could be opened by nothing."""
    folder, archive = saved(faulty(), tmp_path / "out"), tmp_path / "public.zip"
    shown(capsysbinary, folder, "--redact", "--out", archive)
    with zipfile.ZipFile(archive) as made:
        assert "report.json" in made.namelist()
    found = shown(capsysbinary, archive)
    assert "zeros in 3 of 3 lora_B tensors" in found
    assert "consistency reproduce" not in found, "it has no captures"
    archive.write_bytes(b"no archive")
    assert "cannot read report.json" in shown(capsysbinary, archive, status=2)


def test_a_capture_is_told_from_a_report(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    (tmp_path / "capture.json").write_text("{}")
    assert f"this is a capture: consistency compare {tmp_path}" in shown(capsysbinary, tmp_path, status=2)


def test_what_was_not_checked_is_a_line_in_a_report_without_a_finding(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    left = ("stage transfer", "stage operators", "a second run")
    folder = saved(msgspec.structs.replace(comparison([]), not_checked=left), tmp_path / "out")
    assert "not checked (level standard): stage transfer and 2 more things: -v lists them" in shown(
        capsysbinary, folder
    )
    assert ", ".join(left) in shown(capsysbinary, folder, "-v")


def test_what_was_not_checked_is_counted_and_not_its_commas(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    left = ("6 of 8 sequences, for lack of memory", "a second run")
    folder = saved(msgspec.structs.replace(comparison([]), not_checked=left), tmp_path / "out")
    printed = shown(capsysbinary, folder)
    assert (
        "not checked (level standard): 6 of 8 sequences, for lack of memory and 1 more thing: -v lists them" in printed
    )
