"""The tolerance report in a terminal: whole names, the worst first, and it fits."""

from __future__ import annotations

import io
import re

import pytest

from consistency.comparison.layers import LayerFilter, layers_of
from consistency.comparison.result import Comparison, TensorComparison
from consistency.report.console import make_console
from consistency.report.layers import cell_figures, render
from tests.report.made_comparisons import ARCHITECTURES, HOSTILE, comparison, faulty, four_architectures, hostile


def printed(found: Comparison, width: int, *, verbose: bool = False, **by: object) -> list[str]:
    console = make_console(io.StringIO())
    console.width = width
    chosen = LayerFilter(**by)  # type: ignore[arg-type]  # by name
    return b"".join(render(found, chosen, verbose=verbose, console=console)).decode().splitlines()


@pytest.mark.parametrize("width", [80, 120, 200])
def test_names_and_figures_are_whole_at_any_width(width: int) -> None:
    lines = printed(four_architectures(), width)
    text = "\n".join(lines)
    assert all(len(line) <= width for line in lines)
    assert "model.layers.1.self_attn.k_proj.weight" in text
    assert all(name in text for name in ARCHITECTURES)
    assert "✗ 6.5e-05 / 2e-05  3.25  12 ULP" in text
    assert "{Hopper sm_90:0} {Hopper sm_90:1}" in text, "devices of one architecture that differ"
    assert next(line for line in lines if "model.layers" in line).strip().startswith("model.layers.1."), "worst first"
    assert "worst of 4 in model.layers.1" in text


def test_architectures_are_columns_where_they_fit() -> None:
    wide = printed(four_architectures(wrong=""), 200)
    assert all(name in wide[1] for name in ARCHITECTURES)
    assert "Volta sm_70:0, Volta sm_70:1" in wide[2]
    narrow = printed(four_architectures(wrong=""), 80)
    assert sum("Volta sm_70 " in line for line in narrow) == 4, "a line per architecture below each layer"


def test_a_pattern_opens_the_blocks() -> None:
    lines = printed(four_architectures(), 200, pattern="model.layers.1.*")
    assert [line.split()[0].split(".")[-2] for line in lines if "model.layers" in line] == [
        "k_proj", "o_proj", "v_proj", "q_proj"
    ]  # fmt: skip
    assert "no layer of this report matches" in printed(faulty(), 80, pattern="nothing")[0]


def test_what_is_equal_is_counted_unless_all_is_asked_for() -> None:
    assert "  3 tensors: bitwise equal" in printed(faulty(), 80, stages=("base",))
    assert "model.layers.2.mlp.weight" in "\n".join(printed(faulty(), 80, stages=("base",), verbose=True))


def test_a_stage_with_more_rows_than_shown_says_so() -> None:
    found = four_architectures()
    many = [t for t in found.tensors for _ in range(1)]
    wide = comparison(
        [TensorComparison(**{**{f: getattr(t, f) for f in t.__struct_fields__}, "layer": f"a.{i}.{j}"})
         for j, t in enumerate(many) for i in range(3)],
        architectures=found.architectures, workers=found.workers,
    )  # fmt: skip
    lines = printed(wide, 200, pattern="a.*")
    assert "  28 more tensors, none worse" in lines


def test_names_of_strangers_are_shown_as_text() -> None:
    text = "\n".join(printed(hostile(), 400, verbose=True))
    assert "\u202e" not in text
    assert HOSTILE.split("\u2028")[0] in text


@pytest.mark.parametrize("width", [80, 320])
def test_figures_are_of_the_tensor_that_their_line_or_cell_names(width: int) -> None:
    found = four_architectures()
    cells = {f"{one.layer}.{one.tensor}": one.architectures for one in layers_of(found)}
    text = "\n".join(printed(found, width))
    rows = re.split(r"\n(?=  model\.layers)", text)[1:]
    assert len(rows) == 4
    seen = set()
    for row in rows:
        named = row.split()[0]
        block = named.partition(".self_attn.")[0]
        for figure, other in re.findall(r"([≤✗] \S+ / \S+  \S+  \d+ ULP)(?:  (self_attn\.\S+))?", row):
            tensor = f"{block}.{other}" if other else named
            assert figure in {cell_figures(cell) for cell in cells[tensor].values()}
            seen.add(bool(other))
    assert seen == {True, False}, "Hopper's k_proj is the worst of its block; the others have a worse o_proj"
