"""Time what reads and writes a history: of one host's devices over a thousand runs, and of a fleet over a year.

    python -m benchmarks.history                                  # 1000 runs of 50 devices of a host
    python -m benchmarks.history --fleet 1000x8x365               # nodes × GPUs × runs, of real records
    python -m benchmarks.history --record 1000x8x2000             # what --history adds to comparing

The year of a fleet has three incidents, and prints whether each is found with its date: a GPU whose bits change in run
200, a rack whose driver is updated in run 300, and a node that disappears in run 310. Beside these every run lacks one
node, another each time, so that no two runs are equal (`--same`: none is missing). Each command runs in a process of
its own; processor time and peak resident memory are of that process.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from benchmarks.scaling import write_captures
from consistency.capture.json_codec import encode_json
from consistency.capture.reader import RecordPool, read_capture
from consistency.comparison.compare import compare
from consistency.extras.operations.history.drift import add_run, find_drift
from consistency.extras.operations.history.records import SCHEMA, RunRecord, RunWorkers, WorkerRecord
from consistency.extras.operations.history.store import History
from consistency.extras.operations.history.table import device_rows, run_rows
from consistency.numerics.real import Real

STAGES = ("transfer", "operators", "base", "adapter", "merged", "forward", "gradient")
FIRST = datetime.datetime(2026, 1, 1, 2, 0, tzinfo=datetime.UTC)
DRIFT, UPDATE, GONE = 200, 300, 310
RACK = 16  # nodes


def make(history: History, runs: int, devices: int) -> tuple[RunRecord, dict[str, bytes]]:
    """Fill a history with runs in which nothing drifts; return another run like them."""
    table = encode_json({f"{stage}::layer.{i}.weight": "0" * 32 for stage in STAGES for i in range(100)})
    name = hashlib.sha256(table).hexdigest()
    tables = {name: table}

    def run(number: int) -> RunRecord:
        workers = RunWorkers.of(
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


def one_host(runs: int, devices: int) -> None:
    """Time a history whose runs have few devices."""
    with tempfile.TemporaryDirectory() as scratch:
        history = History(str(Path(scratch) / "history"))
        latest, tables = make(history, runs, devices)
        size = sum(file.stat().st_size for file in Path(scratch).rglob("*.json"))
        print(f"{runs} runs, {devices} devices, {size / 2**20:.1f} MiB")
        print(f"list every run           {best(lambda: run_rows(history, 0)):.2f} s")
        print(f"one device over time     {best(lambda: device_rows(history, 'cuda:0', 0)):.2f} s")
        print(f"drift of a new run       {best(lambda: find_drift(history, latest, tables)):.2f} s")


def workers(nodes: int, gpus: int, tables: tuple[str, str]) -> list[WorkerRecord]:
    """Make up a fleet of four kinds of GPU."""
    found = []
    for node in range(nodes):
        kind = 4 * node // nodes
        bits = {stage: hashlib.md5(f"{stage} {kind}".encode()).hexdigest()[:16] for stage in STAGES}
        for gpu in range(gpus):
            name = hashlib.md5(f"{node} {gpu}".encode()).hexdigest()
            found.append(
                WorkerRecord(
                    name=f"gpu-{node:04}:cuda:{gpu}", load_path="isolated", device=f"GPU-{name}", status="ok",
                    architecture=f"Hopper sm_9{kind}", model="NVIDIA H100 80GB HBM3", software="a" * 16,
                    inputs="1" * 16, bits=bits, table=tables[0], verdict="consistent",
                    ratio=Real(0.25 + kind / 8), host=f"gpu-{node:04}", driver="570.133.20",
                )
            )  # fmt: skip
    return found


def year(nodes: int, gpus: int, runs: int, tables: tuple[str, str], *, same: bool) -> Iterator[RunRecord]:
    """Yield the runs of a fleet, the earliest first."""
    everybody = workers(nodes, gpus, tables)
    bad, gone = f"gpu-{nodes // 2:04}:cuda:{gpus // 2}", f"gpu-{nodes - 1:04}"
    rack = {f"gpu-{node:04}" for node in range(RACK)}
    for number in range(runs):
        missing = {gone} if number >= GONE else set()
        if not same:
            missing.add(f"gpu-{RACK + number % (nodes // 2 - RACK):04}")
        found = []
        for worker in everybody:
            if worker.host in missing:
                continue
            if worker.host in rack and number >= UPDATE:
                bits = {**worker.bits, "forward": "f" * 16}
                worker = msgspec.structs.replace(worker, software="b" * 16, driver="580.65.06", bits=bits)
            if worker.name == bad and number >= DRIFT:
                bits = {**worker.bits, "merged": "0" * 16}
                worker = msgspec.structs.replace(worker, bits=bits, table=tables[1])
            found.append(worker)
        yield RunRecord(
            schema=SCHEMA, at=(FIRST + datetime.timedelta(days=number)).isoformat(timespec="microseconds"),
            host="login", case="llama", verdict="consistent", tool="0", workers=RunWorkers.of(found),
            versions={"torch": "2.13.0"},
        )  # fmt: skip


def fleet(nodes: int, gpus: int, runs: int, *, same: bool) -> None:
    """Make a fleet's year by the same steps as `--history` does, and time the commands that read it."""
    raw = [
        encode_json({f"{stage}::layer.{i}.weight": bits * 32 for stage in STAGES for i in range(286)}) for bits in "01"
    ]
    tables = {hashlib.sha256(one).hexdigest(): one for one in raw}
    names = tuple(tables)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "history"
        found, costs = 0, []
        for run in year(nodes, gpus, runs, (names[0], names[1]), same=same):
            history = History(str(folder))
            began = time.process_time()
            findings, stages = find_drift(history, run, tables)
            drift = {label for finding in findings if finding.kind == "drift" for label in finding.workers}
            found += len(drift)
            judged = RunWorkers.of(
                msgspec.structs.replace(w, drift=stages[w.device, w.load_path], verdict="inconsistent")
                if w.name in drift else w
                for w in run.workers
            )  # fmt: skip
            verdict = "inconsistent" if drift else "consistent"
            history.append(msgspec.structs.replace(run, workers=judged, verdict=verdict), tables)
            costs.append(time.process_time() - began)
        files = [path for path in folder.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        print(f"{nodes} nodes × {gpus} GPUs × {runs} runs: {size / 1e6:.1f} MB in {len(files)} files")
        print(f"judge and add one run: processor {sum(costs) / runs:.2f} s; drift in {found} runs of a worker")
        print(f"{'command':<32}{'s':>8}{'processor s':>13}{'MB':>7}{'printed or page, kB':>21}")
        page = Path(scratch) / "page.html"
        for words in (
            ["--last", "0"], ["--last", "0", "--json"], ["--changes"],
            ["--last", "0", "--device", f"gpu-{nodes // 2:04}:cuda:{gpus // 2}"],
            ["--html", str(page)], ["--html", str(page), "--last", "0"], ["--keep-runs", str(runs - 100), "--dry-run"],
        ):  # fmt: skip
            print_cost(words, folder, page)


def print_cost(words: list[str], folder: Path, page: Path) -> None:
    """Run `consistency history` in a process of its own, and print what it took."""
    started = time.perf_counter()
    command = [sys.executable, "-P", "-m", "consistency", "history", str(folder), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - started
    size = page.stat().st_size if "--html" in words else len(printed)
    shown = " ".join(word for word in words if word != str(page))
    memory = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
    processor_s = usage.ru_utime + usage.ru_stime
    print(f"{shown:<32}{seconds:8.1f}{processor_s:13.1f}{memory:7.0f}{size / 1e3:21.1f}", flush=True)
    if process.returncode or words == ["--changes"]:
        last = [line for line in printed.decode().splitlines() if "missing" not in line or "now" in line]
        print("\n".join(f"    {line.rstrip()}" for line in last))


def record(captures: int, per_host: int, tensors: int) -> None:
    """Time what a history adds to the comparison of captures."""
    with tempfile.TemporaryDirectory() as scratch:
        pool, steps = RecordPool(), {}
        folders = write_captures(Path(scratch) / "captures", (captures, per_host, tensors), alike=True)
        began = time.process_time()
        found = [read_capture(folder, pool) for folder in folders]
        steps["read"] = time.process_time() - began
        began = time.process_time()
        comparison = compare(found)
        steps["compare"] = time.process_time() - began
        for step in ("first --history", "second --history"):
            began = time.process_time()
            add_run(History(str(Path(scratch) / "history")), found, comparison, None)
            steps[step] = time.process_time() - began
        sizes = {path.parent.name: 0 for path in Path(scratch, "history").rglob("*.*")}
        for path in Path(scratch, "history").rglob("*.*"):
            sizes[path.parent.name] += path.stat().st_size
        print(f"{captures} captures × {per_host} workers × {tensors} tensors, processor s:")
        print("\n".join(f"{step:<20}{seconds:8.1f}" for step, seconds in steps.items()))
        print(", ".join(f"{folder} {size / 1e3:.0f} kB" for folder, size in sizes.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--devices", type=int, default=50)
    parser.add_argument("--fleet", metavar="NODESxGPUSxRUNS")
    parser.add_argument("--same", action="store_true", help="no node is missing at random")
    parser.add_argument("--record", metavar="CAPTURESxWORKERSxTENSORS")
    options = parser.parse_args()
    if options.record:
        record(*map(int, options.record.split("x")))
    elif options.fleet:
        fleet(*map(int, options.fleet.split("x")), same=options.same)
    else:
        one_host(options.runs, options.devices)


if __name__ == "__main__":
    main()
