"""`docs/faults-by-method.md`: every fault and method that the benchmark plants, and the numbers it has to reach."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks.faults_by_method import FAULTS_OF, METHODS, PAGE, cell, listed, run
from consistency.worker.faults.catalogue import FAULTS
from tests.launch.in_this_process import in_this_process

FEWEST = 8
"""Methods other than LoRA in which a fault of every kind of stage has to be found."""

HERE = ("IA3",)
ONE_OF_EACH = ("base-bit-flip", "adapter-layers-swapped", "merge-off", "optimizer-off", "placed-elsewhere")


def test_every_fault_and_method_is_on_the_page_and_nothing_else() -> None:
    found = {(stage, method, fault) for stage, method, fault, _ in listed(PAGE.read_text(encoding="utf-8"))}
    faults_of = dict(FAULTS_OF.items())
    wanted = {(stage, method, fault) for stage, faults in faults_of.items() for method in METHODS for fault in faults}
    assert found == wanted, "run: python -m benchmarks.faults_by_method DIR --write"
    assert all(FAULTS[fault].stages == (stage,) for stage, faults in FAULTS_OF.items() for fault in faults)


def test_each_stage_has_faults_that_are_found_in_enough_methods() -> None:
    cells: dict[tuple[str, str], list[str]] = defaultdict(list)
    reasons = PAGE.read_text(encoding="utf-8").partition("## What was not planted")[2]
    for stage, method, fault, text in listed(PAGE.read_text(encoding="utf-8")):
        assert text
        if "missed" in text or text == "\N{EN DASH}":
            assert f"`{fault}`" in reasons
            assert f"`{method}`" in reasons
        cells[stage, method].append(text)
    for stage in FAULTS_OF:
        found = [method for method in METHODS if method != "LORA" and _all_found(cells[stage, method])]
        assert len(found) >= FEWEST, (stage, found)


def _all_found(cells: list[str]) -> bool:
    planted = [text for text in cells if text != "\N{EN DASH}"]
    return bool(planted) and not any("**" in text for text in planted)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.filterwarnings("ignore")  # PEFT and transformers warn while saving
def test_a_run_of_today_finds_what_the_page_has(tmp_path: Path) -> None:
    page = {(method, fault): text for _, method, fault, text in listed(PAGE.read_text(encoding="utf-8"))}
    with in_this_process():
        (found,) = run(tmp_path, HERE, only=ONE_OF_EACH)
    assert found.healthy == ""
    assert {name: cell(row) for name, row in found.rows.items()} == {name: page[HERE[0], name] for name in ONE_OF_EACH}
