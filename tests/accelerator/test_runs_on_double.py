"""The tool on devices that are none: what it says where all is well, and where one of them is sent nothing."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import msgspec
import pytest

from consistency.capture.reader import read_capture
from consistency.comparison.compare import compare
from consistency.comparison.result import TensorComparison
from tests.golden.executed import shows
from tests.reported import environments

from .fixtures import Double, RunOnDouble, RunsOnDouble

pytestmark = pytest.mark.process

CASES = Path(__file__).parents[2] / "docs" / "cases.md"
NPUS = [f"npu:{index}" for index in range(3)]
DROPPED = [{"from": "npu:0", "to": "npu:1", "does": "drop"}]


@pytest.fixture(scope="module")
def faulty(run_on_double: RunsOnDouble) -> RunOnDouble:
    """Run on devices of two architectures, one of which gets nothing from device 0."""
    settings = {"devices": 3, "architectures": ["A", "A", "B"], "copies": DROPPED, "fill": 203}
    return run_on_double(settings, stages="transfer,operators,base,adapter,merged,forward,memory")  # as tests here need


def on_load_path(run: RunOnDouble, load_path: str, *stages: str) -> list[TensorComparison]:
    return [t for t in run.comparison.tensors if t.load_path == load_path and t.stage in stages]


def test_dropped_copies_are_found_on_the_shared_path_alone(faulty: RunOnDouble) -> None:
    assert faulty.process.returncode == 1, faulty.process.stderr
    factors = [t for t in on_load_path(faulty, "shared", "adapter") if t.tensor in ("lora_A", "lora_B")]
    assert len(factors) == 56
    assert {t.classes for t in factors} == {(("cpu", "npu:0", "npu:2"), ("npu:1",))}
    assert {(t.tensor, row.word) for t in factors for row in t.outcomes if row.status != "equal"} == {
        ("lora_A", "fresh-init"),
        ("lora_B", "zeros"),
    }
    alone = on_load_path(faulty, "isolated", "base", "adapter") + on_load_path(faulty, "shared", "base")
    assert {t.classes for t in alone} == {(("cpu", *NPUS),)}
    assert {row.status for t in alone for row in t.outcomes} == {"equal"}


def test_findings_name_the_path_and_no_device_that_is_well(faulty: RunOnDouble) -> None:
    errors = [f for f in faulty.comparison.findings if f.severity == "error"]
    assert {f.workers for f in errors} == {("npu:1",)}
    moved = [f for f in errors if f.message.startswith("adapter")]
    assert {f.kind for f in moved} == {"zeros", "fresh-init"}
    for finding in moved:
        assert "when all devices are visible, and correct when isolated" in finding.message
        assert finding.cause == "peer copies 0→1 drop data; 0→2 is fine"
        assert finding.cause in finding.message
        words = finding.message.rpartition(" · ")[2].partition("correct when isolated")
        assert shows(CASES, words[0] + words[1]), finding.message
    assert not [f for f in errors if f.message.startswith(("merged", "forward"))]
    assert {one.stage for f in moved for one in f.consequences} == {"merged", "forward"}


def test_devices_form_architectures(faulty: RunOnDouble) -> None:
    groups = {group["name"]: group["workers"] for group in faulty.report["architectures"]}
    assert groups.pop("npu A (simulated)") == ["npu:0", "npu:1"]
    assert groups.pop("npu B (simulated)") == ["npu:2"]
    assert list(groups.values()) == [["cpu"]]
    for stage in ("merged", "forward"):
        found = on_load_path(faulty, "isolated", stage)
        assert {row.status for t in found for row in t.outcomes} <= {"equal", "within"}
        for tensor in found:
            owner = {name: number for number, names in enumerate(tensor.classes) for name in names}
            assert owner["npu:0"] == owner["npu:1"]
        assert any(len(tensor.classes) == 3 for tensor in found)


def test_devices_alone_are_consistent(faulty: RunOnDouble) -> None:
    """What the workers saw that no copy between devices could harm, compared by itself: healthy devices."""
    capture = read_capture(faulty.folder / "captures")
    alone = tuple(worker for worker in capture.workers if worker.info.load_path == "isolated")
    found = compare([msgspec.structs.replace(capture, workers=alone)])
    assert len(found.workers) == 4
    assert found.verdict == "consistent"
    assert [f for f in found.findings if f.severity != "note"] == []


def test_default_path_through_device_0_is_a_warning(faulty: RunOnDouble) -> None:
    warned = [f for f in faulty.comparison.findings if f.severity == "warning"]
    assert {(f.kind, f.workers) for f in warned} == {("touched", ("npu:1", "npu:2"))}
    said = "loading the adapter allocated 256 KiB on npu:0 and released it on load path shared"
    assert said in warned[0].message
    assert shows(CASES, said)


def test_every_worker_met_the_device_that_was_meant(faulty: RunOnDouble) -> None:
    there = [w for w in faulty.report["workers"] if w["name"] != "cpu"]
    assert len(there) == 6
    environment = environments(faulty.report)
    for worker in there:
        seen = environment[worker["name"], worker["load_path"]]
        assert seen["device_uuid"] == worker["uuid"]
        shown = seen["variables"].get("ASCEND_RT_VISIBLE_DEVICES")
        assert shown == (worker["name"].removeprefix("npu:") if worker["load_path"] == "isolated" else None)
    assert len({w["uuid"] for w in there}) == 3


def test_no_simulated_device_is_told_as_a_real_one(faulty: RunOnDouble) -> None:
    assert faulty.report["simulated"] is True
    assert all((w["name"] != "cpu") == w.get("simulated", False) for w in faulty.report["workers"])
    title, *lines = faulty.process.stdout.splitlines()
    others = lines[lines.index("") + 1 :]  # when, where and by which command come before
    assert title.startswith("consistency · SIMULATED DEVICES · ")
    verdict = " ".join(line.strip() for line in others[: others.index("")])
    assert verdict.endswith("; simulated: npu:0, npu:1, npu:2")
    lines = [line for line in others if "oftware accelerator" in line]
    assert lines
    assert all("(simulated)" in line for line in lines)


@pytest.mark.slow
def test_pytest_on_a_healthy_device(double: Double, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in double.environment(architectures=["A", "A", "B", "B"]).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest -p no:anyio")  # they take long to import
    done = pytester.runpytest_subprocess(
        "--consistency-base", "builtin:llama", "--consistency-devices", "cpu,npu:2", "--consistency-load-paths",
        "shared", "--consistency-level", "quick", "--junitxml", "out.xml",
    )  # fmt: skip
    assert done.ret == 0
    done.stdout.fnmatch_lines(["consistency: llama, *, on cpu, npu:2 (simulated)"])
    done.stdout.fnmatch_lines(["consistent: base and adapter agree on 2 workers; *; simulated: npu:2"])
    cases = list(ElementTree.parse(pytester.path / "out.xml").getroot().iter("testcase"))
    marked = {str(c.get("name")) for c in cases if c.find("properties/property[@name='simulated']") is not None}
    ran = {str(c.get("name")) for c in cases if c.find("skipped") is None}
    there = {name for name in ran if "npu:2" in name}
    assert len(there) > 90
    assert marked == there | {"agreement"}
