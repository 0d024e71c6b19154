"""Time the stage `merged` against PEFT's `merge_and_unload` of the same model, each in a fresh process.

    python -m benchmarks.shapes DIR tinyllama
    python -m benchmarks.merged DIR/base DIR/linear

The stage computes, digests and measures three tensors of every adapted layer: the delta, the merged weight and the
safely merged weight. `merge_and_unload` computes the second alone, and writes it over the model, whose pages are mapped
from the file: each becomes private memory on the first write. `merge_adapter` of weights that are private already is
shown too. Loading counts on neither side. Threads are as many as torch takes.

Memory is the peak within the step of the process's private memory (`RssAnon` of Linux) beyond what it held before:
pages that are mapped from the weight files do not count until they are written. The stage holds a few copies of the
largest layer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass

_METER = """
import json, sys, threading, time

def field(name):
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))

def metered(name, action):
    before, over, most = field("RssAnon:"), threading.Event(), 0

    def sample():
        nonlocal most
        while not over.wait(0.02):
            most = max(most, field("RssAnon:"))

    watcher = threading.Thread(target=sample)
    watcher.start()
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    over.set()
    watcher.join()
    print(json.dumps({"step": name, "wall_s": wall, "cpu_s": cpu, "bytes": max(0, most - before)}))
"""

_BARE = """
import sys
from peft import PeftModel
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
model = PeftModel.from_pretrained(model, sys.argv[2])
if sys.argv[3] == "private":
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    metered("merge_adapter", model.merge_adapter)
else:
    metered("merge_and_unload", model.merge_and_unload)
"""

_STAGE = """
import os, sys, tempfile
from pathlib import Path
import torch
from consistency.capture.writer import CaptureWriter
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.worker import session
from consistency.worker.protocol import EventLog, Job
from consistency.stages.merged import worker as stage

real = stage.run
stage.run = lambda context: metered("merged", lambda: real(context))
case = prepare_case(Options(base=sys.argv[1], adapter=sys.argv[2], level=sys.argv[3], stages=("merged",)))
with tempfile.TemporaryDirectory() as home, CaptureWriter(Path(home) / "capture") as writer:
    folder = writer.worker_folder("cpu")
    job = Job(
        case=case, name="cpu", device="cpu", load_path="isolated", folder=str(folder), blobs=str(writer.blobs),
        scratch=home, settings={}, makes_reference=True, threads=torch.get_num_threads(), parent_pid=os.getpid(),
    )
    with EventLog(folder / "events.jsonl") as events:
        session.run(job, events)
    rows = [json.loads(line) for line in (folder / "records.jsonl").read_bytes().splitlines()]
    states = sorted({row["status"] for row in rows if row["stage"] == "merged"})
    print(json.dumps({"rows": len(rows), "states": states}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What one step of a process took: seconds, processor seconds, and private memory at its peak beyond the start."""

    wall_s: float
    cpu_s: float
    peak_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("adapter")
    parser.add_argument("--level", default="standard", help="of the stage (default standard)")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    steps = {
        "merge_and_unload, fresh process": (_BARE, "mapped"),
        "merge_adapter, private weights": (_BARE, "private"),
        "stage merged, fresh process": (_STAGE, arguments.level),
    }
    best: dict[str, Ran] = {}
    for _ in range(arguments.rounds):
        for name, (code, how) in steps.items():
            ran = _start(code, [arguments.base, arguments.adapter, how])
            kept = best.get(name, ran)
            best[name] = Ran(
                wall_s=min(ran.wall_s, kept.wall_s),
                cpu_s=min(ran.cpu_s, kept.cpu_s),
                peak_bytes=min(ran.peak_bytes, kept.peak_bytes),
            )
    bare = next(iter(best.values()))
    print(f"{'':34}{'s':>8}{'ratio':>8}{'cpu s':>8}{'ratio':>8}{'private MB':>12}")
    for name, ran in best.items():
        ratios = f"{ran.wall_s:8.2f}{ran.wall_s / bare.wall_s:8.2f}{ran.cpu_s:8.2f}{ran.cpu_s / bare.cpu_s:8.2f}"
        print(f"{name:34}{ratios}{ran.peak_bytes / 1e6:12.0f}")
    print("wanted: 2.5 at most")


def _start(code: str, arguments: list[str]) -> Ran:
    done = subprocess.run(
        [sys.executable, "-c", _METER + code, *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    print(done.stdout, end="", file=sys.stderr)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = next(line for line in lines if "step" in line)
    return Ran(wall_s=found["wall_s"], cpu_s=found["cpu_s"], peak_bytes=found["bytes"])


if __name__ == "__main__":
    main()
