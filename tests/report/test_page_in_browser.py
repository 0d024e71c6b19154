"""The page in a real Chromium: it draws, folds, filters and can be walked by keyboard, and no name becomes markup."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from consistency.comparison.result import Comparison, Row, Status, TensorComparison
from consistency.numerics.real import Real
from consistency.report.html import as_html
from tests.report.browsing import CHROMIUM, DRIVER, NO_BROWSER
from tests.report.conftest import OpenPage
from tests.report.made_comparisons import ALL, HOSTILE, SAFE, comparison, faulty, hostile, tensor

pytest.importorskip("selenium", reason="the browser's driver, selenium, is not installed")

pytestmark = pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason=NO_BROWSER)


Open = Callable[[Comparison], Any]


@pytest.fixture
def opened(open_page: OpenPage) -> Open:
    return lambda found: open_page(as_html(found))


def layered() -> Comparison:
    """Return three decoder layers with two tensors each, one of them wrong on a worker."""
    return comparison(
        [
            tensor([ALL], layer=f"model.layers.{i}.mlp.up", tensor="lora_A")
            if name == "lora_A" or i != 1
            else tensor(
                [["cpu", "cuda:0", "cuda:2"], ["cuda:1"]], layer=f"model.layers.{i}.mlp.up", ratio=12.5,
                statuses={"cuda:1": "outside"},
            )
            for i in range(3)
            for name in ("lora_A", "lora_B")
        ],
        verdict="inconsistent",
        findings=faulty().findings,
    )  # fmt: skip


def run(browser: Any, script: str, *arguments: object) -> Any:
    return browser.execute_script(script, *arguments)


def press(browser: Any, *keys: str) -> str:
    """Press keys where the focus is; return what a screen reader then reads."""
    from selenium.webdriver.common.action_chains import ActionChains

    for key in keys:
        ActionChains(browser, duration=0).send_keys(key).perform()
    label = "return document.activeElement.getAttribute('aria-label') || document.activeElement.textContent"
    return str(run(browser, label))


def lines(browser: Any) -> list[list[str]]:
    """Return the text of the open heat map, line by line."""
    cells = "row => [...row.cells].map(cell => cell.textContent)"
    found: list[list[str]] = run(
        browser, f"return [...document.querySelectorAll('.stage[open] .grid tbody tr')].map({cells})"
    )
    return found


def until(browser: Any, condition: Callable[[], Any]) -> Any:
    """Wait until a condition is true; return what it gave."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 20, poll_frequency=0.05).until(lambda _: condition())


def type_filter(browser: Any, text: str) -> str:
    """Type into the filter; return what it says it found."""
    before = run(browser, "return document.getElementById('count').textContent")
    host_facts = browser.find_element("id", "filter")
    host_facts.clear()
    host_facts.send_keys(text)
    say = "return document.getElementById('count').textContent"
    return str(until(browser, lambda: run(browser, say) != before and run(browser, say)))


def test_it_draws_the_stage_that_is_off(opened: Open) -> None:
    page = opened(faulty())
    assert page.title == "INCONSISTENT · llama · consistency"
    assert run(page, "return [...document.querySelectorAll('.stage[open] > summary b')].map(b => b.textContent)") == [
        "adapter"
    ]
    assert lines(page) == [[f"model.layers.{i}.mlp.lora_B", "=", "=", "✗", "="] for i in range(3)]
    assert run(page, "return performance.getEntriesByType('resource').length") == 0


def test_an_error_on_the_console_is_seen(browser: Any, tmp_path: Path) -> None:
    """What the other tests rest on: with a broken script the log is not empty."""
    raw = as_html(faulty()).replace('id="sections"', 'id="elsewhere"')
    (tmp_path / "broken.html").write_text(raw)
    browser.get((tmp_path / "broken.html").as_uri())
    assert any(entry["level"] == "SEVERE" for entry in browser.get_log("browser"))


def test_a_changed_script_does_not_run(browser: Any, tmp_path: Path) -> None:
    """The content security policy lets nothing run but the page's own script."""
    raw = as_html(faulty()).replace("</body>", "<script>document.title = 'gone'</script></body>")
    (tmp_path / "changed.html").write_text(raw)
    browser.get((tmp_path / "changed.html").as_uri())
    assert browser.title.startswith("INCONSISTENT")
    assert any("Content Security Policy" in entry["message"] for entry in browser.get_log("browser"))


def test_layers_unfold(opened: Open) -> None:
    page = opened(layered())
    folded = [["▸model.layers.0 2", *"===="], ["▸model.layers.1 2", "=", "=", "✗ 1/2", "="]]
    assert lines(page)[:2] == folded
    page.find_elements("css selector", ".stage[open] .grid tbody th")[1].click()
    assert lines(page)[1:4] == [
        ["▾model.layers.1 2", "=", "=", "✗ 1/2", "="],
        ["mlp.up.lora_A", "=", "=", "=", "="],
        ["mlp.up.lora_B", "=", "=", "✗ 13", "="],
    ]
    expanded = "return [...document.querySelectorAll('.grid tr.block')].map(row => row.getAttribute('aria-expanded'))"
    assert run(page, expanded) == ["false", "true", "false"]
    page.find_element("css selector", ".stage[open] > summary").click()
    assert lines(page) == []


def test_filters(opened: Open) -> None:
    page = opened(layered())
    assert type_filter(page, "LAYERS.1 outside") == "1 of 6 tensors match"
    assert [line[0] for line in lines(page)] == ["model.layers.1.mlp.up.lora_B"]
    assert type_filter(page, "nowhere") == "0 of 6 tensors match"
    assert lines(page) == []
    assert type_filter(page, " ") == "6 tensors"
    page.find_element("id", "unlike").click()
    assert [line[0] for line in lines(page)] == ["model.layers.1.mlp.up.lora_B"]
    page.find_element("id", "unlike").click()
    assert len(lines(page)) == 3


def test_colour_by_class_shows_letters(opened: Open) -> None:
    page = opened(faulty())
    page.find_element("css selector", "input[value=class]").click()
    assert lines(page)[0] == ["model.layers.0.mlp.lora_B", "A", "A", "B", "A"]
    assert "further classes" in page.find_element("id", "key").text


def test_keyboard_walks_the_map_and_numbers_are_told(opened: Open) -> None:
    from selenium.webdriver.common.keys import Keys

    page = opened(layered())
    run(page, "document.querySelector('.stage[open] > summary').focus()")
    assert press(page, Keys.TAB).startswith("model.layers.0 on cpu, = equal")
    stops = "return document.querySelectorAll('.grid [tabindex=\"0\"]').length"
    assert run(page, stops) == 1
    told = press(page, Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert told.startswith("model.layers.1 on cuda:1, ✗ outside: zeros, 12.5× tolerance")
    tip = page.find_element("id", "tip")
    assert tip.text.splitlines()[:3] == ["model.layers.1 on cuda:1", "✗ outside: zeros", "12.5× tolerance"]
    assert "mismatch in 1 of 2 tensors" in tip.text
    assert press(page, Keys.HOME) == "▸model.layers.1 2"
    assert press(page, Keys.ENTER) == "▾model.layers.1 2"
    assert "mlp.up.lora_A" in press(page, Keys.ARROW_DOWN)
    assert press(page, Keys.END).startswith("model.layers.1.mlp.up.lora_A on cuda:2")
    assert run(page, stops) == 1
    press(page, Keys.ESCAPE)
    assert not tip.is_displayed()


def test_pointing_shows_numbers(opened: Open) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    page = opened(faulty())
    cell = page.find_elements("css selector", ".stage[open] .grid td")[2]
    ActionChains(page, duration=0).move_to_element(cell).perform()
    assert page.find_element("id", "tip").text.splitlines()[:2] == [
        "model.layers.0.mlp.lora_B on cuda:1",
        "✗ outside: zeros",
    ]


def test_numbers_are_exact_and_of_the_right_limit(opened: Open) -> None:
    rows: dict[str, tuple[Status, float, int]] = {
        "cpu": ("within", 0.25, 16_384),
        "cuda:0": ("outside", 1.5e6, 16_777_215),
        "cuda:1": ("outside", float("nan"), 1),
    }
    made = TensorComparison(
        stage="merged", load_path="isolated", layer="l", tensor="w", shape=(4096, 4096), dtype="bfloat16", rule="user",
        classes=(("cpu",), ("cuda:0",), ("cuda:1",)),
        rows=tuple(
            Row(
                worker=name, reference="float64", status=status, bound_ratio=Real(ratio), mismatched=mismatched,
                max_abs=Real(1.23456e-7), max_ulp=123_456_789,
            )
            for name, (status, ratio, mismatched) in rows.items()
        ),
    )  # fmt: skip
    page = opened(comparison([made], verdict="inconsistent", findings=faulty().findings))
    told = run(page, "return [...document.querySelectorAll('.grid td')].map(cell => cell.dataset.told.split('\\n'))")
    assert told[0] == [
        "l.w on cpu", "≤ within", "0.25× user tolerance", "16,384 elements differ bitwise",
        "largest difference 1.23e-7", "123,456,789 ULP at most", "class of agreement A",
    ]  # fmt: skip
    assert told[1][2:4] == ["1,500,000× user tolerance", "16,777,215 elements differ bitwise"]
    assert told[2][2] == "nan× user tolerance"
    assert lines(page)[0][1:4] == ["≤ .25", "✗ 1.5e6", "✗ nan"]


def test_hostile_names_stay_text(opened: Open) -> None:
    page = opened(hostile())
    assert run(page, "return [document.images.length, document.scripts.length]") == [0, 2]
    for host_facts in page.find_elements("css selector", ".stage:not([open]) > summary"):
        host_facts.click()
    names = "return [...document.querySelectorAll('.grid tbody th')].map(cell => cell.textContent)"
    heads = until(page, lambda: len(run(page, names)) == 2 and run(page, names))  # it is drawn when it has opened
    assert heads == [f"{SAFE}.{SAFE}"] * 2
    assert SAFE in run(page, "return document.querySelector('.grid thead').textContent")
    assert SAFE in run(page, "return document.querySelector('.grid td').getAttribute('aria-label')")
    assert type_filter(page, f"{HOSTILE[:20]} nowhere") == "0 of 2 tensors match"
    assert run(page, "return document.images.length") == 0


def test_dark_scheme_and_the_switch(opened: Open) -> None:
    page = opened(faulty())
    ground = "return getComputedStyle(document.body).backgroundColor"
    assert run(page, ground) == "rgb(255, 255, 255)"
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    assert run(page, ground) == "rgb(18, 21, 26)"
    button = page.find_element("id", "scheme")
    button.click()
    assert (run(page, ground), button.text) == ("rgb(255, 255, 255)", "Scheme: light")
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    button.click()
    assert run(page, ground) == "rgb(18, 21, 26)"


def test_it_prints_light_without_what_needs_a_screen(opened: Open) -> None:
    page = opened(faulty())
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": dark})
    assert not page.find_element("id", "controls").is_displayed()
    assert run(page, "return getComputedStyle(document.body).color") == "rgb(27, 32, 39)"
    assert page.find_element("css selector", ".grid").is_displayed()
    sheet = base64.b64decode(page.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"])
    assert sheet.startswith(b"%PDF")


def test_without_a_script_the_first_screen_is_there(opened: Open) -> None:
    page = opened(comparison([]))
    page.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        text = opened(faulty()).find_element("tag name", "body").text
    finally:
        page.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    for part in ("INCONSISTENT", "Ampere sm_86", "zeros in 3 of 3 lora_B tensors", "which does not run here"):
        assert part in text
    assert "Filter" not in text
    assert "Scheme" not in text


def test_it_fits_a_narrow_screen(opened: Open) -> None:
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    page = opened(comparison([]))
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        assert run(opened(layered()), "return document.documentElement.scrollWidth") == 390
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_screen_reader_finds_names(opened: Open) -> None:
    page = opened(layered())
    found = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in page.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        if not node["ignored"]
    ]
    roles = dict(found)
    assert roles["treegrid"].startswith("adapter: layers and devices")
    assert {"main", "banner", "contentinfo", "search", "status"} <= roles.keys()
    named = ("button", "searchbox", "checkbox", "radio", "gridcell", "rowheader", "columnheader")
    assert all(name for role, name in found if role in named)
    assert [name for role, name in found if role == "heading"][:3] == [
        "llama",
        "By architecture",
        "Findings most severe first",
    ]
