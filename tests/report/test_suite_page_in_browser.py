"""The page of a suite in a real Chromium: it opens from disk, unfolds, follows the scheme, and its links lead on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from consistency.comparison.suite import SuiteResult
from consistency.report.html import as_html
from tests.report.browsing import CHROMIUM, DRIVER, NO_BROWSER, accessible
from tests.report.conftest import OpenPage
from tests.report.made_comparisons import hostile
from tests.report.made_suites import case, good, many, suite, zeros
from tests.report.printed import suite_as_html

pytest.importorskip("selenium", reason="the browser's driver, selenium, is not installed")

pytestmark = pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason=NO_BROWSER)


Open = Callable[[SuiteResult], Any]


@pytest.fixture
def opened(open_page: OpenPage) -> Open:
    return lambda found: open_page(suite_as_html(found, "run"))


@pytest.mark.process
def test_what_failed_is_seen_and_the_rest_unfolds(opened: Open) -> None:
    page = opened(many())
    text = page.find_element("tag name", "body").text
    places = [text.index(part) for part in ("56 of 100 cases", "cuda:1 did not finish", "41 of 100 cases consistent")]
    assert places == sorted(places)
    assert "lora-096" not in text
    page.find_element("css selector", "#cases > details > summary").click()
    assert "lora-096" in page.find_element("id", "cases").text
    rows = page.find_elements("css selector", ".cases tbody tr")
    assert len(rows) == 100


@pytest.mark.process
def test_a_link_leads_to_the_report_of_a_case(opened: Open, tmp_path: Path) -> None:
    name = "a b#c%20?"
    found = zeros(3)
    (tmp_path / "cases" / name).mkdir(parents=True)
    (tmp_path / "cases" / name / "report.html").write_text(as_html(found))
    page = opened(suite(case(name, found), case("fine", good())))
    page.find_element("link text", name).click()
    assert page.title.startswith("INCONSISTENT · llama")


@pytest.mark.process
def test_dark_scheme(opened: Open) -> None:
    page = opened(many())
    ground = "return getComputedStyle(document.body).backgroundColor"
    assert page.execute_script(ground) == "rgb(255, 255, 255)"
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    assert page.execute_script(ground) == "rgb(18, 21, 26)"


@pytest.mark.process
def test_it_fits_a_narrow_screen(opened: Open) -> None:
    page = opened(many())
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    assert page.execute_script("return document.documentElement.scrollWidth") == 390


@pytest.mark.process
def test_hostile_names_stay_text(opened: Open) -> None:
    page = opened(suite(case("<img src=x onerror=alert(1)>", hostile())))
    assert "<img src=x onerror=alert(1)>" in page.find_element("id", "cases").text
    assert page.execute_script("return document.images.length") == 0


@pytest.mark.process
def test_a_screen_reader_finds_the_cells(opened: Open) -> None:
    page = opened(suite(case("bob", zeros(3)), case("alice", good())))
    found = accessible(page)
    names = [name for role, name in found if role == "cell"]
    assert "mismatch in 3 of 3 tensors" in names
    assert "within tolerance, worst error/tolerance 0.31" in names
    assert {"main", "banner", "contentinfo"} <= {role for role, _ in found}
