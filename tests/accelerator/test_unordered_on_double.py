"""Equal devices whose `mean` adds up in no fixed order: excused by torch's warning, as far as it reaches."""

from __future__ import annotations

import pytest

from consistency.capture.reader import read_capture
from consistency.comparison.result import Finding

from .fixtures import RunOnDouble, RunsOnDouble
from .software_accelerator.unordered import OPERATION

pytestmark = pytest.mark.slow

WHY = f": torch has no deterministic version of {OPERATION}, which ran before"


@pytest.fixture(scope="module")
def warned(run_on_double: RunsOnDouble) -> RunOnDouble:
    settings = {"devices": 2, "unordered_mean": "warns"}
    return run_on_double(
        settings, devices="npu:0,npu:1", stages="operators,forward,gradient", load_paths="isolated", repeat="2"
    )


def of_kind(run: RunOnDouble, kind: str) -> list[Finding]:
    return [finding for finding in run.comparison.findings if finding.kind == kind]


@pytest.mark.parametrize("kind", ["same-device-type", "not-repeatable"])
def test_differences_after_the_operation_are_notes_that_name_it(warned: RunOnDouble, kind: str) -> None:
    assert warned.process.returncode == 0, warned.process.stdout
    found = of_kind(warned, kind)
    assert {finding.message.partition(" ")[0] for finding in found} == {"operators", "forward", "gradient"}
    assert {finding.severity for finding in found} == {"note"}
    assert all(finding.message.endswith(WHY) for finding in found)
    assert f"torch has no deterministic version of {OPERATION}" in " ".join(warned.process.stdout.split())


def test_only_what_the_operation_can_reach_is_marked(warned: RunOnDouble) -> None:
    for worker in read_capture(warned.folder / "captures").workers:
        of_operators = [record for record in worker.records if record.stage == "operators"]
        marked = {record.layer for record in of_operators if record.nondeterministic}
        assert marked == {"mean", "rms_norm"}  # torch composes the second of the first
        assert {record.layer for record in of_operators} > marked
        others = {
            record.nondeterministic for record in worker.records
            if record.stage in ("forward", "gradient") and record.rule != "bitwise"
        }  # fmt: skip
        assert others == {(OPERATION,)}


def test_the_same_without_a_warning_is_an_error(run_on_double: RunsOnDouble) -> None:
    settings = {"devices": 2, "unordered_mean": "silent"}
    run = run_on_double(settings, devices="npu:0,npu:1", stages="operators", load_paths="isolated")
    assert run.process.returncode == 1, run.process.stdout
    (finding,) = of_kind(run, "same-device-type")
    assert finding.severity == "error"
    assert "deterministic" not in finding.message
