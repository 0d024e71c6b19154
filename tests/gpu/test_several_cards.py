"""What several cards have to show: who sees whom, equal bits on equal cards, and a bad card that is lost alone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.reported import environments, rows

from .machines import Card, Machine, on_gpus, on_gpus_and_the_double, report_of, workers_of

pytestmark = pytest.mark.slow


@on_gpus
def test_a_card_without_free_memory_is_lost_alone(machine: Machine, one_gpu: Card, tmp_path: Path) -> None:
    """Another process holds all of the first card's memory; the CPU, and each other card, are reported."""
    devices = ",".join(["cpu", *(card.name for card in machine.cards)])
    words = ("--devices", devices, "--stages", "base,adapter", "--load-paths", "isolated", "--placement", "device")
    with machine.full(one_gpu):
        done = machine.consistency("run", *words, "--out", tmp_path / "out")
    assert done.returncode == 3, done.stdout + done.stderr
    report = report_of(tmp_path / "out")
    lost = {worker["name"]: worker["reason"] for worker in report["workers"] if worker["status"] != "ok"}
    assert lost.keys() == {one_gpu.name}
    assert "memory" in lost[one_gpu.name]
    right = {row["worker"] for row in rows(report) if row["status"] == "equal"}
    assert right >= {"cpu", *(card.name for card in machine.cards[1:])}


@on_gpus_and_the_double
def test_where_all_cards_are_visible_each_worker_has_the_planned_one(
    machine: Machine, two_gpus: tuple[Card, Card], tmp_path: Path
) -> None:
    """PEFT's default goes through device 0, which is a warning and no error. Contexts on other devices are seen on
    NVIDIA's alone."""
    names = [card.name for card in two_gpus]
    words = ("--devices", ",".join(names), "--stages", "base,adapter,memory", "--load-paths", "shared")
    done = machine.consistency("run", *words, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    report = report_of(tmp_path / "out")
    for card in two_gpus:
        (worker,) = workers_of(report, card)
        seen = environments(report)[worker["name"], worker["load_path"]]["device_uuid"]
        assert seen.removeprefix("GPU-") == card.uuid.removeprefix("GPU-") == worker["uuid"].removeprefix("GPU-")
    touched = [f for f in report["findings"] if f["kind"] == "touched"]
    assert {(f["severity"], *f["workers"]) for f in touched} == {("warning", names[1])}
    assert any(f"on {names[0]}" in f["message"] for f in touched)


@on_gpus_and_the_double
def test_copies_between_cards_arrive(machine: Machine, two_gpus: tuple[Card, Card], tmp_path: Path) -> None:
    """Each pair in both directions, at level thorough up to 1 GiB; on the double at level quick."""
    level = "quick" if machine.is_double else "thorough"
    words = ("--devices", ",".join(card.name for card in two_gpus), "--level", level, "--out", tmp_path / "out")
    done = machine.consistency("doctor", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    copies = rows(report_of(tmp_path / "out"), "transfer")
    into = {row["worker"] for row in copies if row["status"] == "equal"}
    assert into == {card.name for card in two_gpus}


@on_gpus_and_the_double
def test_equal_cards_agree_bitwise_isolated_and_shared(
    machine: Machine, equal_gpus: tuple[Card, ...], tmp_path: Path
) -> None:
    """All cards of a model, each alone and with the others visible; the double's sums have one order, by design."""
    devices = ",".join(card.name for card in equal_gpus)
    stages = "operators,base,adapter,merged,forward,gradient"
    done = machine.consistency("run", "--devices", devices, "--stages", stages, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    report = report_of(tmp_path / "out")
    assert {worker["load_path"] for worker in report["workers"]} == {"isolated", "shared"}
    reached = {name for f in report["findings"] if "no deterministic version" in f["message"] for name in f["tensors"]}
    apart = [
        f"{one['stage']}::{one['layer']}::{one['tensor']}"
        for one in report["outcomes"] if one["bits"] and one["rule"] not in ("limit", "bitwise")
    ]  # fmt: skip
    assert set(apart) <= reached
    assert [
        f["message"] for f in report["findings"] if f["kind"] == "same-device-type" and f["severity"] == "error"
    ] == []


@on_gpus_and_the_double
def test_unlike_cards_agree_within_tolerance(machine: Machine, unlike_gpus: tuple[Card, ...], tmp_path: Path) -> None:
    """One card of each model, as architectures of their own."""
    devices = ",".join(["cpu", *(card.name for card in unlike_gpus)])
    words = ("--devices", devices, "--stages", "base,adapter,merged,forward", "--load-paths", "isolated")
    done = machine.consistency("run", *words, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    report = report_of(tmp_path / "out")
    assert {worker["model"] for worker in workers_of(report)} >= {card.model for card in unlike_gpus}


@on_gpus_and_the_double
def test_a_worker_that_is_killed_leaves_nothing_on_its_card(machine: Machine, one_gpu: Card, tmp_path: Path) -> None:
    """It is killed while its kernels run. Memory of the double is its process's own: on it, only that no process of the
    worker's group is left is seen."""
    before = machine.inside("free_bytes", one_gpu.name)
    words = ("--devices", one_gpu.name, "--stages", "operators", "--load-paths", "isolated", "--load", "--for", "10m")
    run = machine.start_consistency("run", *words, "--out", tmp_path / "out")
    assert run.stdout is not None
    lines = []
    for line in run.stdout:
        lines.append(line)
        if "soak" in line:
            break
    (worker,) = _workers(run.pid)
    os.kill(worker, signal.SIGKILL)
    rest, _ = run.communicate(timeout=300)
    assert run.returncode == 3, "".join(lines) + rest
    assert f"{one_gpu.name} was lost" in " ".join(rest.split())
    assert not Path(f"/proc/{worker}").exists()
    assert not _in_group(worker)
    free = (machine.inside("free_bytes", one_gpu.name) for _ in range(5))  # a driver may take a moment
    assert any(now >= before - 64 * 2**20 for now in free)


def _stat(process: Path) -> list[str]:
    try:
        return process.joinpath("stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return []


def _workers(parent: int) -> list[int]:
    """Return the worker processes that a run has started."""
    found = [p for p in Path("/proc").iterdir() if p.name.isdigit() and _stat(p)[1:2] == [str(parent)]]
    return [int(p.name) for p in found if b"consistency.worker" in p.joinpath("cmdline").read_bytes()]


def _in_group(leader: int) -> list[int]:
    found = [p for p in Path("/proc").iterdir() if p.name.isdigit() and _stat(p)[2:3] == [str(leader)]]
    return [int(p.name) for p in found if _stat(p)[:1] != ["Z"]]
