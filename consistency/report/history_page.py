"""A history as a page: one file that opens from disk, has no script, and links to the reports that are on this host.

Names may come from strangers, as in `report.html`: the template escapes every value, and a content security policy
allows no script and no request.
"""

from __future__ import annotations

import functools
import os
import urllib.parse
from pathlib import Path

import jinja2
from markupsafe import Markup

from consistency.capture.version import __version__
from consistency.capture.wording import counted, some
from consistency.comparison.history.changes import changes
from consistency.comparison.history.records import RunRecord
from consistency.comparison.history.store import History
from consistency.errors import UsageError
from consistency.report.history_changes import ChangeRow
from consistency.report.history_classes import class_lines
from consistency.report.history_table import Night, Trend, nights
from consistency.report.marks import VERDICT_MARKS
from consistency.report.page.rendering import page_environment, part

_PAGES = ("report.html", "suite.html")
_MOST_FINDINGS = 5  # of a run; its report has all
_MOST_CHANGES = 50  # the latest; `consistency history --changes` prints all
_CLASSES = 7  # colours of the style sheet


def history_as_html(
    history: History, last: int, *, place: Path, device: str | None = None, case: str | None = None
) -> str:
    """Return the page of the last runs; links to reports are relative to `place`, the page's own folder.

    Raises
    ------
    UsageError
        No run has this device or this case.
    """
    found = nights(history.runs(), last)
    runs = [run for night in found for run in night.runs]
    classes = class_lines(found, device, case)
    if not classes.lines and (device or case):
        devices = sorted(set().union(*(run.workers.devices for run in runs)))
        got = ", ".join(name for name in (device, case) if name)
        raise UsageError("no run has this device or this case", got=got, wanted=f"one of the devices {some(devices)}")
    since = [] if device or case else changes(runs)
    return _template().render(
        damage=history.damage,
        changes=[ChangeRow.of(change) for change in since[:_MOST_CHANGES]],
        changes_left_out=len(since[_MOST_CHANGES:]),
        devices=classes.lines,
        facts=_facts(found, runs, classes.devices),
        left_out=classes.left_out,
        failed=[run for run in reversed(runs) if run.findings],
        marks=VERDICT_MARKS,
        most_findings=_MOST_FINDINGS,
        name=history.url,
        nights=found,
        place=place,
        planted=[run.at[:16].replace("T", " ") for run in runs if run.planted],
        simulated=any(run.workers.is_simulated for run in runs),
        style=Markup(part("style.css") + part("history.css")),
        tool=__version__,
        trend=Trend,
        verdict=found[-1].verdict if found else None,
    )


@functools.cache
def _template() -> jinja2.Template:
    """Return the page's template, compiled once per process."""
    environment = page_environment()
    environment.filters.update(link=_link, night_link=_night_link)
    environment.filters["colour"] = lambda group: "none" if group is None else group % _CLASSES
    return environment.from_string(part("history.html"))


def _facts(found: list[Night], runs: list[RunRecord], devices: int) -> list[str]:
    hosts = {host or run.host for run in runs for host in run.workers.hosts}
    facts = [counted(len(runs), "run"), counted(devices, "device"), counted(len(hosts), "host")]
    return [*facts, f"{found[0].began} to {found[-1].began} UTC"] if found else facts


def _night_link(night: Night, place: Path) -> str | None:
    """Return the link of a run with the worst verdict, if one of them has its report here."""
    links = (_link(run, place) for run in night.runs if run.verdict == night.verdict)
    return next((link for link in links if link is not None), None)


def _link(run: RunRecord, place: Path) -> str | None:
    """Return the link to a run's report, where it is on this host."""
    page = next((Path(run.report, name) for name in _PAGES if run.report and Path(run.report, name).is_file()), None)
    return None if page is None else urllib.parse.quote(os.path.relpath(page, place.resolve()))
