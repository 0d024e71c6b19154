"""How large `report.html` gets, how long it takes to write, and how long Chromium takes to open it.

Makes comparisons up: base and adapter tensors that are equal everywhere, merged weights and activations with measures,
on workers of four architectures, three of them with zeros in every `lora_B` and what follows from it. `alike`: workers
of one architecture hold the same bits. `apart`: every tensor is computed, and no two workers agree in any, the worst
that can happen to a page.

What is printed, per size: seconds of processor time to write `report.html` and `report.md`, the page's bytes, and the
milliseconds from the start of the navigation to the end of the load event, by when the table of the first stage is
drawn: median of several loads, each in a new tab. Chromium and its driver are taken from PATH; without them, or with
`--no-browser`, the last column is left out. What writing does to the peak memory of a fleet's comparison is in
`benchmarks/scaling.py`.

    python benchmarks/page.py
"""

from __future__ import annotations

import argparse
import functools
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from consistency.comparison.result import (
    ArchitectureGroup,
    Comparison,
    Finding,
    Outcome,
    TensorComparison,
    WorkerSummary,
)
from consistency.numerics import words
from consistency.numerics.real import Real
from consistency.report.formats import View
from consistency.report.html import as_html
from consistency.report.markdown import as_markdown
from consistency.report.summary import all_rows

ARCHITECTURES = (
    ("Ampere sm_86", "RTX A6000"),
    ("Ampere sm_80", "A100-SXM4-80GB"),
    ("Ada sm_89", "L4"),
    ("Hopper sm_90", "H100 80GB HBM3"),
)
SIZES = ((200, 4, True), (2000, 64, True), (2000, 64, False), (2000, 1000, True), (2000, 1000, False))
LOADS = 5
CHROMIUM = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--size", action="append", metavar="TENSORSxDEVICES", help="these sizes only; may be repeated")
    parser.add_argument("--apart", action="store_true", help="with --size: no two workers with equal bits")
    parser.add_argument("--no-browser", action="store_true", help="do not open the pages")
    asked = parser.parse_args()
    given = [[int(number) for number in size.split("x")] for size in asked.size or ()]
    sizes = [(tensors, devices, not asked.apart) for tensors, devices in given] or SIZES
    print("tensors × devices         write s   page MB   markdown lines   load ms")
    with tempfile.TemporaryDirectory(prefix="consistency-page-") as scratch, _browser(asked.no_browser) as driver:
        for tensors, devices, alike in sizes:
            found = made_up(tensors, devices, alike=alike)
            started = time.process_time()
            view = View(rows=all_rows(found))
            page = Path(scratch) / "report.html"
            page.write_text(as_html(found, view), encoding="utf-8")
            text = as_markdown(found, view)
            seconds = time.process_time() - started
            loads = "" if driver is None else f"{load_ms(driver, page):9.0f}"
            print(
                f"{tensors:6} × {devices:<6} {'alike' if alike else 'apart'}{seconds:13.2f}"
                f"{page.stat().st_size / 1e6:10.2f}{len(text.splitlines()):17}{loads}",
                flush=True,
            )
    return 0


def made_up(tensors: int, devices: int, *, alike: bool) -> Comparison:
    """Return a comparison of this many tensors on this many workers, the first of them the reference."""
    random.seed(7)
    workers = ["cpu", *(f"cuda:{number}" for number in range(devices - 1))]
    kinds = {name: number % len(ARCHITECTURES) for number, name in enumerate(workers)}
    off = set(workers[3:40:12]) if alike else set()
    made = tuple(_tensor(number, tensors, workers, kinds, off, alike=alike) for number in range(tensors))
    bad = tuple(tensor.name for tensor in made if any(row.status == "outside" for row in tensor.outcomes))
    message = f"adapter · {', '.join(sorted(off))} · zeros where the file is not zero in {len(bad)} tensors"
    finding = Finding(kind="zeros", severity="error", message=message, workers=tuple(sorted(off)), tensors=bad)
    return Comparison(
        case="llama + my-lora",
        base="base",
        adapter="adapter",
        dtype="bfloat16",
        level="standard",
        load_paths=("isolated",),
        verdict="inconsistent" if off else "consistent",
        reference="cpu",
        workers=tuple(_worker(name, kinds[name]) for name in workers),
        architectures=tuple(
            ArchitectureGroup(name=title, workers=tuple(name for name in workers if kinds[name] == number))
            for number, (title, _) in enumerate(ARCHITECTURES)
        ),
        tensors=made,
        findings=(finding,) if off else (),
    )


def _worker(name: str, kind: int) -> WorkerSummary:
    title, model = ARCHITECTURES[kind]
    environment = {"torch": "2.13.0", "cuda": "13.0", "python": "3.11.7", "variables": {"OMP_NUM_THREADS": "4"}}
    return WorkerSummary(
        name=name, load_path="isolated", architecture=title, model=model, uuid=f"GPU-{name}", status="ok", reason=None,
        environment=environment,
    )  # fmt: skip


def _tensor(
    number: int, tensors: int, workers: list[str], kinds: dict[str, int], off: set[str], *, alike: bool
) -> TensorComparison:
    stage = ("base", "adapter", "merged", "forward")[number * 4 // tensors] if alike else "merged"
    part = {"base": "weight", "adapter": ("lora_A", "lora_B")[number % 2], "merged": "weight", "forward": "adapter_on"}
    computed = stage in ("merged", "forward")
    lost = off if computed or part[stage] == "lora_B" else set()
    classes: tuple[tuple[str, ...], ...]
    if not alike:
        classes = tuple(_alone(name) for name in workers)
    elif computed:
        classes = tuple(tuple(n for n in workers if kinds[n] == kind and n not in lost) for kind in range(4))
    else:
        classes = (tuple(name for name in workers if name not in lost),)
    if lost:
        classes += (tuple(sorted(lost)),)
    by_class = [_row(computed=computed) for _ in classes]
    rows = {}
    for template, names in zip(by_class, classes, strict=True):
        for name in names:
            rows[name] = _zeros(name) if name in lost else _named(template, name)
    return TensorComparison(
        stage=stage,
        load_path="isolated",
        layer=f"model.layers.{number // 7 % 80}.self_attn.{MODULES[number % 4]}",
        tensor=f"{part[stage]}.{number // 560}",
        shape=(4096, 4096),
        dtype="bfloat16",
        rule="bound" if computed else "bitwise",
        classes=tuple(names for names in classes if names),
        outcomes=tuple(rows[name] for name in workers),
    )


def _row(*, computed: bool) -> dict[str, Any]:
    if not computed:
        return {"status": "equal", "reference": "file", "elements": 4096 * 4096, "mismatched": 0}
    return {
        "status": "within", "reference": "float64", "elements": 4096 * 4096, "mismatched": random.randrange(10**7),
        "max_abs": Real(random.random() * 1e-3), "max_ulp": random.randrange(10**4),
        "ratio": Real(random.random()), "word": words.ACCUMULATION_ORDER,
    }  # fmt: skip


@functools.cache
def _alone(name: str) -> tuple[str, ...]:
    """Return the set of one worker, the same object for all tensors, as a comparison has it."""
    return (name,)


def _named(template: dict[str, Any], name: str) -> Outcome:
    return Outcome(workers=_alone(name), **template)


def _zeros(name: str) -> Outcome:
    return Outcome(
        workers=_alone(name), reference="file", status="outside", elements=4096 * 4096, mismatched=4096 * 4096,
        max_abs=Real(0.066), max_ulp=15_000, word=words.ZEROS, evidence={"flipped_bits": {7: 100, 14: 30}},
    )  # fmt: skip


@contextmanager
def _browser(off: bool) -> Iterator[Any]:
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if off or chromium is None or chromedriver is None:
        yield None
        return
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    with tempfile.TemporaryDirectory(prefix="consistency-chromium-") as profile:
        for flag in (*CHROMIUM, f"--user-data-dir={profile}", "--window-size=1280,900"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options=options, service=Service(chromedriver))
        try:
            yield driver
        finally:
            driver.quit()


def load_ms(driver: Any, page: Path) -> float:
    """Return the median time from the start of the navigation to the end of the load event."""
    times = []
    for _ in range(LOADS):
        driver.switch_to.new_window("tab")
        driver.get(page.resolve().as_uri())
        times.append(float(driver.execute_script("return performance.getEntriesByType('navigation')[0].loadEventEnd")))
        driver.close()
        driver.switch_to.window(driver.window_handles[0])
    return statistics.median(times)


if __name__ == "__main__":
    raise SystemExit(main())
