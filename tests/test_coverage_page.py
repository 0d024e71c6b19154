"""`docs/coverage.md` counts every case that `benchmarks/coverage.py` makes, and has the cells of a run of today."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import coverage, zoo
from benchmarks.coverage import EXAMPLE, EXAMPLE_METHODS, PAGE, Checked, Notes, Row
from tests.conftest import Cli
from tests.versions import made_with_constraints

AGAIN = "run: python -m benchmarks.coverage DIR --write"


@made_with_constraints
def test_every_case_is_counted_and_nothing_else() -> None:
    text = PAGE.read_text(encoding="utf-8")
    counts = coverage.counted(text)
    assert {model for model in zoo.MODELS if model not in counts} == set(coverage.not_run(text))
    for model, (ran, refused, names) in counts.items():
        assert names == coverage.names_digest(model), AGAIN
        assert ran + refused == len(list(coverage.cases(model))), AGAIN
    (said,) = re.findall(r"^(\d+) cases on ", text, re.MULTILINE)
    assert int(said) == sum(ran for ran, _, _ in counts.values())


def made_up(model: str, *, refused: int) -> tuple[list[Row], dict[str, str]]:
    """Return a row of each case of a model, but for the first combinations, of which PEFT is to make no adapter."""
    combinations = list(zoo.combinations((model,)))
    answers = {one.folder: "TypeError: not | supported" for one in combinations[:refused]}
    rows = [
        Row(
            model=model,
            layer=one.layer,
            method=one.name,
            dtype=dtype,
            cells=("yes", "yes", "no [1]", "**zeros**", "yes"),
        )
        for one, dtype in coverage.cases(model)
        if one.folder not in answers
    ]
    return rows, answers


def test_table_and_summary_have_every_case() -> None:
    notes = Notes()
    notes.of("PEFT does not merge it")
    found = []
    for model, few in (("llama", 3), ("resnet", 1)):
        rows, answers = made_up(model, refused=few)
        found.append(Checked(model=model, rows=tuple(rows), refused=answers))
    text = coverage.table(found, notes, "some figures")
    expected = {
        (one.model, one.layer, one.name, "" if one.folder in checked.refused else dtype)
        for checked in found
        for one, dtype in coverage.cases(checked.model)
    }
    assert coverage.listed(text) == expected
    assert set(coverage.cells_of(text).values()) == {("yes", "yes", "no · PEFT does not merge it", "**zeros**", "yes")}
    counts = coverage.counted(coverage.summary(found, notes)["models"])
    for checked in found:
        ran, refused, names = counts[checked.model]
        assert (ran, ran + refused) == (len(checked.rows), len(list(coverage.cases(checked.model))))
        assert names == coverage.names_digest(checked.model)


@pytest.mark.parametrize("change", ["lost", "twice", "another"])
def test_a_case_cannot_be_lost(change: str) -> None:
    rows, answers = made_up("resnet", refused=1)
    if change == "another":
        rows[0] = replace(rows[0], method="NO SUCH METHOD")
    rows = rows[1:] if change == "lost" else [*rows, rows[0]] if change == "twice" else rows
    with pytest.raises(ValueError, match="resnet: cases without a row, or rows without a case"):
        Checked(model="resnet", rows=tuple(rows), refused=answers)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # PEFT and transformers warn while saving
def test_a_run_of_today_gives_the_cells_of_the_page(tmp_path: Path, cli_here: Cli) -> None:
    home = tmp_path / EXAMPLE
    home.mkdir()
    coverage.prepare(EXAMPLE, home, only=EXAMPLE_METHODS)
    done = cli_here("run", home / "suite.toml", "--out", home / "out", "--stages", ",".join(coverage.STAGES))
    assert done.returncode == 0, done.stdout + done.stderr
    notes = Notes()
    found = list(coverage.rows(home, EXAMPLE, notes))
    assert {row.method for row in found} == set(EXAMPLE_METHODS)
    page = coverage.cells_of(PAGE.read_text(encoding="utf-8"))
    for row in found:
        texts = tuple(notes.expanded(cell) for cell in row.cells)
        place = (row.model, row.layer, row.method, row.dtype)
        assert of_any_kernel(texts) == of_any_kernel(page[place]), AGAIN


def of_any_kernel(cells: Sequence[str]) -> tuple[str, ...]:
    """Return cells without what was left out because rounding makes large errors: that depends on its luck."""
    wide = r" · (rounding in|too few values|the CPU's)[^·]*would let zeros pass"
    return tuple(re.sub(wide, "", cell) for cell in cells)


def test_only_what_kernels_decide_is_taken_from_a_cell() -> None:
    zeros = "rounding in float16 makes such large errors that a tolerance of twice those would let zeros pass"
    cells = (f"yes · {zeros}", f"yes · {zeros} · PEFT does not merge it", "no · PEFT does not merge it", "**block**")
    assert of_any_kernel(cells) == ("yes", "yes · PEFT does not merge it", "no · PEFT does not merge it", "**block**")
