"""Runs of a fleet made by hand: nodes with eight GPUs each, which saw the same until something happens."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from consistency.extras.operations.history.records import SCHEMA, RunRecord, RunWorkers, WorkerRecord
from consistency.extras.operations.history.store import History
from consistency.numerics.real import Real

FIRST = datetime.datetime(2026, 1, 1, 2, 0, tzinfo=datetime.UTC)
GPUS = 8
BITS = {"base": "b", "adapter": "a", "merged": "m"}

Happens = Callable[[int, WorkerRecord], WorkerRecord | None]
"""What becomes of a worker in a run, counted from 0: None where it is missing."""


def at(run: int) -> str:
    return (FIRST + datetime.timedelta(days=run)).isoformat(timespec="microseconds")


def name(node: int, gpu: int) -> str:
    return f"gpu-{node:04}:cuda:{gpu}"


def workers(nodes: int) -> list[WorkerRecord]:
    return [
        WorkerRecord(
            name=name(node, gpu), load_path="isolated", device=f"GPU-{node:04}-{gpu}", architecture="Hopper sm_90",
            model="NVIDIA H100", status="ok", software="s", inputs="i", bits=BITS, table="0" * 64,
            verdict="consistent", ratio=Real(0.5), host=f"gpu-{node:04}", driver="570.1",
        )
        for node in range(nodes)
        for gpu in range(GPUS)
    ]  # fmt: skip


def fleet_runs(nodes: int, runs: int, happens: Happens = lambda _, w: w, **fields: Any) -> Iterator[RunRecord]:
    """Yield runs, the earliest first."""
    everybody = workers(nodes)
    for number in range(runs):
        found = [now for worker in everybody if (now := happens(number, worker)) is not None]
        bad = any(worker.verdict != "consistent" for worker in found)
        yield RunRecord(
            schema=SCHEMA, at=at(number), host="login", tool="0.1.0", workers=RunWorkers.of(found),
            **{"case": "llama", "verdict": "inconsistent" if bad else "consistent", **fields},
        )  # fmt: skip


def fleet_history(url: object, *args: Any, **fields: Any) -> History:
    """Write the runs of a fleet to a history; return it."""
    history = History(str(url))
    for run in fleet_runs(*args, **fields):
        history.append(run, {})
    return history


def drifted(worker: WorkerRecord, stage: str = "merged") -> WorkerRecord:
    return msgspec.structs.replace(worker, bits={**BITS, stage: "x"}, drift=(stage,), verdict="inconsistent")


def incidents(run: int, worker: WorkerRecord) -> WorkerRecord | None:
    """One GPU changes its bits from run 6 on, a rack's driver is updated in run 8, a node disappears in run 9."""
    if worker.host == "gpu-0008" and run >= 9:
        return None
    if worker.host in ("gpu-0002", "gpu-0003") and run >= 8:
        bits = {**BITS, "merged": "m after the update"}
        worker = msgspec.structs.replace(worker, software="t", driver="580.2", bits=bits)
    return drifted(worker) if worker.name == name(4, 3) and run >= 6 else worker
