"""The page in a real Chromium: it draws, folds, filters and can be walked by keyboard, and no name becomes markup."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from consistency.case.stages import SPECS
from consistency.comparison.result import ArchitectureGroup, Comparison, Outcome, Status, TensorComparison
from consistency.numerics.real import Real
from consistency.report.html import as_html
from tests.report.browsing import CHROMIUM, DRIVER, NO_BROWSER, accessible
from tests.report.conftest import OpenPage
from tests.report.made_comparisons import (
    ALL,
    HOSTILE,
    SAFE,
    comparison,
    faulty,
    four_architectures,
    hostile,
    many_devices,
    tensor,
    worker,
)

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
    """Return the text of the open table, line by line."""
    cells = "row => [...row.cells].map(cell => cell.textContent)"
    found: list[list[str]] = run(
        browser, f"return [...document.querySelectorAll('.stage[open] .grid tbody tr')].map({cells})"
    )
    return found


def columns(browser: Any) -> list[str]:
    """Return what the columns of the open table are: architectures, and below each the devices that are in view."""
    name = "head => (head.querySelector('b') || head).textContent"
    found: list[str] = run(browser, f"return [...document.querySelectorAll('.stage[open] .grid thead th')].map({name})")
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


@pytest.mark.process
def test_it_draws_the_stage_that_is_off(opened: Open) -> None:
    page = opened(faulty())
    assert page.title == "INCONSISTENT · llama · consistency"
    assert run(page, "return [...document.querySelectorAll('.stage[open] > summary b')].map(b => b.textContent)") == [
        "adapter"
    ]
    assert columns(page) == ["layer", "Ampere sm_86", "cuda:1", "x86-64"]
    assert lines(page) == [[f"model.layers.{i}.mlp.lora_B", "✗ ≢", "✗", "="] for i in range(3)]
    assert run(page, "return performance.getEntriesByType('resource').length") == 0


@pytest.mark.process
def test_layers_of_the_model_are_open_before_operators(opened: Open) -> None:
    within: dict[str, Status] = dict.fromkeys(ALL, "within")
    stages = ("operators", "merged", "forward")
    page = opened(comparison([tensor([["cpu"], ALL[1:]], stage=s, ratio=0.5, statuses=within) for s in stages]))
    titles = "return [...document.querySelectorAll('.stage{} > summary b')].map(b => b.textContent)"
    assert run(page, titles.format("[open]")) == ["merged"]
    wrong = [tensor([ALL], stage=stage, statuses={"cuda:1": "outside"}) for stage in ("operators", "forward")]
    made = [tensor([ALL], stage="transfer", layer="cpu->cuda:0", tensor="direct"), *wrong]
    page = opened(comparison(made, verdict="inconsistent", findings=faulty().findings))
    assert run(page, titles.format("")) == ["operators", "forward", "transfer"], "what is wrong comes first"
    assert run(page, titles.format("[open]")) == ["forward"]


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


@pytest.mark.process
def test_layers_unfold(opened: Open) -> None:
    page = opened(layered())
    worst = ["model.layers.1 2 worst mlp.up.lora_B", "✗ 12.5×  ✗ 1/2  ≢ 1/2", "✗ 1/2", "="]
    equal = ["▸model.layers.0 2", "=", "=", "="]
    assert lines(page)[:2] == [[f"▸{worst[0]}", *worst[1:]], equal]
    page.find_elements("css selector", ".stage[open] .grid tbody th")[0].click()
    assert lines(page)[:4] == [
        [f"▾{worst[0]}", *worst[1:]],
        ["mlp.up.lora_A", "=", "=", "="],
        ["mlp.up.lora_B", "✗ 12.5×  ≢", "✗ 13", "="],
        equal,
    ]
    expanded = "return [...document.querySelectorAll('.grid tr.block')].map(row => row.getAttribute('aria-expanded'))"
    assert run(page, expanded) == ["true", "false", "false"]
    page.find_element("id", "worst").click()
    in_order = [line[0].split()[0].lstrip("▸▾") for line in lines(page)]
    assert in_order == ["model.layers.0", "model.layers.1", "mlp.up.lora_A", "mlp.up.lora_B", "model.layers.2"]
    page.find_element("css selector", ".stage[open] > summary").click()
    assert lines(page) == []


@pytest.mark.process
def test_a_cell_names_its_tensor_where_the_line_names_another(opened: Open) -> None:
    first, second, *_ = lines(opened(four_architectures()))
    assert first[0] == "▸model.layers.1 4 worst self_attn.k_proj.weight"
    assert [text for text in first if "✗ 6.5e-05 / 2e-05" in text and "o_proj" not in text]
    assert [text for text in first if "0.17×" in text] == [
        "≤ 3.4e-06 / 2e-05 0.17×  12 ULP  ≡  self_attn.o_proj.weight"
    ] * 3
    assert "o_proj" in second[0]
    assert not any("_proj" in text for text in second[1:])


@pytest.mark.process
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


@pytest.mark.process
def test_colour_by_class_shows_letters(opened: Open) -> None:
    page = opened(faulty())
    page.find_element("css selector", "input[value=class]").click()
    assert lines(page)[0] == ["model.layers.0.mlp.lora_B", "∗", "B", "A"]
    assert "further classes" in page.find_element("id", "key").text


@pytest.mark.process
def test_keyboard_walks_the_map_and_numbers_are_told(opened: Open) -> None:
    from selenium.webdriver.common.keys import Keys

    page = opened(layered())
    run(page, "document.querySelector('.stage[open] .unfold').focus()")
    assert press(page, Keys.TAB).startswith("model.layers.1 on Ampere sm_86 (3 workers), ✗ outside")
    stops = "return document.querySelectorAll('.grid [tabindex=\"0\"]').length"
    assert run(page, stops) == 1
    told = press(page, Keys.ARROW_DOWN, Keys.ARROW_UP, Keys.ARROW_RIGHT)
    assert told.startswith("model.layers.1 on cuda:1, ✗ outside: zeros, 12.5× tolerance")
    tip = page.find_element("id", "tip")
    assert tip.text.splitlines()[:3] == ["model.layers.1 on cuda:1", "✗ outside: zeros", "12.5× tolerance"]
    assert "mismatch in 1 of 2 tensors" in tip.text
    assert press(page, Keys.HOME) == "▸model.layers.1 2 worst mlp.up.lora_B"
    assert press(page, Keys.ENTER) == "▾model.layers.1 2 worst mlp.up.lora_B"
    assert "mlp.up.lora_A" in press(page, Keys.ARROW_DOWN)
    assert press(page, Keys.END).startswith("model.layers.1.mlp.up.lora_A on x86-64")
    assert run(page, stops) == 1
    press(page, Keys.ESCAPE)
    assert not tip.is_displayed()


@pytest.mark.process
def test_pointing_shows_numbers(opened: Open) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    page = opened(faulty())
    cell = page.find_elements("css selector", ".stage[open] .grid td")[1]
    ActionChains(page, duration=0).move_to_element(cell).perform()
    assert page.find_element("id", "tip").text.splitlines()[:2] == [
        "model.layers.0.mlp.lora_B on cuda:1",
        "✗ outside: zeros",
    ]


@pytest.mark.process
def test_numbers_are_exact_and_of_the_right_limit(opened: Open) -> None:
    rows: dict[str, tuple[Status, float, int]] = {
        "cpu": ("within", 0.25, 16_384),
        "cuda:0": ("outside", 1.5e6, 16_777_215),
        "cuda:1": ("outside", float("nan"), 1),
    }
    made = TensorComparison(
        stage="merged", load_path="isolated", layer="l", tensor="w", shape=(4096, 4096), dtype="bfloat16", rule="user",
        classes=(("cpu",), ("cuda:0",), ("cuda:1",)),
        outcomes=tuple(
            Outcome(
                workers=(name,), reference="float64", status=status, ratio=Real(ratio), mismatched=mismatched,
                max_abs=Real(1.23456e-7), max_ulp=123_456_789,
            )
            for name, (status, ratio, mismatched) in rows.items()
        ),
    )  # fmt: skip
    page = opened(comparison([made], verdict="inconsistent", findings=faulty().findings))
    told = run(page, "return [...document.querySelectorAll('.grid td')].map(cell => cell.dataset.told.split('\\n'))")
    by_name = {of[0].removeprefix("l.w on "): of[1:] for of in told}
    assert by_name["x86-64"] == [
        "≤ within", "largest |difference| / allowed by the user, ratio, ULP:", "≤ 1.2e-07  0.25  123456789 ULP",
        "16,384 elements differ bitwise on the worst device",
    ]  # fmt: skip
    assert by_name["Ampere sm_86 (2 workers)"][2:] == [
        "✗ 1.2e-07  nan  123456789 ULP", "1 element differs bitwise on the worst device",
        "≢ its devices differ: {cuda:0} {cuda:1}",
    ]  # fmt: skip
    assert by_name["cuda:0"] == [
        "✗ outside", "1,500,000× user tolerance", "16,777,215 elements differ bitwise", "largest difference 1.23e-7",
        "123,456,789 ULP at most", "class of agreement B",
    ]  # fmt: skip
    assert by_name["cuda:1"][1] == "nan× user tolerance"
    assert lines(page)[0][1:4] == ["✗ 1.2e-07 nan×  123456789 ULP  ≢", "✗ 1.5e6", "✗ nan"]


@pytest.mark.process
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


@pytest.mark.process
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


@pytest.mark.process
def test_it_prints_light_without_what_needs_a_screen(opened: Open) -> None:
    page = opened(faulty())
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": dark})
    assert not page.find_element("id", "controls").is_displayed()
    assert run(page, "return getComputedStyle(document.body).color") == "rgb(27, 32, 39)"
    assert page.find_element("css selector", ".grid").is_displayed()
    sheet = base64.b64decode(page.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"])
    assert sheet.startswith(b"%PDF")


@pytest.mark.process
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


@pytest.mark.process
def test_on_a_narrow_screen_nothing_is_cut(opened: Open) -> None:
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    page = opened(comparison([]))
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        made = four_architectures()
        stages = [msgspec.structs.replace(made.tensors[0], stage=stage) for stage in SPECS]
        made = msgspec.structs.replace(made, tensors=(*made.tensors, *stages))
        assert run(opened(made), "return document.documentElement.scrollWidth") == 390
        parts = "[...document.querySelectorAll('#groups .scroll, .window, .grid th, .grid td')]"
        wider = f"return {parts}.filter(part => part.scrollWidth > part.clientWidth + 1).length"
        assert run(page, wider) == 0
        label = "return getComputedStyle(document.querySelector('.grid td'), '::before').content"
        assert run(page, label) == '"Hopper sm_90"', "each cell names its column"
        assert run(page, "document.querySelector('.grid').classList.remove('stacked');" + wider) > 0
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.process
def test_one_wrong_device_of_many_is_in_view(opened: Open) -> None:
    page = opened(many_devices())
    assert columns(page) == ["layer", "Ampere sm_86", "Ampere sm_86:17", "Hopper sm_90", "Volta sm_70"]
    assert run(page, "return getComputedStyle(document.querySelector('.grid td')).display") == "table-cell"
    assert lines(page)[0][:3] == [
        "▸model.layers.11 4 worst self_attn.k_proj.weight", "✗ 6.5e-05 / 2e-05 3.25×  12 ULP  ✗ 1/4  ≢ 1/4", "✗ 1/4"
    ]  # fmt: skip
    page.find_elements("css selector", ".unfold")[0].click()
    assert columns(page)[1:4] == ["Ampere sm_86", "Ampere sm_86:17", "Ampere sm_86:0"]
    assert len(columns(page)) == 1 + 3 + 30
    assert run(page, "return document.activeElement.getAttribute('aria-expanded')") == "true"
    first = "return document.querySelector('#groups tbody').textContent.replace(/\\s+/g, ' ')"
    assert run(page, first).startswith(" Ampere sm_86 RTX A6000Ampere sm_86:17")
    worker = "return document.querySelector('#workers tbody th').textContent"
    assert run(page, worker).strip() == "Ampere sm_86:17"


@pytest.mark.process
def test_print_opens_what_is_red(opened: Open) -> None:
    page = opened(layered())
    opened_now = (
        "return [document.querySelectorAll('.findings details:not([open])').length,"
        " [...document.querySelectorAll('.grid tr.part th')].map(head => head.textContent),"
        " document.querySelectorAll('.stacked').length]"
    )
    assert run(page, opened_now) == [2, [], 0]
    run(page, f"addEventListener('beforeprint', () => {{ window.printed = (() => {{ {opened_now} }})() }})")
    page.execute_cdp_cmd("Page.printToPDF", {})
    assert run(page, "return window.printed") == [0, ["mlp.up.lora_B"], 0]
    assert run(page, opened_now) == [2, [], 0], "as it was"


@pytest.mark.process
def test_more_columns_than_a_sheet_is_wide_are_printed_below_each_other(opened: Open) -> None:
    names = [f"npu:{n}" for n in range(7)]
    page = opened(
        comparison(
            [tensor([names], ratio=0.5, statuses={"npu:6": "outside"})], workers=tuple(map(worker, names)),
            architectures=tuple(ArchitectureGroup(name=name, workers=(name,)) for name in names),
        )
    )  # fmt: skip
    stacked = "return document.querySelectorAll('.stacked').length"
    assert run(page, stacked) == 0
    run(page, "dispatchEvent(new Event('beforeprint'))")
    assert run(page, stacked) == 1
    run(page, "dispatchEvent(new Event('afterprint'))")
    assert run(page, stacked) == 0


@pytest.mark.process
def test_a_finding_has_a_link_and_is_copied_as_markdown(opened: Open) -> None:
    page = opened(faulty())
    page.find_element("css selector", "#finding-1 .mark-link").click()
    assert page.current_url.endswith("#finding-1")
    note = "return document.querySelector('#finding-2').checkVisibility()"
    assert not run(page, note)
    run(page, "location.hash = 'finding-2'")
    assert until(page, lambda: run(page, note)), "a link opens what it leads to"
    origin = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    page.execute_cdp_cmd("Browser.grantPermissions", origin)
    button = page.find_element("css selector", "#finding-1 .copy")
    button.click()
    assert until(page, lambda: button.text == "Copied")
    text = run(page, "return navigator.clipboard.readText()")
    assert text.splitlines()[:5] == [
        "✗ **zeros** adapter · cuda:1 · zeros in 3 of 3 lora\\_B tensors", "", "```text", "got 0, wanted 1", "and more"
    ]  # fmt: skip


@pytest.mark.process
def test_without_a_clipboard_the_text_is_left_to_copy(opened: Open) -> None:
    page = opened(faulty())
    run(page, "navigator.clipboard.writeText = () => Promise.reject(); document.execCommand = () => false")
    button = page.find_element("css selector", "#finding-1 .copy")
    button.click()
    assert until(page, lambda: button.text == "Copy the selected text")
    assert run(page, "return document.getSelection().toString()").startswith("✗ **zeros**")


@pytest.mark.process
def test_a_screen_reader_finds_names(opened: Open) -> None:
    page = opened(layered())
    found = accessible(page)
    roles = dict(found)
    assert roles["treegrid"].startswith("adapter: layers by architecture")
    assert {"main", "banner", "contentinfo", "search", "status"} <= roles.keys()
    named = ("button", "searchbox", "checkbox", "radio", "gridcell", "rowheader", "columnheader")
    assert all(name for role, name in found if role in named)
    assert [name for role, name in found if role == "heading"][:3] == [
        "llama",
        "Findings most severe first",
        "By architecture",
    ]
