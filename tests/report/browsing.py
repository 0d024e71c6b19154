"""A real Chromium for pages that open from disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

NO_BROWSER = "no chromium and chromedriver on PATH (Debian: chromium, chromium-driver)"

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1280,900",
)  # fmt: skip


def start_browser(profile: Path) -> Any:
    """Start a browser that keeps what pages log."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))


def accessible(page: Any) -> list[tuple[str, str]]:
    """Return role and name of what a screen reader finds on a page; the browser makes that tree some time after it."""
    from selenium.webdriver.support.ui import WebDriverWait

    def found(_: Any) -> list[tuple[str, str]]:
        nodes = page.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        shown = [node for node in nodes if not node["ignored"]]
        pairs = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in shown]
        return pairs if any(role == "cell" for role, _ in pairs) else []

    tree: list[tuple[str, str]] = WebDriverWait(page, 20, poll_frequency=0.1).until(found)
    return tree
