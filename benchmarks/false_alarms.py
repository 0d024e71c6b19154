"""Run the built-in cases again and again on healthy hardware, and count what is found: it has to be nothing.

    python benchmarks/false_alarms.py --runs 50
    python benchmarks/false_alarms.py --base BASE --adapter ADAPTER --ids 16 --stages forward,gradient

Each run is the whole command, in processes of their own, over every device of this machine (the kernel variants of the
CPU where there is no accelerator). A finding that is more than a note is printed, and ends the script with status 1.
With `--ids` the inputs of each run are other random token ids, 4 sequences of so many.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50, help="how many runs in all (default 50)")
    parser.add_argument("--cases", default="llama", help="built-in cases, taking turns (default llama)")
    parser.add_argument("--dtypes", default="float32", help="their dtypes, taking turns (default float32)")
    parser.add_argument("--repeat", type=int, default=1, help="runs per device within one run (default 1)")
    parser.add_argument("--base", help="a folder in place of built-in cases")
    parser.add_argument("--adapter")
    parser.add_argument("--ids", type=int, help="random token ids of each sequence, others in each run")
    parser.add_argument("--first", type=int, default=0, help="the first seed of these (default 0)")
    parser.add_argument("--stages", help="stages of each run (default: those of its level)")
    arguments = parser.parse_args()
    started = time.monotonic()
    alarms = rows = 0
    largest = 0.0
    cases = [f"builtin:{case}" for case in arguments.cases.split(",")] if arguments.base is None else [arguments.base]
    own = ["--adapter", arguments.adapter] if arguments.adapter else []
    own += ["--stages", arguments.stages] if arguments.stages else []
    turns = itertools.cycle(itertools.product(cases, arguments.dtypes.split(",")))
    for number, (case, dtype) in zip(range(1, arguments.runs + 1), turns, strict=False):
        command = [sys.executable, "-m", "consistency", "run", "--base", case, *own, "--dtype", dtype, "--json"]
        with tempfile.TemporaryDirectory() as scratch:
            if arguments.ids:
                command += ["--inputs", random_ids(case, arguments, number, Path(scratch))]
            done = subprocess.run(
                [*command, "--repeat", str(arguments.repeat)], check=False, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
        report = json.loads(done.stdout)
        found = [f for f in report["findings"] if f["severity"] != "note"]
        judged = report["outcomes"]
        rows += sum(report["cohorts"][row["cohort"]]["count"] for row in judged)
        largest = max([largest, *(float(row["ratio"] or 0) for row in judged)])
        if done.returncode or found:
            alarms += 1
            print(f"run {number}, {case} {dtype}: status {done.returncode}", *(f["message"] for f in found), sep="\n  ")
    minutes = (time.monotonic() - started) / 60
    print(f"{arguments.runs} runs with {arguments.repeat} repeats each in {minutes:.0f} minutes, {rows} rows judged")
    print(f"{alarms} runs with a finding; largest share of a bound {largest:.3f}")
    return 1 if alarms else 0


def random_ids(base: str, arguments: argparse.Namespace, number: int, folder: Path) -> str:
    """Write ids of a vocabulary, as many runs of one seed as there are dtypes."""
    config = json.loads((Path(base) / "config.json").read_text(encoding="utf-8"))
    seed = arguments.first + (number - 1) // len(arguments.dtypes.split(","))
    ids = np.random.Generator(np.random.PCG64(seed)).integers(0, config["vocab_size"], (4, arguments.ids))
    save_file({"input_ids": ids, "attention_mask": np.ones_like(ids)}, folder / "ids.safetensors")
    return str(folder / "ids.safetensors")


if __name__ == "__main__":
    sys.exit(main())
