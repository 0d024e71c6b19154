"""Profiles and variants of an accelerator: one device is several, each judged by its own precision."""

from __future__ import annotations

import pytest

from .fixtures import RunOnDouble, RunsOnDouble

pytestmark = pytest.mark.slow

VARIANTS = ("npu:0", "npu:0@medium", "npu:0@flash")


@pytest.fixture(scope="module")
def as_deployed(run_on_double: RunsOnDouble) -> RunOnDouble:
    return run_on_double(
        {}, devices=",".join(("cpu", *VARIANTS)), profile="deployed", set="cudnn_benchmark=true",
        stages="merged,forward", load_paths="isolated",
    )  # fmt: skip


def test_a_healthy_accelerator_is_consistent_in_each_variant(as_deployed: RunOnDouble) -> None:
    assert as_deployed.process.returncode == 0, as_deployed.process.stdout
    assert [f for f in as_deployed.comparison.findings if f.severity != "note"] == []
    assert "profile deployed · cudnn_benchmark=true" in as_deployed.process.stdout


def test_each_variant_has_its_settings_and_what_they_permit(as_deployed: RunOnDouble) -> None:
    workers = {w.name: w for w in as_deployed.comparison.workers}
    chosen = {"cudnn_benchmark": True}
    assert workers["npu:0"].asked == chosen
    assert workers["npu:0@flash"].asked == chosen | {
        "sdpa_math": True, "sdpa_flash": True, "sdpa_mem_efficient": False, "sdpa_cudnn": False,
    }  # fmt: skip
    products = {name: worker.environment.get("products", {}).get("matmul") for name, worker in workers.items()}
    assert products == {"cpu": None, "npu:0": None, "npu:0@medium": "bfloat16", "npu:0@flash": None}


def test_the_yardstick_is_that_of_the_variant_s_products(as_deployed: RunOnDouble) -> None:
    forward = [t for t in as_deployed.comparison.tensors if t.stage == "forward"]
    rows = {name: [row for t in forward for worker, row in t.by_worker() if worker == name] for name in VARIANTS}
    reasons = {str(row.reason) for row in rows.pop("npu:0@flash") if row.status == "skipped"}
    assert any(reason.startswith("math ran") for reason in reasons), "the double has no other kernel"
    assert "fused kernels of attention (torch chose none)" in as_deployed.comparison.not_checked
    for name, found in rows.items():
        skipped = [row for row in found if row.status == "skipped"]
        assert {row.status for row in found} <= {"equal", "within", "skipped"}, name
        assert len(skipped) <= 1, "the answers of a classifier alone are too few"
        assert all("few samples" in str(row.reason) for row in skipped)
    judged = [row for row in rows["npu:0@medium"] if row.ratio is not None]
    assert {row.evidence.get("products") for row in judged} == {"bfloat16"}
    assert {row.evidence.get("products") for row in rows["npu:0"]} == {None}
