"""The status of a comparison and of a suite, and of reports that have none."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest

from consistency.comparison.result import Comparison, Finding, Source
from consistency.comparison.suite import SuiteResult
from consistency.extras.operations.status.make import of_comparison, of_file, of_suite, render
from consistency.report import json as report_json
from consistency.report.formats import View
from tests.report.made_comparisons import ALL, comparison, faulty, tensor
from tests.report.made_fleets import many as many_devices
from tests.report.made_suites import good, lost, many


def test_what_it_states_of_a_run() -> None:
    note = Finding(kind="zeros", severity="note", message="accepted", workers=("cuda:2",), accepted="error")
    found = msgspec.structs.replace(faulty(), findings=(*faulty().findings, note))
    found = msgspec.structs.replace(found, elapsed_s=3.5, host="node-7", command=("consistency", "run"))
    made = of_comparison(found)
    assert (made.verdict, made.exit_status, made.case, made.elapsed_s) == ("inconsistent", 1, "llama", 3.5)
    assert (made.host, made.command) == ("node-7", ("consistency", "run"))
    assert made.reason == "adapter · cuda:1 · zeros in 3 of 3 lora_B tensors"
    assert (made.findings, made.accepted) == ({"error": 1, "warning": 0, "note": 2}, 1)
    assert made.workers == {"ok": 4}
    assert {d.name: (d.verdict, d.ratio) for d in made.devices} == {
        name: ("inconsistent" if name == "cuda:1" else "consistent", 0.3) for name in ALL
    }
    assert made.ratio == 0.3


def test_what_does_not_describe_hardware_is_marked() -> None:
    planted = Finding(kind="planted", severity="note", message="a fault was planted")
    assert of_comparison(comparison([], findings=(planted,), simulated=True)).marks == ("planted fault", "simulated")
    assert of_comparison(comparison([])).marks == ()


def test_not_a_number_is_the_worst_ratio_and_a_string() -> None:
    found = comparison(
        [
            tensor([["cpu"]], ratio=0.5, statuses={"cpu": "within"}),
            tensor([["cuda:0"]], ratio=math.nan, statuses={"cuda:0": "outside"}),
        ]
    )
    table = json.loads(b"".join(render(found, View())))
    assert table["ratio"] == "nan"


def written(path: Path, found: Comparison | SuiteResult) -> Path:
    path.write_bytes(b"".join(report_json.render(found, View())))
    return path


def test_captures_that_were_compared_are_as_old_as_the_oldest() -> None:
    sources = tuple(
        Source(name=name, created=f"2026-11-{day}T02:00:00+00:00", host=name) for name, day in (("a", 20), ("b", 19))
    )
    found = msgspec.structs.replace(good(), created="2026-11-22T02:00:00+00:00", sources=sources)
    assert of_comparison(found).created.day == 22, "the run's own captures"
    assert of_comparison(msgspec.structs.replace(found, captures=("a", "b"))).created.day == 19


@pytest.mark.parametrize("found", [faulty(), good(), lost(), comparison([])])
def test_a_report_alone_says_the_same(found: Comparison, tmp_path: Path) -> None:
    path = written(tmp_path / "report.json", found)
    made = of_file(path)
    assert made == of_comparison(found, created=made.created)
    assert abs(made.created.timestamp() - path.stat().st_mtime) < 1


def test_a_suite_s_report_alone_says_the_same(tmp_path: Path) -> None:
    assert of_file(written(tmp_path / "suite.json", many())) == of_suite(many())


def test_of_many_devices_the_odd_ones_have_names_and_the_others_a_count(tmp_path: Path) -> None:
    wrong = ("node-0001:cuda:3", "node-0002:cuda:0")
    small, large = many_devices(9, 1, wrong=wrong), many_devices(90, 1, wrong=wrong)
    made = of_comparison(large)
    assert [(one.name, one.verdict) for one in made.devices] == [(name, "inconsistent") for name in wrong]
    assert made.devices_left_out == 90 * 8 - 2
    assert [(one.architecture, one.verdict, one.count) for one in made.device_classes] == [
        ("Ampere sm_80", "consistent", 359), ("Hopper sm_90", "consistent", 359),
        ("Hopper sm_90", "inconsistent", 1), ("Ampere sm_80", "inconsistent", 1),
    ]  # fmt: skip
    sizes = [len(b"".join(render(found, View()))) for found in (small, large)]
    assert sizes[1] - sizes[0] < 10, "but for digits of its counts"
    path = tmp_path / "report.json"
    path.write_bytes(b"".join(report_json.render(large, View())))
    assert of_file(path).device_classes == made.device_classes


def test_of_few_devices_all_have_names() -> None:
    made = of_comparison(many_devices(8, 1))
    assert (len(made.devices), made.devices_left_out) == (64, 0)


def test_a_lost_worker_is_the_reason_whatever_else_was_found() -> None:
    """A drift came first in order, and the line that monitoring shows named that and another device."""
    lost = Finding(kind="lost-worker", severity="error", message="worker cpu@baseline was lost", workers=("b",))
    found = msgspec.structs.replace(faulty(), findings=(*faulty().findings, lost), verdict="incomplete")
    assert of_comparison(found).reason == "worker cpu@baseline was lost"
