"""The tool on a node of a test: its real command line, with a capture that was made before in place of the workers.

So a node takes a second instead of ten, and its faults can be told to it by name: NODE_FAULTS is a JSON object. The
nodes of a cluster on one machine share everything else.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from consistency.capture.folder import Capture
from consistency.capture.reader import read_capture
from consistency.capture.transport import deliver
from consistency.cli import main, node_report
from consistency.worker.protocol import Event
from consistency.workflows import pipeline
from tests.capture.whole import fetch

NODE = os.environ.get("SLURMD_NODENAME") or os.environ["NODE"]
FAULT = json.loads(os.environ.get("NODE_FAULTS", "{}")).get(NODE, "")
MADE = Path(os.environ["NODE_CAPTURES"])
"""Captures that were made before: `NODE.zip`, or `any.zip`."""


def capture_to(plan: pipeline.Plan, target: str, *, watch: Any, replace: bool = False) -> Capture:
    """Take the place of `pipeline.capture_to`."""
    watch("cpu", Event(at=time.time(), kind="stage", stage="base"))
    if FAULT == "slow":  # until the test lets it go on
        while not (MADE / "go").exists():
            time.sleep(0.1)
    if FAULT == "hang":
        time.sleep(3600)
    own = MADE / f"{NODE}.zip"
    scratch = MADE / f"scratch-{NODE}"
    folder = fetch(str(own if own.exists() else MADE / "any.zip"), scratch)
    found = read_capture(folder)
    if FAULT == "full":  # as a full disk does to every file but the status, which has its block already
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    deliver(folder, target)
    shutil.rmtree(scratch)
    return found


def run() -> int:
    """Run the command line of a node."""
    arguments = sys.argv[1:]
    if FAULT == "files":
        home = MADE / f"other-adapter-{NODE}"
        shutil.copytree(os.environ["NODE_ADAPTER"], home, dirs_exist_ok=True)
        with (home / "adapter_model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x7f")
        arguments = [*arguments, "--base=builtin:llama", f"--adapter={home}"]
    if FAULT == "bare":  # its accelerators are there no more
        os.environ["ASCEND_RT_VISIBLE_DEVICES"] = ""
    if FAULT == "software":
        usual = node_report._software
        node_report._software = lambda: {**usual(), "peft": "0.1.0"}  # the tool asks its own interpreter
    pipeline.capture_to = capture_to
    return main.main(arguments)


if __name__ == "__main__":
    if FAULT == "crash":
        sys.exit("cannot find the interpreter")
    sys.exit(run())
