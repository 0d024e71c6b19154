"""The page of a history, without a browser and in a real Chromium."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import jinja2
import pytest

from consistency.cli.main import main
from consistency.errors import UsageError
from consistency.extras.operations.history import page as history_page
from consistency.extras.operations.history.page import history_as_html
from tests.extras.operations.history.made_histories import history_of, month, run, worker
from tests.report.browsing import CHROMIUM, DRIVER, NO_BROWSER
from tests.report.conftest import OpenPage
from tests.report.made_comparisons import HOSTILE, SAFE
from tests.report.parsed_page import Page

in_browser = pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason=NO_BROWSER)


def reports(page: Page) -> list[str | None]:
    return [link for link in page.links() if link != "#devices"]


def made(tmp_path: Path, *runs: Any, **of: Any) -> Page:
    return Page(history_as_html(history_of(tmp_path / "history", list(runs)), 0, place=tmp_path, **of))


def test_one_row_per_device_and_one_column_per_night(tmp_path: Path) -> None:
    page = made(tmp_path, *month())
    rows = [of for tag, of in page.elements if tag == "th" and of.get("scope") == "row"]
    columns = [of for tag, of in page.elements if tag == "th" and of.get("scope") == "col"]
    assert (len(rows), len(columns)) == (10, 2 + 30)
    assert "INCONSISTENT on 2026-11-30 02:00 UTC: cuda:3: inconsistent on node-2" in page.text
    assert "60 runs · 10 devices · 2 hosts" in page.text
    titles = [of.get("title") for tag, of in page.elements if tag == "td" and of.get("title")]
    assert len(titles) == 300
    assert "2026-11-30 02:00: inconsistent, bits C, drift in merged, error/tolerance 1.50" in titles
    assert "2026-11-18 02:00: incomplete" in titles


def test_a_verdict_is_never_colour_alone(tmp_path: Path) -> None:
    lost = worker("cuda:1", bits={}, verdict="incomplete", status="lost")
    page = made(tmp_path, run(0, worker("cuda:0"), lost, worker("cuda:2", verdict="inconsistent")))
    body = page.text.partition("worst error/tolerance")[2].partition("consistent ✗ inconsistent")[0]
    assert all(sign in body for sign in ("✓A", "✗A", "!–"))


def test_runs_link_to_reports_that_are_here(tmp_path: Path) -> None:
    for name in ("run 1/report.html", "run-2/suite.html"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    places = [tmp_path / "run 1", tmp_path / "run-2", tmp_path / "gone", None]
    runs = [run(n, worker("cuda:0"), report=str(place or "")) for n, place in enumerate(places)]
    assert reports(made(tmp_path, *runs)) == ["run%201/report.html", "run-2/suite.html"]


def test_of_several_runs_in_a_night_each_device_links_to_its_own(tmp_path: Path) -> None:
    runs = []
    for host in ("node-1", "node-2"):
        (tmp_path / host).mkdir()
        (tmp_path / host / "report.html").touch()
        bad = worker("cuda:0", host, verdict="inconsistent" if host == "node-2" else "consistent")
        runs.append(run(0, bad, host=host, report=str(tmp_path / host)))
    assert reports(made(tmp_path, *runs)) == [f"node-{n}/report.html" for n in (2, 2, 1)]


def test_it_says_what_does_not_describe_hardware(tmp_path: Path) -> None:
    page = made(tmp_path, run(0, worker("npu:0", simulated=True), planted=True))
    assert "SIMULATED DEVICES" in page.text
    assert "In 1 of these runs a fault was planted on purpose: 2026-11-01 02:00." in page.text
    assert "PLANTED" not in made(tmp_path / "b", run(0, worker("cuda:0"))).text


def test_it_fetches_nothing_and_has_no_script(tmp_path: Path) -> None:
    page = made(tmp_path, *month())
    (policy,) = [of["content"] for _, of in page.elements if of.get("http-equiv") == "Content-Security-Policy"]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    assert not {tag for tag, _ in page.elements} & {"script", "link", "img", "iframe"}


def hostile(tmp_path: Path) -> Page:
    stranger = worker(HOSTILE, HOSTILE, device=HOSTILE, model=HOSTILE, drift=(HOSTILE,), case=HOSTILE)
    return made(tmp_path, run(0, stranger, host=HOSTILE, case=HOSTILE, findings=(HOSTILE,), report=HOSTILE))


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    page = hostile(tmp_path)
    assert not {tag for tag, _ in page.elements} & {"script", "img"}
    assert SAFE in page.text
    assert "49" not in page.text.replace("{{7*7}}", "").replace(str(tmp_path), "")
    assert reports(page) == []


def test_without_escaping_the_names_break_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    plain = jinja2.Environment
    monkeypatch.setattr(jinja2, "Environment", lambda **of: plain(**{**of, "autoescape": False}))
    monkeypatch.setattr(history_page, "_template", history_page._template.__wrapped__)
    assert "img" in [tag for tag, _ in hostile(tmp_path).elements]


def test_a_device_that_no_run_has(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run has this device"):
        made(tmp_path, run(0, worker("cuda:0")), device="cuda:9")


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history_of(tmp_path / "history", month())
    (tmp_path / "history" / "runs" / "0.json").write_text("{")
    target = tmp_path / "page.html"
    assert main(["history", str(tmp_path / "history"), "--html", str(target), "--last", "3", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == f"page: {target}\n"
    page = Page(target.read_text())
    assert len([of for tag, of in page.elements if tag == "th"]) == 2 + 3 + 2


@pytest.fixture
def opened(open_page: OpenPage, tmp_path: Path) -> Any:
    """Open the page of a month."""
    return open_page(history_as_html(history_of(tmp_path / "history", month()), 0, place=tmp_path))


def in_view(browser: Any, selector: str) -> list[bool]:
    """Return for each element whether it is wholly between the edges of the window, and not beneath another."""
    script = """return [...document.querySelectorAll(arguments[0])].map(element => {
        const box = element.getBoundingClientRect();
        const top = document.elementFromPoint(box.left + box.width / 2, box.top + box.height / 2);
        return box.left >= 0 && box.right <= innerWidth && (top === element || element.contains(top)); })"""
    found: list[bool] = browser.execute_script(script, selector)
    return found


@pytest.mark.process
@in_browser
def test_it_opens_from_disk_and_draws_the_trends(opened: Any) -> None:
    assert opened.title.startswith("INCONSISTENT · ")
    assert opened.execute_script("return performance.getEntriesByType('resource').length") == 0
    lines = "return [...document.querySelectorAll('tbody svg')].map(s => s.querySelector('polyline').getBBox().width)"
    assert all(width > 0 for width in opened.execute_script(lines))
    colours = """return [...new Set([...document.querySelectorAll(arguments[0])].map(
        element => getComputedStyle(element).backgroundColor))].length"""
    assert opened.execute_script(colours, "tbody b") == 3, "verdicts"
    assert opened.execute_script(colours, "tbody tr:first-child i") == 3, "classes of bits"


@pytest.mark.process
@in_browser
def test_on_a_narrow_screen_devices_and_the_latest_runs_are_in_view(opened: Any) -> None:
    size = {"width": 400, "height": 1400, "deviceScaleFactor": 1, "mobile": True}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    opened.refresh()
    assert opened.execute_script("return document.documentElement.scrollWidth") == 400
    assert all(in_view(opened, "tbody th .worker"))
    cells = in_view(opened, "tbody tr:first-child td b")
    assert cells[-9:] == [True] * 9
    assert not cells[0]
    opened.execute_script("document.querySelector('.scroll').scrollLeft = -10000")
    assert all(in_view(opened, "tbody tr:first-child .trend svg"))


@pytest.mark.process
@in_browser
def test_dark_and_print(opened: Any) -> None:
    ground = "return getComputedStyle(document.querySelector('tbody th')).backgroundColor"
    assert opened.execute_script(ground) == "rgb(255, 255, 255)"
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": dark})
    assert opened.execute_script(ground) == "rgb(18, 21, 26)"
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": dark})
    assert opened.execute_script(ground) == "rgb(255, 255, 255)"
    landscape = {"width": 1046, "height": 718, "deviceScaleFactor": 1, "mobile": False}  # A4 less its margins
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", landscape)
    assert opened.execute_script("return document.querySelector('.nights').getBoundingClientRect().right") <= 1046
    sheet = opened.execute_cdp_cmd("Page.printToPDF", {"printBackground": True, "preferCSSPageSize": True})["data"]
    assert base64.b64decode(sheet).startswith(b"%PDF")
