"""The report for an issue tracker: short, and nothing in it but text."""

from __future__ import annotations

import html
import re

import msgspec
import pytest
from markdown_it import MarkdownIt

from consistency.comparison.result import Divergence, Finding
from consistency.report.formats import View
from consistency.report.markdown import MOST_LINES, as_markdown, escaped
from tests.conftest import FinishedRun
from tests.report.made_comparisons import (
    ALL,
    HOSTILE,
    comparison,
    computed_apart,
    faulty,
    four_architectures,
    hostile,
    tensor,
    worker,
)
from tests.report.printed import visible

NASTY = (
    "a | b", "*x* _y_ ~~z~~ `c`", "[text](https://e.xample)", "<b>x</b>", "https://e.xample/x", "www.e.xample", "&amp;",
    "![i](x)", "a\\|b\\", "$x^2$", "# title", "- item", "1. item", "```\nout", "[[wiki]]", "<!-- x", "| x |\n|---|",
    "> quote", "a: ==b==", HOSTILE,
)  # fmt: skip


def test_a_finding_says_by_how_much_against_what_and_what_to_type() -> None:
    found = four_architectures()
    (finding,) = found.findings
    names = tuple(tensor.name for tensor in found.tensors)
    found = msgspec.structs.replace(found, findings=(msgspec.structs.replace(finding, tensors=names),))
    text = as_markdown(found, View(folder="my run"))
    assert (
        "against float64 on the CPU in 1 layer; "
        "worst model.layers.1.self\\_attn.k\\_proj.weight\\[1, 2\\]: off by 6.5e-05, allowed 2e-05\\\n"
        "   Next: `consistency reproduce 'my run' --finding 1 --out repro`\n"
    ) in text
    assert "consistency reproduce" not in as_markdown(found), "without a folder there are no captures"
    elsewhere = msgspec.structs.replace(found, captures=("/elsewhere",))
    assert "consistency reproduce" not in as_markdown(elsewhere, View(folder="my run"))


def rendered(text: str) -> str:
    return str(MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(text))


@pytest.mark.parametrize("text", NASTY)
def test_escaped_text_is_shown_as_it_is(text: str) -> None:
    out = rendered(escaped(text)).strip()
    assert out.startswith("<p>")
    assert not re.search(r"<(?!/?p>)", out)
    shown = html.unescape(out.removeprefix("<p>").removesuffix("</p>"))
    assert shown.replace("\u2060", "") == text.replace("\n", "\\x0a").replace("\u2028", "\\x2028").replace(
        "\u202e", "\\x202e"
    )


def test_nobody_is_called_and_nothing_linked() -> None:
    assert escaped("thanks @someone, see #12 and org/repo#3") == ("thanks @\u2060someone, see #\u206012 and org/repo#3")
    assert escaped("cpu@baseline") == "cpu@baseline"
    assert "://" not in escaped("https://e.xample")
    assert "www." not in escaped("www.e.xample")


@pytest.mark.parametrize("make", [faulty, hostile, lambda: computed_apart(50, 200)])
def test_a_screen_is_visible(make: object) -> None:
    assert callable(make)
    assert 10 < len(visible(as_markdown(make()))) <= MOST_LINES


def test_a_screen_is_visible_and_a_tracker_takes_all_of_it_whatever_was_found() -> None:
    names = [f"cuda:{n}" for n in range(40)]
    workers = tuple(worker(name, environment={"torch": name}, driver=name) for name in names)
    tensors = [
        tensor([[one for one in names if one != name], [name]], layer=f"{'l' * 900}{name}", statuses={name: "outside"})
        for name in names
    ]
    findings = tuple(
        Finding(kind="zeros", severity="error", message=f"m{n}" * 500, detail=("d" * 900, "e"), next="n" * 900)
        for n in range(50)
    )
    parts = tuple(
        Divergence(workers=(name,), load_path="isolated", stage="adapter", layer=name, tensor="w", status="outside")
        for name in names
    )
    text = as_markdown(
        comparison(
            tensors, verdict="inconsistent", workers=workers, findings=findings, simulated=True, first_divergence=parts
        )
    )
    assert len(visible(text)) <= MOST_LINES
    assert max(map(len, visible(text))) < 2000
    assert 20_000 < len(text) < 60_000  # GitHub takes no issue of more than 65,536
    assert re.search("\nand [0-9]+ more lines: report.json has them all\n", text)


def test_environment_as_trackers_ask_for_it() -> None:
    workers = (
        worker("cpu", "x86-64", environment={"torch": "2.8", "python": "3.11.7", "cuda": None, "numpy": "2.4"}),
        worker("cuda:0", environment={"torch": "2.9", "python": "3.11.7", "cuda": "13.0"}, driver="580.1"),
    )
    text = as_markdown(comparison([tensor([["cpu", "cuda:0"]])], workers=workers))
    for line in (
        "PyTorch version: 2.8 (cpu); 2.9 (cuda:0)", "Python version: 3.11.7", "Nvidia driver version: 580.1",
        "cuda:0: RTX A6000 (Ampere sm_86)", "[pip3] numpy==2.4 (cpu); N/A (cuda:0)",
    ):  # fmt: skip
        assert line in text.splitlines()


def test_hostile_names_stay_text() -> None:
    found = hostile()
    finding = Finding(kind="x", severity="error", message="m", detail=("````\n</details><img src=x>",))
    for made in (found, comparison([tensor([ALL])], findings=(finding,))):
        out = rendered(as_markdown(made))
        assert not re.search(r"<(img|script|a|h\d)\b", out)
        assert out.count("<details>") == out.count("</details>") > 0
        assert "\u202e" not in out


def test_a_run_leaves_it(finished_run: FinishedRun) -> None:
    text = (finished_run.folder / "report.md").read_text()
    lines = text.splitlines()
    assert lines[0].startswith("**CONSISTENT**")
    assert len(visible(text)) <= MOST_LINES
    assert any(line.startswith("PyTorch version: 2.") for line in lines)
