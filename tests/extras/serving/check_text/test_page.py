"""The page of `check-text`, without a browser and in a real Chromium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from consistency.cli.main import main
from consistency.extras.serving.check_text.page import bars, report_as_html
from consistency.extras.serving.check_text.report import TextReport, TextResult
from consistency.extras.serving.check_text.summary import Differences, LogprobSummary
from tests.extras.serving.check_text.made_texts import LORA, loaded, texts_of
from tests.report.browsing import CHROMIUM, DRIVER, NO_BROWSER
from tests.report.conftest import OpenPage
from tests.report.made_comparisons import HOSTILE, SAFE
from tests.report.parsed_page import Page
from tests.worker.model.made_models import case_of, on_llama

in_browser = pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason=NO_BROWSER)

FIGURES = Differences(tokens=8, mean=0, mean_abs=0.01, deviation=0.01, kl=0, largest_ratio=1, clipped=0)
SUMMARY = LogprobSummary(
    found=FIGURES,
    healthy=FIGURES,
    threshold=0.05,
    mean_threshold=0.05,
    histogram=(2, 6, 0),
    healthy_histogram=(30, 9, 1),
    edges=(0.01, 0.02),
)
RIGHT = TextResult(tokens=4, largest=4, tied=0, verdict="possible", logprobs=0.5)
WRONG = TextResult(tokens=4, largest=1, tied=1, verdict="sampled", logprobs=7.25, logprobs_of="temperature 0.7")


def report(*texts: TextResult, **of: Any) -> TextReport:
    return TextReport(dtype="bfloat16", texts=texts, summary=SUMMARY, **of)


def test_bars_are_percentages_of_the_tokens_of_each_side() -> None:
    assert [(bar.label, bar.tokens, bar.found, bar.healthy) for bar in bars(SUMMARY)] == [
        ("below 0.01", 2, 25.0, 75.0),
        ("0.01 to 0.02", 6, 75.0, 22.5),
        ("from 0.02", 0, 0.0, 2.5),
    ]


def test_it_has_what_the_command_prints_and_wrong_texts_first() -> None:
    of = report(RIGHT, WRONG)
    page = Page(report_as_html(of, name="mine", source="rollouts.jsonl"))
    assert page.text.count("INCONSISTENT") == 2, "in the title and in the page"
    for line in list(of.lines())[1:]:
        assert line.strip()[1:] in page.text
    rows = page.text.partition("remarks")[2]
    assert rows.index("temperature 0.7") < rows.index("possible")
    marked = [of for tag, of in page.elements if tag == "td" and "beyond" in (of.get("class") or "")]
    assert len(marked) == 1


def test_texts_without_log_probabilities_have_no_histogram() -> None:
    text = msgspec.structs.replace(RIGHT, logprobs=None)
    page = Page(report_as_html(TextReport(dtype="float32", texts=(text,)), name="mine", source="texts.jsonl"))
    assert "Differences of log probabilities" not in page.text
    assert "CONSISTENT" in page.text


def test_names_of_strangers_are_text() -> None:
    text = msgspec.structs.replace(WRONG, name=HOSTILE, reason=HOSTILE, adapter=HOSTILE, logprobs_of=HOSTILE)
    page = Page(report_as_html(report(text), name=HOSTILE, source=HOSTILE))
    assert {tag for tag, _ in page.elements}.isdisjoint({"img", "script"})
    assert page.text.count(SAFE) >= 5


@pytest.mark.filterwarnings("ignore")
def test_the_command_writes_it(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = on_llama(llama, LORA)
    texts = texts_of(loaded(case_of(llama, adapter)), [[5, 9, 33, 4], [7, 2, 8, 1]], tokens=6, drawn=True)
    file, page = tmp_path / "texts.jsonl", tmp_path / "page.html"
    lines = [
        msgspec.json.encode({"prompt": text.prompt, "text": text.text, "logprobs": text.logprobs}) for text in texts
    ]
    file.write_bytes(b"\n".join(lines))
    arguments = ["check-text", str(file), "--base", str(llama), "--adapter", str(adapter), "--dtype", "float32"]
    assert main([*arguments, "--quiet", "--html", str(page)]) == 0
    parsed = Page(page.read_text())
    assert "12 tokens" in parsed.text
    assert "12 tokens" in capsys.readouterr().out
    assert sum(tag == "i" and "width" in (of.get("style") or "") for tag, of in parsed.elements) > 2
    nowhere = tmp_path / "not made" / "page.html"
    assert main([*arguments, "--quiet", "--html", str(nowhere)]) == 0, "the verdict is more than a page of it"
    printed = capsys.readouterr()
    assert "12 tokens" in printed.out
    assert f"cannot write\n  where:  {nowhere}" in printed.err


@pytest.mark.process
@in_browser
def test_bars_are_as_long_as_their_percentages(open_page: OpenPage) -> None:
    opened = open_page(report_as_html(report(RIGHT, WRONG), name="mine", source="rollouts.jsonl"))
    assert opened.title.startswith("INCONSISTENT · ")
    assert opened.execute_script("return performance.getEntriesByType('resource').length") == 0
    widths = opened.execute_script(
        "return [...document.querySelectorAll('.bars .of-texts')].map(bar => bar.getBoundingClientRect().width)"
    )
    assert widths[1] == pytest.approx(3 * widths[0], rel=0.02)
    assert torch.tensor(widths).max() <= opened.execute_script("return document.documentElement.clientWidth")
