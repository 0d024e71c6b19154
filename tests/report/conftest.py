"""A browser for the tests of every page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.report.browsing import start_browser

OpenPage = Callable[[str], Any]


@pytest.fixture(scope="package")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("selenium", reason="the browser's driver, selenium, is not installed")
    driver = start_browser(tmp_path_factory.mktemp("chromium"))
    yield driver
    driver.quit()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[OpenPage]:
    """Open a page from disk; afterwards, what it logged is a failure."""

    def visit(page: str) -> Any:
        path = tmp_path / "page.html"
        path.write_text(page)
        browser.get(path.as_uri())
        return browser

    browser.get_log("browser")  # what an earlier page left
    yield visit
    assert browser.get_log("browser") == []
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
