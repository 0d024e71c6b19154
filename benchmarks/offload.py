"""Check a model on a device smaller than it: a software accelerator with as much memory as is asked for.

    python -m benchmarks.shapes DIR small
    python -m benchmarks.offload --base DIR/base --adapter DIR/linear --device-mib 200

Prints what `consistency run` prints, and per stage of the device's worker: private memory of the host and peak memory
of the device, both in MiB, and seconds of processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.accelerator.build import build
from tests.accelerator.software_accelerator.settings import VARIABLE

MIB = 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True)
    parser.add_argument("--adapter", required=True)
    parser.add_argument("--device-mib", type=int, default=200)
    given, others = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as scratch:
        double, out = build(Path(scratch)), Path(scratch) / "out"
        path = os.pathsep.join([str(double), *filter(None, [os.environ.get("PYTHONPATH")])])
        settings = json.dumps({"devices": 1, "memory_bytes": given.device_mib * MIB})
        environment = {**os.environ, "PYTHONPATH": path, VARIABLE: settings, "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "consistency", "run", "--base", given.base, "--adapter", given.adapter]
        command += ["--devices", "cpu,npu:0", "--out", str(out), *others]
        done = subprocess.run(command, env=environment, check=False)
        worker: dict[str, Any] = json.loads((out / "captures/workers/npu_0.isolated/worker.json").read_text())
    print(worker["environment"].get("placement"))
    for stage in worker["stage_memory"]:
        private, peak = stage["host_private_bytes"] / MIB, (stage["device_peak_bytes"] or 0) / MIB
        print(f"{stage['stage']:24} {private:8.0f} {peak:8.0f} {stage['processor_s']:8.1f}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
