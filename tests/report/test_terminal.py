"""The report for people: what it shows, and that names from strangers cannot drive the terminal."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consistency.case.stages import Stage
from consistency.comparison.result import (
    Divergence,
    Finding,
    Status,
)
from consistency.report.html import as_html
from consistency.report.markdown import as_markdown
from consistency.report.sentences import sentence
from consistency.report.text import clean
from tests.report.made_comparisons import ALL, comparison, tensor, worker
from tests.report.printed import printed


def test_verdict_and_groups() -> None:
    within: dict[str, Status] = dict.fromkeys(ALL, "within")
    computed = tensor([ALL], stage="merged", ratio=0.314, statuses=within)
    text = printed(comparison([tensor([ALL]), computed]), elapsed_s=41.4)
    lines = text.splitlines()
    assert lines[0] == "consistency · llama · float32 · 4 workers · 41 s"
    assert "CONSISTENT   the adapter matches on 4 workers; the model's worst error/tolerance is 0.31 (merged)" in text
    assert "cuda:0  cuda:1  cuda:2" in text, "devices that agree share a line"
    assert "≤ 0.31" in text


def test_devices_that_disagree_have_lines_of_their_own() -> None:
    wrong = tensor([["cpu", "cuda:0", "cuda:2"], ["cuda:1"]], statuses={"cuda:1": "outside"})
    finding = Finding(
        kind="zeros", severity="error", message="adapter · cuda:1 · zeros", workers=("cuda:1",),
        detail=("layers.0.lora_B[1, 2]",), next="consistency run --devices cpu,cuda:1",
    )  # fmt: skip
    text = printed(comparison([wrong, tensor([ALL], layer="layers.1")], verdict="inconsistent", findings=(finding,)))
    assert "INCONSISTENT   adapter · cuda:1 · zeros" in text
    assert "1  adapter · cuda:1 · zeros" in text
    assert "next: consistency run --devices cpu,cuda:1" in text
    assert "cuda:0  cuda:2" in text
    line = next(line for line in text.splitlines() if line.strip().startswith("cuda:1 "))
    assert "✗ 1/2" in line
    assert "{cpu, cuda:0, cuda:2} {cuda:1}" in text
    assert "layers.1" not in text, "per layer only what is not equal"


def test_verbose_shows_every_layer() -> None:
    found = comparison([tensor([ALL], layer=f"layers.{i}") for i in range(30)])
    assert "layers.7" not in printed(found)
    assert all(f"layers.{i}" in printed(found, verbose=True) for i in range(30))


def test_long_lists_of_layers_are_cut_unless_asked_for() -> None:
    wrong = [tensor([["cpu"], ["cuda:0"]], layer=f"layers.{i}", statuses={"cuda:0": "outside"}) for i in range(50)]
    finding = Finding(kind="zeros", severity="error", message="zeros")
    found = comparison(wrong, verdict="inconsistent", findings=(finding,))
    assert "and 30 more: -v shows all" in printed(found)
    assert "layers.49" in printed(found, verbose=True)


def test_a_nan_is_worse_than_any_ratio() -> None:
    within: dict[str, Status] = dict.fromkeys(ALL, "within")
    ratios = (0.5, float("nan"), 0.7)
    found = [tensor([ALL], stage="merged", ratio=r, layer=f"l{r}", statuses=within) for r in ratios]
    assert "nan" in printed(comparison(found))


def test_what_was_not_checked_is_named() -> None:
    text = printed(comparison([tensor([ALL])], not_looked_at=("forward",)))
    assert "not checked (level standard): forward" in text


def test_lost_worker() -> None:
    lost = worker("cuda:1", status="lost", reason="was killed by SIGKILL")
    found = comparison(
        [tensor([["cpu"]])], verdict="incomplete", workers=(worker("cpu", "x86-64"), lost),
        findings=(Finding(kind="lost-worker", severity="error", message="cuda:1 was lost"),),
    )  # fmt: skip
    assert "INCOMPLETE   cuda:1 did not finish" in printed(found)


def test_simulated_devices_are_told_as_such() -> None:
    assert "SIMULATED" in printed(comparison([tensor([ALL])], simulated=True)).splitlines()[0]
    workers = (worker("cpu"), *(worker(f"npu:{i}", simulated=True) for i in (0, 1)))
    found = comparison([tensor([["cpu", "npu:0", "npu:1"]])], workers=workers)
    assert sentence(found) == "the adapter matches on 3 workers; simulated: npu:0, npu:1"
    assert "simulated" not in sentence(comparison([tensor([ALL])]))


def test_the_verdict_names_the_devices_whose_base_was_offloaded() -> None:
    workers = (
        worker("cpu"),
        worker("npu:0", environment={"placement": "offload: as requested"}),
        worker("npu:1", environment={"placement": "device"}),
    )
    assert sentence(comparison([tensor([["cpu", "npu:0", "npu:1"]])], workers=workers)) == (
        "the adapter matches on 3 workers; base offloaded: npu:0"
    )


def test_control_characters_are_shown_not_obeyed() -> None:
    assert clean("a\x1b[2Jb\rc") == "a\\x1b[2Jb\\x0dc"
    text = printed(comparison([tensor([ALL], layer="evil\x1b]0;title\x07")], case="x\x1b[31m"), verbose=True)
    assert "\x1b" not in text
    assert "\\x1b" in text


def test_markup_in_names_is_text() -> None:
    assert "[red]x[/red]" in printed(comparison([tensor([ALL], layer="[red]x[/red]")]), verbose=True)


def test_piped_output_has_no_trailing_blanks() -> None:
    assert all(line == line.rstrip() for line in printed(comparison([tensor([ALL])])).splitlines())


def test_sentence_counts_other_findings() -> None:
    findings = tuple(Finding(kind="zeros", severity="error", message=f"m{i}") for i in range(3))
    assert sentence(comparison([], verdict="inconsistent", findings=findings)) == "m0 (and 2 other findings)"


def test_load_paths_without_a_mismatch_share_a_line() -> None:
    load_paths = ("isolated", "isolated+cpu", "isolated+low-memory")
    text = printed(comparison([tensor([ALL], load_path=load_path) for load_path in load_paths], load_paths=load_paths))
    assert "2 more load paths checked, all equal (isolated+cpu, isolated+low-memory)" in text
    assert text.count("Ampere sm_86") == 1, "one table, not one per load path"
    assert "load path: isolated" not in text
    five = (*load_paths, "isolated+target", "isolated+transformers", "isolated+cpu+low-memory")
    text = printed(comparison([tensor([ALL], load_path=load_path) for load_path in five], load_paths=five))
    assert "5 more load paths checked, all equal\n" in text


def test_a_load_path_with_a_mismatch_has_its_own_line() -> None:
    load_paths = ("isolated", "isolated+cpu", "isolated+low-memory", "isolated+transformers")
    wrong = tensor([["cpu", "cuda:0"], ["cuda:1"]], load_path=load_paths[2], statuses={"cuda:1": "outside"})
    skipped = tensor([ALL], load_path=load_paths[3], statuses=dict.fromkeys(ALL, "skipped"))
    found = comparison([tensor([ALL]), tensor([ALL], load_path=load_paths[1]), wrong, skipped], load_paths=load_paths)
    text = printed(found)
    assert "1 more load path checked, equal (isolated+cpu)" in text
    assert "load path isolated+low-memory: ✗ 1/1 on cuda:1" in text
    assert "load path isolated+transformers: skipped" in text
    assert "adapter (isolated+low-memory)   layers.0" in text, "whose tensor it is stands beside it"


def test_default_load_paths_have_a_table_each() -> None:
    workers = (worker("cpu", "x86-64"), worker("cuda:0"), worker("cuda:0", load_path="shared"))
    tensors = [tensor([["cpu", "cuda:0"]]), tensor([["cpu", "cuda:0"]], load_path="shared")]
    text = printed(comparison(tensors, workers=workers, load_paths=("isolated", "shared")))
    assert "load path: isolated" in text
    assert "load path: shared" in text
    assert "more" not in text


MODEL = "Intel(R) Xeon(R) Platinum 8592+ Processor @ 1.90GHz (family 6 model 207)"


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
@pytest.mark.parametrize("model", ["chip", MODEL])
def test_no_cell_and_no_name_of_a_stage_is_cut(width: int, model: str) -> None:
    """The heading of a group is as long as the processor's name, and takes no width from the cells below it."""
    workers = (worker("cpu", "x86-64", model=model), *(worker(f"cuda:{i}", model=model) for i in range(3)))
    tensors = [tensor([ALL], stage=stage, ratio=0.123, statuses=dict.fromkeys(ALL, "within")) for stage in Stage]
    text = printed(comparison(tensors, workers=workers), width=width)
    table = text.partition("(transfer)\n")[2].partition("= bitwise equal")[0]
    assert "…" not in text
    assert {stage.value for stage in Stage} <= set(table.split())
    lines = [line.partition("(reference)")[2] for line in table.splitlines() if "(reference)" in line]
    assert " ".join(lines).split() == ["≤", "0.12"] * len(Stage)
    assert all(len(line) <= max(width, len(MODEL)) for line in table.splitlines())
    if (width, model) == (140, MODEL):
        assert len(lines) == 1, "at the width of a pipe all stages are beside one another"


def test_where_workers_diverge_first() -> None:
    """The first mismatch, and the first difference in bits within tolerance before it."""

    def first(name: str, stage: str, status: Status) -> Divergence:
        return Divergence(worker=name, load_path="isolated", stage=stage, layer="l", tensor="w", status=status)

    bits = [first(name, "operators", "within") for name in ("cuda:0", "cuda:1")]
    found = comparison(
        [tensor([ALL])],
        first_other_bits=(*bits, first("cuda:2", "base", "outside")),
        first_divergence=(first("cuda:1", "merged", "outside"), first("cuda:2", "base", "outside")),
    )
    wanted = [
        "cuda:1: first mismatch: merged, l.w",
        "cuda:2: first mismatch: base, l.w",
        "cuda:0, cuda:1: first bitwise difference from cpu: operators, l.w (within tolerance)",
    ]
    assert [line.strip() for line in printed(found).splitlines() if ": first " in line] == wanted
    assert "cuda:1: first mismatch: merged, l.w" in as_html(found)
    assert "cuda:1: first mismatch: merged, l.w" in as_markdown(found)


@given(st.lists(st.text("abc:@0", min_size=1, max_size=24), unique=True, min_size=1, max_size=12), st.integers(20, 200))
def test_every_worker_of_a_line_is_named_or_counted(names: list[str], width: int) -> None:
    """However many there are and however little room: a count of those left out is never 0 or negative."""
    found = comparison([tensor([names])], workers=tuple(map(worker, names)), reference=names[0])
    text = printed(found, width=width)
    counts = [int(count) for count in re.findall(r"\band (-?\d+) more", text)]
    assert all(count > 0 for count in counts)
    if counts and width == 200:
        assert counts[0] < len(names)
