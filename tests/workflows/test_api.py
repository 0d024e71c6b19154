"""The Python interface: what it takes as a path, and what it reads again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import consistency
from consistency.case.builtin import builtin_folder
from consistency.case.reading import as_text, make_options
from consistency.errors import UsageError
from tests.launch.in_this_process import in_this_process
from tests.made_weights import f32, put


class Place(os.PathLike[str]):
    """A path that is no `pathlib.Path`, and whose `str` is another text."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return str(self._path)


@pytest.mark.process
def test_each_argument_that_names_a_file_takes_a_path(tmp_path: Path) -> None:
    llama, history, out = builtin_folder("llama"), tmp_path / "history", tmp_path / "out"
    with in_this_process():
        report = consistency.run(
            base=Place(llama / "base"), adapter=Place(llama / "adapter"), devices="cpu", stages=["adapter"],
            level="quick", history=Place(history), out=Place(out),
        )  # fmt: skip
    assert report.verdict == "consistent"
    assert any(history.iterdir())
    assert consistency.compare([Place(out)], history=Place(history)).verdict == "consistent"


@pytest.mark.process
def test_a_suite_takes_paths(tmp_path: Path) -> None:
    llama = builtin_folder("llama")
    with in_this_process():
        result = consistency.run_suite(
            base=llama / "base", adapter=[llama / "adapter"], devices="cpu", stages="adapter", level="quick",
            out=Place(tmp_path / "night"),
        )  # fmt: skip
    assert [case.verdict for case in result.cases] == ["consistent"]
    assert (tmp_path / "night/cases").is_dir()


def test_paths_in_options_made_by_hand_are_texts() -> None:
    given = consistency.Options(base=Path("a"), adapter="b", level="quick")  # type: ignore[arg-type]
    made = make_options({"adapter": Path("c")}, given)
    assert (made.base, made.adapter, made.inputs, made.level) == ("a", "c", None, "quick")


def test_a_path_is_a_text_wherever_it_stands() -> None:
    given = {"adapters": {"one": Path("a"), "two": "b"}, "adapter": [Place(Path("c"))], "repeat": 2, "only": ("x",)}
    assert as_text(given) == {"adapters": {"one": "a", "two": "b"}, "adapter": ["c"], "repeat": 2, "only": ("x",)}


def test_a_report_is_read_again_with_its_findings(tmp_path: Path) -> None:
    put(tmp_path / "a.safetensors", {"x.w": f32(1, 2)})
    put(tmp_path / "b.safetensors", {"x.w": f32(1, 3), "y.w": f32(1)})
    found = consistency.diff(Place(tmp_path / "a.safetensors"), tmp_path / "b.safetensors", out=Place(tmp_path / "out"))
    assert found.verdict == "inconsistent"
    assert found.reference == str(tmp_path / "a.safetensors")
    read = consistency.load_report(Place(tmp_path / "out"))
    assert read.findings == found.findings == read.comparison.findings
    assert (read.folder, read.elapsed_s) == (tmp_path / "out", found.elapsed_s)
    assert "y without a counterpart" in read.findings[1].message


def test_a_folder_without_a_report_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no report here"):
        consistency.load_report(tmp_path)


def test_a_name_in_place_of_a_case_is_refused_in_words() -> None:
    with pytest.raises(UsageError, match="not a case"):
        consistency.run("builtin:llama")  # type: ignore[arg-type]  # what a new user writes first
