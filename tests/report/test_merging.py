"""The line on merging, in the terminal, on the page and in Markdown."""

from __future__ import annotations

import html
import math
from typing import Any

import msgspec
import pytest

from consistency.capture.json_codec import decode_json
from consistency.capture.merge_effect import MergeEffect
from consistency.comparison.merging import Merging, judged
from consistency.comparison.result import Comparison
from consistency.numerics.real import Real
from consistency.report.html import as_html
from consistency.report.json import as_bytes
from consistency.report.markdown import MOST_LINES, as_markdown, escaped
from consistency.report.merging import merging_cell, merging_text, merging_texts
from tests.report.made_comparisons import HOSTILE, comparison, faulty, tensor
from tests.report.printed import printed, visible

FIGURES: dict[str, Any] = {
    "dtype": "bfloat16", "computed": 0.02, "unmerged_error": 0.00946, "merged_error": 0.011, "positions": 128,
    "top1_changed": 4, "top1_unmerged": 3, "adapter": 0.5, "moved": 0.00395, "must": 0.00395, "exact": 1e-15,
    "float32": 4.7e-8,
}  # fmt: skip
NOT_MEASURED: dict[str, Any] = dict.fromkeys(("moved", "must", "exact", "float32"))

CHANGES = "merging in bfloat16 changes the logits by at most 0.00395 (1.00× what rounding W + ΔW makes unavoidable)"
LINE = (
    f"{CHANGES}; the top-1 token changes in 4 of 128 positions (unmerged bfloat16 against float64: 3); "
    "merged in float32: 4.7e-08. This is below the forward pass's own bfloat16 error (0.00946): merging is safe"
)


def merging(worker: str = "cpu", **changes: Any) -> Merging:
    fields = {**FIGURES, **changes}
    real: dict[str, Any] = {name: Real(one) if isinstance(one, float) else one for name, one in fields.items()}
    return judged(worker, MergeEffect(**real))


@pytest.mark.parametrize(("changes", "text"), [
    ({}, LINE),
    ({"reason": "PREFIX_TUNING changes no weight"}, "not merged: PREFIX_TUNING changes no weight"),
    ({"moved": 0.0, "must": 0.0}, "merging in bfloat16 does not change the logits"),
    ({"moved": 0.012, "must": 0.0}, "by at most 0.012 (rounding W + ΔW makes no change unavoidable);"),
    ({"moved": 1.0, "must": 0.00395}, "(253× what"),
    ({"moved": 1.0}, "The merge loses more than rounding does: convert base and adapter to float32, merge, and round"),
    ({"moved": 1.0, "must": 1.0, "adapter": 9.0}, "This is rounding, but above the forward pass's own bfloat16 error"),
    ({"moved": 1.0, "must": 1.0, "adapter": 9.0}, "(0.00946): merge in float32 and keep it, or do not merge"),
    ({"adapter": 0.001}, "The adapter itself changes them by 0.001, no more than that rounding: merge in float32 and"),
    ({"exact": 0.25}, "No rounding explains 0.25, the merged model is another function: do not merge"),
    ({"float32": 0.25}, "No rounding explains 0.25, the merged model is another function: do not merge"),
    ({"exact": 0.25, "shared": ("wte.weight and lm_head.weight",)}, "is another function: wte.weight and "
     "lm_head.weight are one weight, and the adapter is beside one of them: do not merge"),
    ({"moved": math.nan}, "The merged model is not finite: do not merge; safe_merge=True raises an error at the layer"),
    ({"output": "last_hidden_state", "positions": None}, "changes last_hidden_state by at most 0.00395 (1.00×"),
    ({**NOT_MEASURED, "left_out": "too large"}, "merging changes the logits by at most 0.02 as computed in bfloat16; "
     "float64 differs from the merged model by 0.011, the unmerged one by 0.00946; what rounding makes "
     "unavoidable was not measured: too large; the top-1 token changes in 4 of 128 positions"),
    ({"dtype": "float32", "float32": None, "unmerged_error": 0.001}, "above the forward pass's own float32 error"
     " (0.001): for the same answers, do not merge"),
    ({"top1_changed": 0, "top1_unmerged": 0}, "; no top-1 token changes in 128 positions; "),
])  # fmt: skip
def test_what_the_line_says(changes: dict[str, Any], text: str) -> None:
    assert text in merging_text(merging(**changes))


def test_captures_with_figures_of_their_own_have_a_line_each() -> None:
    same = [merging("a:cpu"), merging("b:cpu")]
    assert list(merging_texts(same)) == [f"merged against unmerged: {LINE}"]
    other = [*same, *(merging(f"{n}:cpu", moved=0.0041 + n / 1000) for n in range(3))]
    lines = list(merging_texts(other))
    assert lines[0] == f"merged against unmerged (a:cpu, b:cpu): {LINE}"
    assert lines[1].startswith("merged against unmerged (0:cpu): merging in bfloat16 changes the logits by at most 0.0")
    assert lines[3:] == ["and 1 more line: report.json has them all"]


def test_the_cell_of_a_suite() -> None:
    assert merging_cell([]) == ""
    assert merging_cell([merging()]) == "1.00× merge"
    assert merging_cell([merging(exact=1.0)]) == "1.00× do-not-merge"
    nothing: dict[str, Any] = {name: None for name in FIGURES if name != "dtype"}
    assert merging_cell([merging(reason="x", **nothing)]) == "not merged"
    assert merging_cell([merging(), merging(), merging(exact=1.0)]) == "merge, do-not-merge"


def with_merging(found: Comparison, **changes: Any) -> Comparison:
    return msgspec.structs.replace(found, merging=(merging(**changes),))


def test_every_form_has_it_in_one_line() -> None:
    found = with_merging(comparison([tensor([["cpu", "cuda:0", "cuda:1", "cuda:2"]])]))
    assert f"  merged against unmerged: {LINE}\n" in printed(found, width=500)
    assert escaped(f"merged against unmerged: {LINE}") in as_markdown(found).splitlines()
    assert f'<p class="bits">merged against unmerged: {LINE}</p>' in html.unescape(as_html(found))
    table = decode_json(as_bytes(found), dict[str, Any])
    (entry,) = table["merging"]
    assert entry["worker"] == "cpu"
    assert entry["ratio"] == 1.0
    assert entry["advice"] == "merge"
    assert {name: entry[name] for name in FIGURES} == FIGURES
    assert "reason" not in entry


def test_a_screen_of_markdown_is_visible() -> None:
    many = [[f"cuda:{n}"] for n in range(9)]
    found = comparison([tensor(many, statuses={f"cuda:{n}": "outside" for n in range(9)})])
    assert len(visible(as_markdown(with_merging(found)))) <= MOST_LINES


def test_names_of_strangers_stay_text() -> None:
    found = with_merging(faulty(), output=HOSTILE, dtype=HOSTILE)
    assert "<img" not in as_html(found)
    assert "\u202e" not in printed(found)
    assert "<img" not in as_markdown(found).replace("\\<", "")
