"""Lose one of four devices in each phase of a run, by each of four errors: what is said of it, and of the others.

    python -m benchmarks.lost_device              # all 24 runs
    python -m benchmarks.lost_device forward ecc  # those of a phase, of an error

Prints a Markdown table. A run is right if it ends with status 3 and a report, the one device is lost with the words of
its runtime, and the CPU and the three others are compared and have no finding.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.accelerator.build import build
from tests.accelerator.lost_device import ERRORS, PHASES, Loss, LossyRun
from tests.accelerator.software_accelerator.settings import VARIABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended: its status, the reason of the lost worker, and what is wrong about it."""

    status: int
    reason: str
    wrong: Sequence[str]


def main(wanted: Sequence[str]) -> int:
    """Run the chosen losses; return 1 if one of them is not told as it should be."""
    losses = [Loss(phase=phase, error=error) for phase in PHASES for error in ERRORS]
    chosen = [loss for loss in losses if not wanted or {loss.phase, loss.error} & set(wanted)]
    bad = 0
    print("| lost in | by | exit | what is said of the device | right |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        double = build(Path(scratch))
        for number, loss in enumerate(chosen):
            found = _run(loss, double, Path(scratch) / str(number))
            bad += bool(found.wrong)
            right = "; ".join(found.wrong) or "yes"
            print(f"| {loss.phase} | {loss.error} | {found.status} | {found.reason} | {right} |", flush=True)
    return int(bad > 0)


def _run(loss: Loss, double: Path, out: Path) -> Outcome:
    path = os.pathsep.join([str(double), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = LossyRun(loss)
    environment = {
        **os.environ, "PYTHONPATH": path, VARIABLE: json.dumps(run.settings), "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    words = [word for name, value in run.options.items() for word in (f"--{name.replace('_', '-')}", value)]
    command = [sys.executable, "-P", "-m", "consistency", "run", "--out", str(out), *words]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    report: dict[str, Any] | None = None
    if (out / "report.json").exists():
        report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    reasons = [] if report is None else [w["reason"] or "" for w in report["workers"] if w["name"] == loss.device]
    said = "<br>".join(dict.fromkeys(reasons)) or (done.stderr.strip().splitlines() or [""])[0][:160]
    return Outcome(status=done.returncode, reason=said.replace("|", "\\|"), wrong=run.wrong(done.returncode, report))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
