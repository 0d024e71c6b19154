"""What one card has to show: isolation, settings, products, decisions, heat."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Cli
from tests.reported import environments, outcomes, rows

from . import made_bases
from .machines import Card, Machine, on_gpus_and_the_double, report_of, workers_of

pytestmark = pytest.mark.slow


@pytest.mark.gpu
def test_cpu_and_accelerator_together(cli: Cli, tmp_path: Path, accelerator: Callable[[], str]) -> None:
    """The built-in case on the first accelerator of any type: discovery, settings, digests and all stages."""
    device = accelerator()
    for dtype in ("float32", "bfloat16"):
        out = tmp_path / dtype
        done = cli("run", "--devices", f"cpu,{device}", "--dtype", dtype, "--out", out)
        assert done.returncode == 0, done.stdout + done.stderr
        assert {one["status"] for one in outcomes(report_of(out), "base", "adapter")} == {"equal"}


@pytest.fixture
def accelerator() -> Callable[[], str]:
    def find() -> str:
        from consistency.devices.discovery import accelerators

        found = accelerators()
        if not found:
            pytest.skip("no accelerator on this machine")
        return found[0].spec.name

    return find


@on_gpus_and_the_double
def test_an_isolated_worker_sees_its_card_alone(machine: Machine, tmp_path: Path) -> None:
    """The base refuses to be made where two devices are visible. The last card would be another one if isolation
    renumbered wrongly. The double has no driver that could ignore the mask."""
    card, base = machine.cards[-1], "python:made_bases:where_one_device_is_visible"
    words = ("--base", base, "--devices", f"cpu,{card.name}", "--stages", "forward", "--load-paths", "isolated")
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), machine.environment.get("PYTHONPATH")]))
    done = machine.consistency("run", *words, "--out", tmp_path / "out", PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = report_of(tmp_path / "out")
    (worker,) = workers_of(report, card)
    seen = environments(report)[worker["name"], worker["load_path"]]["device_uuid"]
    assert seen.removeprefix("GPU-") == card.uuid.removeprefix("GPU-") == worker["uuid"].removeprefix("GPU-")


@on_gpus_and_the_double
def test_settings_of_every_variant_are_in_force_and_torch_can_read_them(machine: Machine, one_gpu: Card) -> None:
    """Products and convolutions ask torch for TF32 by the older switch, and raise where it contradicts the newer one.
    The double has no TF32 and no cuDNN: on it nothing but the switches is seen."""
    found = machine.inside("variants", one_gpu.name)
    plain = found.pop("")
    assert (plain["cublas"], plain["cudnn"], plain["changed"]) == (False, False, [])
    for name, of in found.items():
        if isinstance(of, str):
            assert name != "tf32", of
            continue
        assert of["changed"] == [], name
        assert of["cublas"] is of["cudnn"] is (name == "tf32"), name
    if machine.built_for.startswith("CUDA") and one_gpu.capability >= (8, 0):  # Ampere has TF32 first
        assert found["tf32"]["product"] != plain["product"], "a product in TF32 has the bits of one in float32"


@on_gpus_and_the_double
def test_rows_name_the_kernel_of_attention_that_ran_or_are_skipped(
    machine: Machine, one_gpu: Card, tmp_path: Path
) -> None:
    """The double has the formula alone: what asks for a kernel is skipped, and what lets torch choose is not."""
    kernels = ("flash", "mem_efficient", "sdpa")
    devices = ",".join(("cpu", *(f"{one_gpu.name}@{kernel}" for kernel in kernels)))
    words = ("--devices", devices, "--dtype", "bfloat16", "--stages", "forward", "--load-paths", "isolated")
    done = machine.consistency("run", *words, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    blocks = [row for row in rows(report_of(tmp_path / "out"), "forward") if ".layers." in row["layer"]]
    for kernel in kernels:
        judged = [row for row in blocks if row["worker"] == f"{one_gpu.name}@{kernel}" and row["status"] != "skipped"]
        ran = {row["evidence"].get("attention") for row in judged}
        if machine.is_double:
            assert ran == ({None} if kernel == "sdpa" else set())
        elif kernel == "sdpa" or (kernel == "flash" and one_gpu.capability < (8, 0)):
            assert ran
        else:
            assert ran == {kernel}


@on_gpus_and_the_double
def test_doctor_finds_nothing_on_a_healthy_card(machine: Machine, one_gpu: Card, tmp_path: Path) -> None:
    """On the double at level quick, as it has nothing to warm up."""
    level = "quick" if machine.is_double else "thorough"
    words = ("--devices", f"cpu,{one_gpu.name}", "--level", level, "--out", tmp_path / "out")
    done = machine.consistency("doctor", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    report = report_of(tmp_path / "out")
    assert [f["message"] for f in report["findings"] if f["severity"] == "error"] == []
    assert {one["stage"] for one in report["outcomes"]} >= {"transfer", "operators"}


@on_gpus_and_the_double
def test_long_products_in_float32_are_no_finding(machine: Machine, one_gpu: Card, tmp_path: Path) -> None:
    """A GPU adds up 8192 products in one accumulator, where the CPU's library cuts them into blocks; the double cuts
    them in three, so that what the rule leaves for one accumulator is not seen on it."""
    base = made_bases.save_wide(tmp_path / "base")
    words = ("--base", base, "--dtype", "float32", "--devices", f"cpu,{one_gpu.name}", "--load-paths", "isolated")
    done = machine.consistency("run", *words, "--stages", "forward", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr


@on_gpus_and_the_double
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_that_are_chosen_in_no_order_are_no_finding(
    machine: Machine, one_gpu: Card, dtype: str, tmp_path: Path
) -> None:
    """DeepSeek-V3 takes `topk(sorted=False)`, which CUDA answers in the order of the indices; the double's kernel, and
    so its order, is the CPU's."""
    base = made_bases.save_mixture(tmp_path / "base")
    words = ("--base", base, "--dtype", dtype, "--devices", f"cpu,{one_gpu.name}", "--load-paths", "isolated")
    done = machine.consistency("run", *words, "--stages", "forward", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr


@on_gpus_and_the_double
def test_a_card_that_runs_hot_repeats_its_bits(machine: Machine, one_gpu: Card, tmp_path: Path) -> None:
    """For a minute; the double reports no temperature, and two seconds do."""
    words = ("--devices", one_gpu.name, "--stages", "operators", "--load-paths", "isolated", "--load")
    done = machine.consistency("run", *words, "--for", "2s" if machine.is_double else "1m", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    (worker,) = workers_of(report_of(tmp_path / "out"))
    soak = worker["soak"]
    assert soak["complete"]
    assert soak["repeats"] > 0
    assert soak["load"]["products"] > 0
    assert "error" not in soak["load"]
    if not machine.is_double and soak.get("unread") is None:
        assert any("temperature_c" in condition.get("readings", {}) for condition in soak["conditions"])
