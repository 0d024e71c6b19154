"""Whole runs as deployed: nothing is pinned, what is chosen is in force, and faults are found all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from consistency.case.profile import Switch
from consistency.comparison.result import Comparison
from consistency.errors import UsageError
from consistency.workflows import report_folder
from tests.conftest import RunSuiteWithFaults

pytestmark = pytest.mark.slow

DEPLOYED: dict[str, Any] = {"profile": "deployed", "set": ["float32_matmul_precision=medium"], "threads": 1}
FAULTY = "cpu@baseline"
CASES: dict[str, dict[str, Any]] = {
    "healthy": {"stages": ("operators", "merged", "forward"), "repeat": 2},
    "forward-off": {"stages": ("forward",)},
    "merge-off": {"stages": ("merged",)},
    "merge-not-repeatable": {"stages": ("merged",), "repeat": 2},
}

Run = Callable[..., Comparison]


@pytest.fixture(scope="module")
def found_in(run_suite_with_faults: RunSuiteWithFaults) -> dict[str, Comparison]:
    """Run on kernels of which some multiply in bfloat16, if this processor has units for it, and some do not."""
    planted = {name: {FAULTY: name} for name in CASES if name != "healthy"}
    return run_suite_with_faults(CASES, planted, processes=True, **DEPLOYED)


@pytest.fixture
def healthy(found_in: dict[str, Comparison]) -> Comparison:
    return found_in["healthy"]


def test_a_healthy_run_is_consistent_whatever_the_precision(healthy: Comparison) -> None:
    found = healthy
    assert [f for f in found.findings if f.severity != "note"] == []
    assert (found.profile, found.settings) == ("deployed", ("float32_matmul_precision=medium",))
    judged = {row.status for t in found.tensors if t.stage == "forward" for row in t.outcomes}
    assert judged <= {"equal", "within"}, "no tensor is left out"


def test_what_is_in_force_is_recorded_and_only_what_was_chosen_is_asked_for(healthy: Comparison) -> None:
    for worker in healthy.workers:
        assert worker.asked == {
            "float32_matmul_precision": "medium", "matmul_allow_tf32": True, "cuda_matmul_fp32_precision": "tf32",
            "mkldnn_matmul_fp32_precision": "bf16",
        }  # fmt: skip
        assert worker.in_force.items() >= worker.asked.items()
        assert worker.in_force["deterministic_algorithms"] == "off"
        assert worker.in_force["sdpa_flash"] is True
        assert worker.in_force["cublas_workspace_config"] is None
    (baseline,) = [w for w in healthy.workers if w.name == "cpu@baseline"]
    assert "products" not in baseline.environment, "its kernels have no bfloat16"


def test_reports_have_the_settings_of_each_worker(healthy: Comparison, tmp_path: Path) -> None:
    report_folder.write_reports(healthy, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "profile deployed · float32_matmul_precision=medium" in page
    assert "in force: deterministic_algorithms" in page


def test_an_error_that_products_cannot_make_is_found(found_in: dict[str, Comparison]) -> None:
    for fault in ("forward-off", "merge-off"):
        errors = [f for f in found_in[fault].findings if f.severity == "error"]
        assert {f.workers for f in errors} == {(FAULTY,)}, fault


def test_bits_that_change_are_stated(found_in: dict[str, Comparison]) -> None:
    found = found_in["merge-not-repeatable"]
    (finding,) = [f for f in found.findings if f.kind == "not-repeatable"]
    assert (finding.severity, finding.workers, found.verdict) == ("note", (FAULTY,), "consistent")


def test_a_setting_that_this_torch_refuses_ends_the_run_with_its_reason(run_with_faults: Run) -> None:
    chosen = (Switch(name="linalg_library", value="magma"),)
    with pytest.raises(UsageError, match="this torch cannot set linalg_library") as caught:
        run_with_faults({}, devices=("cpu",), stages=("operators",), set=chosen)
    assert "not been compiled with MAGMA" in str(caught.value.hint)
