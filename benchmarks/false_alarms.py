"""Run the built-in cases again and again on healthy hardware, and count what is found: it has to be nothing.

    python benchmarks/false_alarms.py --runs 50

Each run is the whole command, in processes of their own, over every device of this machine (the kernel variants of the
CPU where there is no accelerator). A finding that is more than a note is printed, and ends the script with status 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50, help="how many runs in all (default 50)")
    parser.add_argument("--cases", default="llama", help="built-in cases, taking turns (default llama)")
    parser.add_argument("--dtypes", default="float32", help="their dtypes, taking turns (default float32)")
    parser.add_argument("--repeat", type=int, default=1, help="runs per device within one run (default 1)")
    arguments = parser.parse_args()
    started = time.monotonic()
    alarms = rows = 0
    largest = 0.0
    turns = itertools.cycle(itertools.product(arguments.cases.split(","), arguments.dtypes.split(",")))
    for number, (case, dtype) in zip(range(1, arguments.runs + 1), turns, strict=False):
        command = [sys.executable, "-m", "consistency", "run", "--base", f"builtin:{case}", "--dtype", dtype, "--json"]
        done = subprocess.run(
            [*command, "--repeat", str(arguments.repeat)],
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
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


if __name__ == "__main__":
    sys.exit(main())
