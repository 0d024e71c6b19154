"""The result of `check-text` as a page: one file that opens from disk, without script or network. No torch here.

Names, reasons and tokens may come from strangers: the template escapes every value, and a content security policy
allows no script and no request.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import jinja2
from markupsafe import Markup

from consistency.capture.version import __version__
from consistency.capture.wording import counted
from consistency.extras.serving.check_text.report import TextReport, TextResult
from consistency.extras.serving.check_text.summary import LogprobSummary
from consistency.report.marks import VERDICT_MARKS
from consistency.report.page.rendering import page_environment, part

_MOST_TEXTS = 200
"""Texts in the table, the wrong ones first: `--json` has all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramBar:
    """Tokens whose log probability is off by a magnitude of one range.

    Attributes
    ----------
    label : str
        The range: `0.01 to 0.02`.
    found, healthy : float
        Percentages of the tokens of these texts, and of two healthy passes.
    tokens : int
        Tokens of these texts.
    """

    label: str
    found: float
    healthy: float
    tokens: int


def report_as_html(report: TextReport, *, name: str, source: str) -> str:
    """Return the page of a report.

    Parameters
    ----------
    name : str
        Name of the case.
    source : str
        Where the texts are from, such as the name of their file.
    """
    heading, *lines = report.lines()
    texts = sorted(enumerate(report.texts, 1), key=lambda numbered: _order(numbered[1]))
    return _template().render(
        bars=[] if report.summary is None else list(bars(report.summary)),
        facts=[source, report.dtype, counted(len(report.texts), "text")],
        has_adapters=any(result.adapter for result in report.texts),
        has_trainer=any(result.trainer_logprobs is not None for result in report.texts),
        left_out=len(texts[_MOST_TEXTS:]),
        lines=[line.strip() for line in lines],
        mark=VERDICT_MARKS[report.verdict],
        name=name,
        sentence=heading.partition("   ")[2],
        style=Markup(part("style.css") + part("page.css", __package__)),
        texts=texts[:_MOST_TEXTS],
        tool=__version__,
        verdict=report.verdict,
    )


def bars(summary: LogprobSummary) -> Iterator[HistogramBar]:
    """Yield the bars of the histogram of differences, the smallest magnitudes first."""
    edges = summary.edges
    labels = [f"below {edges[0]:.2g}"] if edges else ["all"]
    labels += [f"{low:.2g} to {high:.2g}" for low, high in itertools.pairwise(edges)]
    labels += [f"from {edges[-1]:.2g}"] if edges else []
    found, healthy = sum(summary.histogram), sum(summary.healthy_histogram)
    for label, tokens, of_healthy in zip(labels, summary.histogram, summary.healthy_histogram, strict=True):
        yield HistogramBar(
            label=label,
            found=100 * tokens / max(1, found),
            healthy=100 * of_healthy / max(1, healthy),
            tokens=tokens,
        )


def _order(result: TextResult) -> tuple[bool, bool, float]:
    """Return what sorts wrong texts first, then those that were not judged, then by the error of log probabilities."""
    is_wrong = result.verdict == "impossible" or result.has_other_logprobs or result.has_other_trainer_logprobs
    return not is_wrong, result.verdict != "undecided", -(result.logprobs or 0.0)


@functools.cache
def _template() -> jinja2.Template:
    """Return the page's template, compiled once per process."""
    return page_environment().from_string(part("page.html", __package__))
