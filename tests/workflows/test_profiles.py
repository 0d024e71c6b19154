"""Whole runs as deployed: nothing is pinned, what is chosen is in force, and faults are found all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from consistency.case.profile import Switch
from consistency.case.reading import make_options
from consistency.comparison.result import Comparison
from consistency.errors import UsageError
from consistency.workflows import pipeline

DEPLOYED: dict[str, Any] = {"profile": "deployed", "set": ["float32_matmul_precision=medium"], "threads": 1}
DEVICES = ("cpu", "cpu@baseline")

Run = Callable[..., Comparison]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> pipeline.Report:
    """Run on kernels of which some multiply in bfloat16, if this processor has units for it, and some do not."""
    options = {"base": "builtin:llama", "devices": DEVICES, "stages": ("operators", "merged", "forward"), **DEPLOYED}
    plan = pipeline.prepare(make_options({**options, "repeat": 2}))
    return pipeline.run(plan, tmp_path_factory.mktemp("deployed") / "out", watch=lambda *_: None)


def test_a_healthy_run_is_consistent_whatever_the_precision(healthy: pipeline.Report) -> None:
    found = healthy.comparison
    assert [f for f in found.findings if f.severity != "note"] == []
    assert (found.profile, found.settings) == ("deployed", ("float32_matmul_precision=medium",))
    judged = {row.status for t in found.tensors if t.stage == "forward" for row in t.rows}
    assert judged <= {"equal", "within"}, "no tensor is left out"


def test_what_is_in_force_is_recorded_and_only_what_was_chosen_is_asked_for(healthy: pipeline.Report) -> None:
    for worker in healthy.comparison.workers:
        assert worker.asked == {
            "float32_matmul_precision": "medium", "matmul_allow_tf32": True, "mkldnn_matmul_fp32_precision": "bf16",
        }  # fmt: skip
        assert worker.in_force.items() >= worker.asked.items()
        assert worker.in_force["deterministic_algorithms"] == "off"
        assert worker.in_force["sdpa_flash"] is True
        assert worker.in_force["cublas_workspace_config"] is None
    (baseline,) = [w for w in healthy.comparison.workers if w.name == "cpu@baseline"]
    assert "products" not in baseline.environment, "its kernels have no bfloat16"


def test_reports_have_the_settings_of_each_worker(healthy: pipeline.Report) -> None:
    assert healthy.folder is not None
    page = Path(healthy.folder, "report.html").read_text()
    assert "profile deployed · float32_matmul_precision=medium" in page
    assert "in force: deterministic_algorithms" in page


def test_an_error_that_products_cannot_make_is_found(run_with_faults: Run) -> None:
    for fault, stage in (("forward-off", "forward"), ("merge-off", "merged")):
        found = run_with_faults({"cpu@baseline": fault}, stages=(stage,), **DEPLOYED)
        errors = [f for f in found.findings if f.severity == "error"]
        assert {f.workers for f in errors} == {("cpu@baseline",)}, fault


def test_bits_that_change_are_stated(run_with_faults: Run) -> None:
    found = run_with_faults({"cpu@baseline": "merge-not-repeatable"}, stages=("merged",), **{**DEPLOYED, "repeat": 2})
    (finding,) = [f for f in found.findings if f.kind == "not-repeatable"]
    assert (finding.severity, finding.workers, found.verdict) == ("note", ("cpu@baseline",), "consistent")


def test_a_setting_that_this_torch_refuses_ends_the_run_with_its_reason(run_with_faults: Run) -> None:
    chosen = (Switch(name="linalg_library", value="magma"),)
    with pytest.raises(UsageError, match="this torch cannot set linalg_library") as caught:
        run_with_faults({}, devices=("cpu",), stages=("operators",), set=chosen)
    assert "not been compiled with MAGMA" in str(caught.value.hint)
