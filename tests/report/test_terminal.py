"""The report for people: what it shows, and that names from strangers cannot drive the terminal."""

from __future__ import annotations

import io
from typing import Any

from consistency.comparison.result import (
    Comparison,
    Finding,
)
from consistency.report.terminal import make_console, print_report, sentence
from consistency.report.text import clean
from tests.report.made_comparisons import ALL, comparison, tensor, worker


def printed(found: Comparison, **options: Any) -> str:
    file = io.StringIO()
    print_report(found, make_console(file), **options)
    return file.getvalue()


def test_verdict_and_groups() -> None:
    text = printed(comparison([tensor([ALL]), tensor([ALL], stage="merged", ratio=0.314)]), elapsed_s=41.4)
    lines = text.splitlines()
    assert lines[0] == "consistency · llama · float32 · 4 workers · 41 s"
    assert "CONSISTENT   the adapter is the same on 4 workers; what was computed stays within 0.31" in text
    assert "cuda:0  cuda:1  cuda:2" in text, "devices that agree share a line"
    assert "≤ 0.31" not in text.split("CONSISTENT")[0]


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
    found = [tensor([ALL], stage="merged", ratio=r, layer=f"l{r}") for r in (0.5, float("nan"), 0.7)]
    assert "nan" in printed(comparison(found))


def test_what_was_not_looked_at_is_said() -> None:
    text = printed(comparison([tensor([ALL])], not_looked_at=("forward",)))
    assert "not looked at (level standard): forward" in text


def test_lost_worker() -> None:
    lost = worker("cuda:1", status="lost", reason="was killed by SIGKILL")
    found = comparison(
        [tensor([["cpu"]])], verdict="incomplete", workers=(worker("cpu", "x86-64"), lost),
        findings=(Finding(kind="lost-worker", severity="error", message="cuda:1 was lost"),),
    )  # fmt: skip
    assert "INCOMPLETE   cuda:1 did not finish" in printed(found)


def test_simulated_devices_are_told_as_such() -> None:
    assert "SIMULATED" in printed(comparison([tensor([ALL])], simulated=True)).splitlines()[0]
    found = comparison([tensor([ALL])], workers=(worker("cpu"), *(worker(f"npu:{i}", simulated=True) for i in (0, 1))))
    assert sentence(found) == "the adapter is the same on 3 workers; simulated: npu:0, npu:1"
    assert "simulated" not in sentence(comparison([tensor([ALL])]))


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


def test_side_roads_that_say_nothing_new_share_a_line() -> None:
    load_paths = ("isolated", "isolated+cpu", "isolated+low-memory")
    text = printed(comparison([tensor([ALL], load_path=load_path) for load_path in load_paths], load_paths=load_paths))
    assert "roads: 2 more, all equal (isolated+cpu, isolated+low-memory)" in text
    assert text.count("Ampere sm_86") == 1, "one table, not one per side road"
    assert "road: isolated" not in text
    five = (*load_paths, "isolated+target", "isolated+transformers", "isolated+cpu+low-memory")
    text = printed(comparison([tensor([ALL], load_path=load_path) for load_path in five], load_paths=five))
    assert "roads: 5 more, all equal\n" in text


def test_a_side_road_with_something_to_say_has_a_line_of_its_own() -> None:
    load_paths = ("isolated", "isolated+cpu", "isolated+low-memory", "isolated+transformers")
    wrong = tensor([["cpu", "cuda:0"], ["cuda:1"]], load_path=load_paths[2], statuses={"cuda:1": "outside"})
    skipped = tensor([ALL], load_path=load_paths[3], statuses=dict.fromkeys(ALL, "skipped"))
    found = comparison([tensor([ALL]), tensor([ALL], load_path=load_paths[1]), wrong, skipped], load_paths=load_paths)
    text = printed(found)
    assert "roads: 1 more, equal (isolated+cpu)" in text
    assert "road isolated+low-memory: ✗ 1/1 on cuda:1" in text
    assert "road isolated+transformers: skipped" in text
    assert "adapter (isolated+low-memory)   layers.0" in text, "whose tensor it is stands beside it"


def test_default_roads_have_a_table_each() -> None:
    workers = (worker("cpu", "x86-64"), worker("cuda:0"), worker("cuda:0", load_path="shared"))
    tensors = [tensor([["cpu", "cuda:0"]]), tensor([["cpu", "cuda:0"]], load_path="shared")]
    text = printed(comparison(tensors, workers=workers, load_paths=("isolated", "shared")))
    assert "road: isolated" in text
    assert "road: shared" in text
    assert "more" not in text
