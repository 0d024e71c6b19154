"""A format of the report is a file and a row: nothing else names it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from consistency.cli.main import main
from consistency.comparison.result import Comparison
from consistency.report import formats
from consistency.report.formats import Chosen, Format, View
from consistency.report.summary import all_rows
from tests.comparison.made_records import moved
from tests.conftest import MakeCapture
from tests.report.made_comparisons import ALL, comparison, tensor
from tests.report.made_suites import case, suite


def render(comparison: Comparison, _: View) -> Iterator[bytes]:
    yield f"throwaway {comparison.verdict}\n".encode()


ROW = Format(name="throwaway", chosen=Chosen.FORMAT, writer=f"{__name__}:render", help="for this test")


@pytest.fixture
def capture(make_capture: MakeCapture) -> str:
    return str(make_capture("a", {"cpu": [moved()]}))


@pytest.mark.parametrize("of_suite", [False, True])
@pytest.mark.parametrize("row", formats.FORMATS, ids=lambda row: row.name)
@pytest.mark.parametrize(
    ("profile", "settings", "texts"),
    [
        ("pinned", (), ()),
        ("deployed", (), ("profile", "deployed")),
        ("pinned", ("cudnn_enabled=false",), ("profile", "pinned", "cudnn_enabled=false")),
    ],
)
def test_every_format_states_a_profile_that_is_not_the_default(
    row: Format, of_suite: bool, profile: str, settings: tuple[str, ...], texts: tuple[str, ...]
) -> None:
    compared = comparison([tensor([ALL])], profile=profile, settings=settings)
    found = suite(case("one", compared)) if of_suite else compared
    text = b"".join(row.render(found, View(rows=all_rows(compared)))).decode().replace("\\", "")
    assert all(part in text for part in texts)
    if not texts and row.name != "report.json":
        assert "profile pinned" not in text


def added(row: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "FORMATS", (*formats.FORMATS, row))


def test_a_row_makes_a_format_to_print(
    capture: str, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(["compare", capture, "--format", "throwaway"]) == 2
    added(ROW, monkeypatch)
    assert main(["compare", capture, "--format", "throwaway"]) == 0
    assert capsysbinary.readouterr().out == b"throwaway consistent\n"


def test_a_row_makes_a_file_of_the_output_folder(
    capture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    added(dataclasses.replace(ROW, chosen=Chosen.OUT), monkeypatch)
    out = str(tmp_path / "out")
    assert main(["compare", capture, "--out", out]) == 0
    assert (tmp_path / "out" / "throwaway").read_text() == "throwaway consistent\n"
    assert main(["compare", capture, "--out", out]) == 2, "an earlier run's file is not replaced unasked"
    assert "throwaway" in capsys.readouterr().err


def test_a_row_makes_an_option_that_takes_a_file(
    capture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    added(dataclasses.replace(ROW, chosen=Chosen.OPTION), monkeypatch)
    assert main(["compare", capture, "--throwaway", str(tmp_path / "file")]) == 0
    assert (tmp_path / "file").read_text() == "throwaway consistent\n"
    assert "CONSISTENT" in capsys.readouterr().out


def test_a_suite_is_printed_under_the_same_names() -> None:
    for chosen in (Chosen.FORMAT, Chosen.OPTION):
        of_run, of_suite = ([row.name for row in formats.formats(chosen, of_suite=one)] for one in (False, True))
        assert of_run == of_suite


def test_files_of_a_run_and_of_a_suite_have_names_of_their_own() -> None:
    """They may lie in one folder."""
    names = [row.name for one in (False, True) for row in formats.formats(Chosen.OUT, of_suite=one)]
    assert len(names) == len(set(names))
