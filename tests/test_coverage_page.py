"""`docs/coverage.md` has every combination that `benchmarks/coverage.py` makes, and the cells of a run of today."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import coverage, zoo
from benchmarks.coverage import PAGE, Notes
from tests.conftest import Cli

ALWAYS = ("ADALORA", "IA3", "LOHA", "LORA")
"""Methods of which nothing is recomputed on loading: no finding depends on a kernel."""


def test_every_combination_is_on_the_page_and_nothing_else() -> None:
    text = PAGE.read_text(encoding="utf-8")
    page = coverage.listed(text)
    models = {row[0] for row in page}
    assert {model for model in zoo.MODELS if model not in models} == set(coverage.not_run(text))
    made = {(one.model, one.layer, one.name) for model in models for one in zoo.combinations((model,))}
    assert {row[:3] for row in page} == made, "run: python -m benchmarks.coverage DIR --write"
    dtypes = {(one.model, one.layer, one.name, dtype) for model in models for one, dtype in coverage.cases(model)}
    checked = {row for row in page if row[3]}
    refused = {row[:3] for row in page if not row[3]}
    assert checked <= dtypes
    assert {row for row in dtypes if row[:3] not in refused} == checked


@pytest.mark.filterwarnings("ignore")  # PEFT and transformers warn while saving
def test_a_run_of_today_gives_the_cells_of_the_page(tmp_path: Path, cli_here: Cli) -> None:
    home = tmp_path / "bert"
    home.mkdir()
    coverage.prepare("bert", home, only=ALWAYS)
    done = cli_here("run", home / "suite.toml", "--out", home / "out", "--stages", ",".join(coverage.STAGES))
    assert done.returncode == 0, done.stdout + done.stderr
    notes = Notes()
    found = list(coverage.rows(home, "bert", notes))
    assert {row.method for row in found} == set(ALWAYS)
    page = coverage.cells_of(PAGE.read_text(encoding="utf-8"))
    for row in found:
        texts = tuple(notes.expanded(cell) for cell in row.cells)
        place = (row.model, row.layer, row.method, row.dtype)
        assert of_any_kernel(texts) == of_any_kernel(page[place]), "run: python -m benchmarks.coverage DIR --write"


def of_any_kernel(cells: Sequence[str]) -> tuple[str, ...]:
    """Return cells without what was left out because rounding makes large errors: that depends on its luck."""
    wide = r" · (rounding in|few errors of|the CPU's)[^·]*would let a tensor of zeros pass"
    return tuple(re.sub(wide, "", cell) for cell in cells)


def test_only_what_kernels_decide_is_taken_from_a_cell() -> None:
    zeros = "rounding in float16 makes errors so large that twice those would let a tensor of zeros pass"
    cells = (f"yes · {zeros}", f"yes · {zeros} · PEFT does not merge it", "no · PEFT does not merge it", "**block**")
    assert of_any_kernel(cells) == ("yes", "yes · PEFT does not merge it", "no · PEFT does not merge it", "**block**")
