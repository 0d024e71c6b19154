"""The report for people: what it shows, and that names from strangers cannot drive the terminal."""

from __future__ import annotations

import io
import math
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consistency.capture.records import StageMemory
from consistency.case.stages import SPECS
from consistency.comparison.result import (
    ArchitectureGroup,
    Comparison,
    Divergence,
    Finding,
    Status,
)
from consistency.report.console import PIPE_WIDTH, make_console
from consistency.report.html import as_html
from consistency.report.markdown import as_markdown
from consistency.report.sentences import sentence
from consistency.text import clean
from tests.report.made_comparisons import ALL, comparison, faulty, tensor, worker
from tests.report.printed import printed


def test_verbose_shows_every_layer() -> None:
    found = comparison([tensor([ALL], layer=f"layers.{i}") for i in range(30)])
    assert "layers.7" not in printed(found)
    text = printed(found, verbose=True)
    assert all(f"layers.{i}" in text for i in range(30))


WITHIN: dict[str, Status] = dict.fromkeys(ALL, "within")


def within_tolerance(*ratios: float, stages: tuple[str, ...] = ("merged",)) -> Comparison:
    """Return a run in which each stage has a layer per ratio."""
    return comparison([
        tensor([ALL], stage=stage, layer=f"model.layers.{number}.q_proj", ratio=ratio, statuses=WITHIN)
        for stage in stages for number, ratio in enumerate(ratios)
    ])  # fmt: skip


def table_of(text: str) -> str:
    """Return all that stands before the legend, on one line."""
    return " ".join(text.partition("\n  =")[0].split())


def test_verbose_shows_the_layer_of_the_worst_ratio_of_a_merge() -> None:
    found = within_tolerance(0.1, 0.42, 0.3)
    assert "model.layers" not in table_of(printed(found))
    table = table_of(printed(found, verbose=True))
    assert "≤ 0.42 model.layers.1.q_proj" in table
    assert not re.search(r"model\.layers\.[02]", table)
    assert "model.layers" not in table_of(printed(within_tolerance(0.1, 0.42, stages=("base",)), verbose=True))


def test_a_ratio_that_is_not_a_number_is_the_worst_and_the_first_layer_with_it_is_named() -> None:
    table = table_of(printed(within_tolerance(0.9, math.nan, math.nan, 0.95), verbose=True))
    assert "≤ nan model.layers.1.q_proj" in table
    assert "≤ 0.90 model.layers.0.q_proj" in table_of(printed(within_tolerance(0.9, 0.9), verbose=True))


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_no_width_takes_the_layer_of_the_worst_ratio_away(width: int) -> None:
    found = within_tolerance(0.1, 0.42, stages=("base", "adapter", "forward", "merged", "gradient", "trajectory"))
    assert "≤ 0.42 model.layers.1.q_proj" in table_of(printed(found, verbose=True, width=width))


@pytest.mark.parametrize("width", [60, 160])
def test_verbose_keeps_the_layer_of_a_mismatch(width: int) -> None:
    wrong = tensor([ALL], stage="forward", layer="model.layers.7.mlp", statuses=dict.fromkeys(ALL, "outside"))
    found = within_tolerance(0.42, stages=("base", "adapter", "merged", "gradient", "trajectory"))
    both = msgspec.structs.replace(found, tensors=(*found.tensors, wrong), verdict="inconsistent")
    assert "from model.layers.7.mlp" in table_of(printed(both, verbose=True, width=width))


def test_verbose_shows_what_stages_took() -> None:
    took = (StageMemory(stage="merged", host_resident_bytes=1, host_peak_bytes=2**31, elapsed_s=2.5),)
    found = comparison([tensor([["cpu"]])], workers=(msgspec.structs.replace(worker("cpu"), stage_memory=took),))
    assert re.search(r"cpu +merged +2\.5 s +2\.0 GiB", printed(found, verbose=True))
    assert "host peak" not in printed(found)


def test_long_lists_of_layers_are_cut_unless_asked_for() -> None:
    wrong = [tensor([["cpu"], ["cuda:0"]], layer=f"layers.{i}", statuses={"cuda:0": "outside"}) for i in range(50)]
    finding = Finding(kind="zeros", severity="error", message="zeros")
    found = comparison(wrong, verdict="inconsistent", findings=(finding,))
    assert "and 30 more: -v shows all" in printed(found)
    assert "layers.49" in printed(found, verbose=True)


def test_lost_worker() -> None:
    lost = worker("cuda:1", status="lost", reason="was killed by SIGKILL")
    found = comparison(
        [tensor([["cpu"]])], verdict="incomplete", workers=(worker("cpu", "x86-64"), lost),
        findings=(Finding(kind="lost-worker", severity="error", message="cuda:1 was lost"),),
    )  # fmt: skip
    assert "INCOMPLETE   cuda:1 did not finish" in printed(found)


def test_simulated_devices_are_told_as_such() -> None:
    found = comparison([tensor([ALL])], simulated=True)
    assert "SIMULATED" in printed(found).splitlines()[0]
    assert "SIMULATED DEVICES" in as_markdown(found)
    workers = (worker("cpu"), *(worker(f"npu:{i}", simulated=True) for i in (0, 1)))
    found = comparison([tensor([["cpu", "npu:0", "npu:1"]])], workers=workers)
    assert sentence(found) == "the adapter agrees on 3 workers; simulated: npu:0, npu:1"
    assert "simulated" not in sentence(comparison([tensor([ALL])]))


def test_the_verdict_names_the_devices_whose_base_was_offloaded() -> None:
    workers = (
        worker("cpu"),
        worker("npu:0", environment={"placement": "offload: as requested"}),
        worker("npu:1", environment={"placement": "device"}),
    )
    assert sentence(comparison([tensor([["cpu", "npu:0", "npu:1"]])], workers=workers)) == (
        "the adapter agrees on 3 workers; base offloaded: npu:0"
    )


def test_control_characters_are_shown_not_obeyed() -> None:
    assert clean("a\x1b[2Jb\rc") == "a\\x1b[2Jb\\x0dc"
    text = printed(comparison([tensor([ALL], layer="evil\x1b]0;title\x07")], case="x\x1b[31m"), verbose=True)
    assert "\x1b" not in text
    assert "\\x1b" in text


def test_markup_in_names_is_text() -> None:
    assert "[red]x[/red]" in printed(comparison([tensor([ALL], layer="[red]x[/red]")]), verbose=True)


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


@pytest.mark.parametrize("width", [30, 40, 80, 120, 140, 170, 220])
@pytest.mark.parametrize("model", ["chip", MODEL])
def test_no_cell_and_no_name_is_cut_at_any_width(width: int, model: str) -> None:
    """Stages are abbreviated, and the legend says how, or have a line each; every device has its cells."""
    workers = (worker("cpu", "x86-64", model=model), *(worker(f"cuda:{i}", model=model) for i in range(3)))
    tensors = [tensor([ALL], stage=stage, ratio=0.123, statuses=dict.fromkeys(ALL, "within")) for stage in SPECS]
    text = printed(comparison(tensors, workers=workers), width=width)
    lines = text.splitlines()
    assert "…" not in text
    assert all(len(line) <= width for line in lines)
    assert set(SPECS) <= set(text.split())
    assert {"cpu (reference)", "cuda:0", "cuda:1", "cuda:2"} <= {
        name for line in lines for name in re.split(r"[,\s]{2,}|, ", line.strip())
    }
    assert text.count("≤ 0.12") == 2 * len(SPECS)
    in_a_row = [line for line in lines if line.count("≤ 0.12") == len(SPECS)]
    assert len(in_a_row) == (2 if width >= 170 else 0)
    assert ("fwd forward" in text) == (width == 170), "there is room for whole names at 220"


def test_more_names_than_fit_are_listed_above_their_row() -> None:
    names = [f"host-{i:02}.cluster.example:cuda:0" for i in range(20)]
    found = comparison([tensor([names])], workers=tuple(map(worker, names)), reference=names[3])
    ampere = ArchitectureGroup(name="Ampere sm_86", workers=tuple(names))
    found = msgspec.structs.replace(found, architectures=(ampere,))
    text = printed(found, width=80)
    assert all(name in text for name in names)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "these 20" in text


def test_names_of_tensors_are_never_broken() -> None:
    layer = f"model.{'a_long_name.' * 8}q_proj"
    wrong = tensor([["cpu"], ["cuda:0"]], layer=layer, statuses={"cuda:0": "outside"})
    finding = Finding(kind="zeros", severity="error", message=f"zeros in {layer}.lora_B", detail=(f"{layer}.lora_B",))
    for width in (80, 120):
        lines = printed(comparison([wrong], verdict="inconsistent", findings=(finding,)), width=width).splitlines()
        assert sum(layer in line for line in lines) == 6
        assert all(len(line) <= width or layer in line for line in lines)


def test_a_failing_run_ends_with_the_verdict_and_the_first_findings() -> None:
    findings = tuple(
        Finding(kind="zeros", severity="error", message=f"message {i}", next=f"command {i}") for i in range(5)
    )
    found = comparison([tensor([ALL])], verdict="inconsistent", findings=findings)
    lines = [line.strip() for line in printed(found, folder="run-1").splitlines()]
    end = lines[max(i for i, line in enumerate(lines) if line.startswith("INCONSISTENT")) :]
    assert [line for line in end if line] == [
        "INCONSISTENT   message 0 (and 4 other findings)",
        "1  message 0", "next: command 0", "2  message 1", "next: command 1", "3  message 2", "next: command 2",
        "and 2 more findings; details above, and in run-1/report.md and report.html",
        "what this means, what causes it, and what to do: consistency explain zeros",
    ]  # fmt: skip
    assert printed(comparison([tensor([ALL])])).count("CONSISTENT") == 1


def test_every_mark_of_the_table_is_in_its_legend() -> None:
    statuses: tuple[Status, ...] = ("equal", "within", "outside", "blocked", "skipped")
    tensors = [
        tensor([ALL], stage=stage, ratio=0.5, statuses=dict.fromkeys(ALL, status))
        for stage, status in zip(("base", "merged", "adapter", "forward", "memory"), statuses, strict=True)
    ]
    finding = Finding(kind="zeros", severity="error", message="zeros")
    lines = printed(comparison(tensors, verdict="inconsistent", findings=(finding,))).splitlines()
    row = next(line for line in lines if "(reference)" in line)
    start = next(i for i, line in enumerate(lines) if "= bitwise equal" in line)
    legend = " ".join(lines[start : start + 3])
    marks = {mark for mark in row.split() if len(mark) == 1 and not mark.isdigit()}
    assert marks == set("=≤✗!–")
    assert all(f"{mark} " in legend for mark in marks)


def test_where_workers_diverge_first() -> None:
    """The first mismatch, and the first difference in bits within tolerance before it."""

    def first(name: str, stage: str, status: Status) -> Divergence:
        return Divergence(workers=(name,), load_path="isolated", stage=stage, layer="l", tensor="w", status=status)

    bits = [msgspec.structs.replace(first("cuda:0", "operators", "within"), workers=("cuda:0", "cuda:1"))]
    found = comparison(
        [tensor([ALL])],
        first_bitwise_difference=(*bits, first("cuda:2", "base", "outside")),
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


@pytest.mark.parametrize("width", [80, None])
def test_a_command_to_type_is_one_line_at_any_width(width: int | None) -> None:
    command = "consistency run --base ./a-model --adapter ./an-adapter --stages merged --devices cpu,cuda:1 --repeat 2"
    (finding, note) = faulty().findings
    found = msgspec.structs.replace(faulty(), findings=(msgspec.structs.replace(finding, next=command), note))
    lines = printed(found, width=width).splitlines()
    assert lines.count(f"     next: {command}") == 2, "with the finding, and at the end"
    lines = printed(found, width=width, folder="a folder").splitlines()
    assert f"     again: {command}" in lines
    assert lines.count("     next: consistency reproduce 'a folder' --finding 1 --out repro") == 2


def test_a_pipe_is_as_wide_as_it_is_asked_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert make_console(io.StringIO()).width == PIPE_WIDTH
    monkeypatch.setenv("COLUMNS", "90")
    assert make_console(io.StringIO()).width == 90


def test_a_kind_that_is_unknown_here_is_not_offered() -> None:
    findings = tuple(Finding(kind=kind, severity="error", message="m") for kind in ("of-a-stranger", "drift", "zeros"))
    text = printed(msgspec.structs.replace(faulty(), findings=findings))
    assert "consistency explain drift zeros\n" in text


def test_without_the_command_it_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consistency.report.document.is_there", lambda _: False)
    assert "consistency explain" not in printed(faulty())
