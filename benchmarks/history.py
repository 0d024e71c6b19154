"""Time queries on a history of a thousand runs and fifty devices: the list, one device, drift of a new run.

python benchmarks/history.py [--runs 1000] [--devices 50]
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from consistency.capture.json_codec import encode_json
from consistency.comparison.history.drift import find_drift
from consistency.comparison.history.store import SCHEMA, History, RunRecord, WorkerRecord
from consistency.report.history import device_rows, run_rows

STAGES = ("transfer", "operators", "base", "adapter", "merged", "forward", "gradient")


def make(history: History, runs: int, devices: int) -> tuple[RunRecord, dict[str, bytes]]:
    """Fill a history with runs in which nothing drifts; return another run like them."""
    table = encode_json({f"{stage}::layer.{i}.weight": "0" * 32 for stage in STAGES for i in range(100)})
    name = hashlib.sha256(table).hexdigest()
    tables = {name: table}

    def run(number: int) -> RunRecord:
        workers = tuple(
            WorkerRecord(
                name=f"cuda:{d}", load_path="isolated", device=f"GPU-{d:032x}", architecture="Ampere sm_86",
                model="NVIDIA RTX A6000", status="ok", software="0" * 16, inputs="1" * 16,
                bits={stage: f"{hash((stage, d % 3)) % 2**64:016x}" for stage in STAGES}, table=name,
            )
            for d in range(devices)
        )  # fmt: skip
        at = f"{2000 + number // 336}-{number // 28 % 12 + 1:02}-{number % 28 + 1:02}T03:00:00.000000+00:00"
        return RunRecord(
            schema=SCHEMA, at=at, host="host", case="llama", verdict="consistent", tool="0", workers=workers
        )  # fmt: skip

    for number in range(runs):
        history.append(run(number), tables)
    return run(runs), tables


def best(function: Callable[[], object], rounds: int = 3) -> float:
    """Return the shortest of some times, in seconds."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--devices", type=int, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        history = History(str(Path(scratch) / "history"))
        latest, tables = make(history, options.runs, options.devices)
        size = sum(file.stat().st_size for file in Path(scratch).rglob("*.json"))
        print(f"{options.runs} runs, {options.devices} devices, {size / 2**20:.1f} MiB")
        print(f"list every run           {best(lambda: run_rows(history, 0)):.2f} s")
        print(f"one device over time     {best(lambda: device_rows(history, 'cuda:0', 0)):.2f} s")
        print(f"drift of a new run       {best(lambda: find_drift(history, latest, tables)):.2f} s")


if __name__ == "__main__":
    main()
