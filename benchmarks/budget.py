"""Compare what `--plan` estimates with what a run really took, stage by stage.

    python -m benchmarks.shapes DIR tinyllama
    python -m benchmarks.budget DIR                            # memory of DIR/base with DIR/linear
    python -m benchmarks.budget DIR --threads 1                # where other processes use the processor
    python -m benchmarks.budget DIR8 DIR70 --plan-only         # time of the plan itself; headers are enough
    python -m benchmarks.budget DIR8 DIR14 --cards 24,40       # which cards hold the base; headers are enough

The estimated memory is that of the process at its peak, private and mapped, like the resident size that the run
records. The time that each stage took is shown beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from consistency.case.budget.placement import needed_bytes
from consistency.case.budget.shape import read_shape
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.worker.memory.offload_choice import CONTEXT_BYTES

MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="DIR", help="with base/ and adapters, by shapes.py")
    parser.add_argument("--adapter", default="linear")
    parser.add_argument("--stages", help="default: those of the level")
    parser.add_argument("--threads", type=int, help="of the worker (default: all)")
    parser.add_argument("--plan-only", action="store_true", help="time the plan, and run nothing")
    parser.add_argument("--cards", help="GiB of memory of cards, with commas: say which hold the base, and run nothing")
    arguments = parser.parse_args()
    if arguments.cards:
        _show_cards(arguments.folders, arguments.adapter, [float(one) for one in arguments.cards.split(",")])
        return
    for folder in arguments.folders:
        case = ["--base", str(folder / "base"), "--adapter", str(folder / arguments.adapter), "--devices", "cpu"]
        case += ["--stages", arguments.stages] if arguments.stages else []
        case += ["--threads", str(arguments.threads)] if arguments.threads else []
        started = time.perf_counter()
        planned = json.loads(_consistency("run", *case, "--plan", "--json"))
        took_s = time.perf_counter() - started
        elements = planned["model"]["elements"] / 1e9
        print(f"{folder.name}: {elements:.2f} B parameters, planned in {took_s:.2f} s (wanted: under 2 s)")
        if not arguments.plan_only:
            with tempfile.TemporaryDirectory(prefix="budget-") as scratch:
                _consistency("run", *case, "--out", scratch, "--force", "--stall", "3600")
                (worker,) = (json.loads(p.read_bytes()) for p in Path(scratch).glob("captures/workers/*/worker.json"))
            _show(planned["workers"][0], worker)


def _show_cards(folders: Sequence[Path], adapter: str, cards: Sequence[float]) -> None:
    """Print what a card needs for each model, and how many cards of a size may see one another, at most."""
    print(f"| model | needed | {' | '.join(f'cards of {card:g} GiB' for card in cards)} |")
    print("|---|---|" + "---|" * len(cards))
    for folder in folders:
        case = prepare_case(Options(base=str(folder / "base"), adapter=str(folder / adapter)))
        needed = needed_bytes(case, read_shape(case))
        most = [int((card * 2**30 - needed) // CONTEXT_BYTES) for card in cards]  # its own context is one of them
        cells = [f"up to {one}" if one > 0 else "none: streamed" for one in most]
        print(f"| {folder.name} | {needed / 2**30:.1f} GiB | {' | '.join(cells)} |")


def _consistency(*arguments: str) -> bytes:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "consistency", *arguments], env=environment, capture_output=True, check=False
    )
    if done.returncode not in (0, 1):  # random weights may give a finding: the figures are the same
        sys.exit(f"ended with {done.returncode}:\n{done.stdout.decode()}{done.stderr.decode()}")
    return done.stdout


def _show(planned: dict[str, Any], actual: dict[str, Any]) -> None:
    taken = {stage["stage"]: stage for stage in actual["stage_memory"]}
    print(f"{'':26}{'memory, MiB':^32}{'seconds':^21}")
    print(f"{'stage':26}{'estimate':>10}{'peak':>10}{'ratio':>10}{'wall':>12}{'processor':>11}")
    for stage in planned["stages"]:
        found = taken.get(stage["stage"])
        if found is None:
            continue
        memory = (stage["host_private_bytes"] + stage["host_mapped_bytes"]) / MIB
        peak = found["host_peak_bytes"] / MIB
        taken_s = f"{found['elapsed_s']:12.2f}{found['processor_s']:11.2f}"
        print(f"{stage['stage']:26}{memory:10.0f}{peak:10.0f}{memory / peak:10.2f}{taken_s}")
    whole = max(stage["host_private_bytes"] + stage["host_mapped_bytes"] for stage in planned["stages"]) / MIB
    peak = actual["peak_bytes"] / MIB
    print(f"{'all':26}{whole:10.0f}{peak:10.0f}{whole / peak:10.2f}")


if __name__ == "__main__":
    main()
