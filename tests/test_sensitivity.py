"""The table of `docs/sensitivity.md`: complete, and true where a figure is the same on every machine."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks.sensitivity import DTYPES, PAGE, STAGES, measured, planted, smallest, table
from consistency.case import standard
from consistency.case.stage import Stage


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"][2:]


def of_page(name: str) -> list[list[str]]:
    return rows(PAGE.read_text(encoding="utf-8").partition(f"<!-- generated: {name} -->")[2].partition("<!-- end")[0])


@pytest.mark.parametrize(("name", "stages"), [("table", STAGES), ("trained", STAGES[1:])])
def test_the_page_has_every_stage_dtype_and_kind_of_error(name: str, stages: tuple[Stage, ...]) -> None:
    """Of a trained model too, but operators, which have no model."""
    found = {(row[0].partition(",")[0], row[1], row[2]) for row in of_page(name)}
    errors = ("one element", "one row", "all")
    assert found == {(stage, dtype, error) for stage in stages for dtype in DTYPES for error in errors}


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
def test_the_page_has_what_moved_bytes_show_by_the_real_code() -> None:
    """Computed stages depend on the processor's kernels; of these the page has one machine."""
    here = rows(table(measured("float32", (standard.BASE, standard.ADAPTER))))
    page = [row for row in of_page("table") if re.match("base|adapter", row[0])]
    assert here == [row for row in page if row[1] == "float32"]
    assert {row[3] for row in here} == {"2⁻²⁴"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
def test_an_error_is_planted_in_every_stage() -> None:
    """A session goes on where a stage fails, and the page would lose its rows."""
    assert {one.stage for one in measured("float32")} == set(STAGES)


def test_smallest_is_found_by_bisection_and_never_is_said() -> None:
    assert smallest(lambda epsilon: epsilon >= 2.0**-7) == -7
    assert smallest(lambda epsilon: epsilon >= 2.0**-7 and epsilon != 2.0**-5) == -4
    assert smallest(lambda _: False) is None


def test_an_error_is_planted_where_it_is_said() -> None:
    ones = torch.ones(3, 2)
    assert planted(ones, "element", 3, 1.0).tolist() == [[1, 1], [1, 2], [1, 1]]
    assert planted(ones, "row", 2, 1.0).tolist() == [[1, 1], [1, 1], [2, 2]]
    assert planted(ones, "tensor", None, 1.0).tolist() == [[2, 2]] * 3
    assert torch.equal(planted(ones.bfloat16(), "tensor", None, 2.0**-10), ones.bfloat16())
