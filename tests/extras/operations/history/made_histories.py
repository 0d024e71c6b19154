"""Histories made by hand: runs of four devices on two hosts."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from consistency.extras.operations.history.records import SCHEMA, RunRecord, RunWorkers, WorkerRecord
from consistency.extras.operations.history.store import History
from consistency.numerics.real import Real

FIRST_NIGHT = datetime.datetime(2026, 11, 1, 2, 0, tzinfo=datetime.UTC)


def worker(name: str, host: str = "node-1", *, bits: Mapping[str, str] | None = None, **fields: Any) -> WorkerRecord:
    ratio = fields.pop("ratio", 0.5)
    plain: dict[str, Any] = {
        "load_path": "isolated", "device": f"GPU-{host}-{name}", "architecture": "Hopper sm_90",
        "model": "NVIDIA H100 80GB HBM3", "status": "ok", "software": "s", "inputs": "i", "verdict": "consistent",
        "bits": {"base": "b", "merged": "m"} if bits is None else dict(bits),
        "ratio": None if ratio is None else Real(ratio),
    }  # fmt: skip
    return WorkerRecord(name=name, **{**plain, **fields})


def run(night: float, *workers: WorkerRecord, host: str = "node-1", **fields: Any) -> RunRecord:
    """Return the run of a night, counted from `FIRST_NIGHT`."""
    at = (FIRST_NIGHT + datetime.timedelta(days=night)).isoformat(timespec="microseconds")
    bad = next((w.verdict for w in workers if w.verdict != "consistent"), "consistent")
    plain: dict[str, Any] = {"case": "llama", "verdict": bad, "tool": "0.1.0"}
    return RunRecord(schema=SCHEMA, at=at, host=host, workers=RunWorkers.of(workers), **{**plain, **fields})


def month(reports: Path | None = None) -> list[RunRecord]:
    """Return thirty nights on two hosts, the earliest first: one device drifts, one is lost, software changes once."""
    found = []
    for night in range(30):
        software = "s" if night < 12 else "t"
        base = {"base": "b", "merged": f"m-{software}"}
        for host in ("node-1", "node-2"):
            workers = [worker("cpu", host, ratio=0.3, software=software, bits=base, architecture="x86-64 AVX-512",
                              model="AMD EPYC 9654", device=f"{host}/cpu")]  # fmt: skip
            for number in range(4):
                name, of = f"cuda:{number}", dict(base)
                fields: dict[str, Any] = {"software": software, "ratio": 0.4 + 0.002 * night * number}
                if (host, number) == ("node-2", 3) and night >= 24:
                    of["merged"] = "other"
                    fields |= {"verdict": "inconsistent", "drift": ("merged",), "ratio": 1.0 + 0.1 * (night - 24)}
                if (host, number, night) == ("node-1", 1, 17):
                    of, fields = {}, {**fields, "verdict": "incomplete", "status": "lost", "ratio": None}
                workers.append(worker(name, host, bits=of, **fields))
            folder = "" if reports is None else str(reports / f"{host}-{night}")
            errors = tuple(f"{w.name}: {w.verdict} on {host}" for w in workers if w.verdict != "consistent")
            found.append(run(night, *workers, host=host, findings=errors, report=folder))
    return found


def history_of(folder: Path, runs: list[RunRecord]) -> History:
    """Write runs to a history; return it."""
    history = History(str(folder))
    for one in runs:
        history.append(one, {})
    return history
