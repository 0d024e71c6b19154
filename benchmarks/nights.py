"""Check a small case on this machine for 400 nights, one after the other, and see every change found with its night.

    python -m benchmarks.nights                 # 400 nights
    python -m benchmarks.nights --nights 40     # a tenth of them, with the changes at the same parts of the time

Real runs of `consistency run --history` on `builtin:llama`, one after the other. A night is a fork of this process,
which has imported the libraries and run no operation, and its worker runs in it. From one night on matrices are
multiplied by the oldest kernels, and nothing that is recorded says so: the device computes other bits. From a later one
the adapter has other values. Between two changes nothing may be found. Prints what `consistency history --changes`
says, and what a night takes at the beginning and at the end.
"""

from __future__ import annotations

import argparse
import datetime
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

KERNELS = {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
"""Of products of matrices. Those of ATEN_CPU_CAPABILITY are recorded, however they were chosen."""
STAGES = "base,adapter,merged,forward"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nights", type=int, default=400)
    given = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    import_libraries()
    kernels_from, adapter_from = given.nights * 5 // 8, given.nights * 7 // 8
    with tempfile.TemporaryDirectory(prefix="consistency-nights-") as scratch:
        home = Path(scratch)
        history, first, other = home / "history", home / "first", home / "other"
        copy_adapter(first, 1.0)
        copy_adapter(other, 1.5)
        took, found, begins = [], [], []
        for number in range(given.nights):
            adapter = other if number >= adapter_from else first
            began = time.monotonic()
            begins.append(f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S}")
            status = night(adapter, history, home / "out", other_kernels=number >= kernels_from)
            took.append(time.monotonic() - began)
            if status:
                found.append(number + 1)
        edge = max(1, given.nights // 10)
        at_first, at_last = statistics.median(took[:edge]), statistics.median(took[-edge:])
        size = sum(file.stat().st_size for file in history.rglob("*") if file.is_file())
        command = [sys.executable, "-P", "-m", "consistency", "history", str(history)]
        began = time.monotonic()
        changes = subprocess.run([*command, "--changes"], check=True, capture_output=True, text=True).stdout
        reading = time.monotonic() - began
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        changed = f"other kernels from {begins[kernels_from]}, other values from {begins[adapter_from]}"
        print(f"{given.nights} nights; {changed}")
        print(f"a night: {at_first:.2f} s at first, {at_last:.2f} s at last; peak {peak:.0f} MB")
        print(f"not consistent: {len(found)} nights" + (f", from {found[0]} to {found[-1]}" if found else ""))
        print(f"history: {size / 1e6:.2f} MB; its changes in {reading:.1f} s:", changes, sep="\n")
    return 0


def import_libraries() -> None:
    """Import what a night needs, so that the nights share it."""
    import peft  # noqa: F401
    import transformers  # noqa: F401

    import consistency.cli.main
    import consistency.worker.session  # noqa: F401


def copy_adapter(folder: Path, factor: float) -> None:
    """Write the built-in adapter with its values times a factor."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    from consistency.case.builtin import resolve

    _, adapter = resolve("builtin:llama", None)
    assert adapter is not None
    folder.mkdir()
    for file in Path(adapter).iterdir():
        if file.suffix == ".safetensors":
            save_file({name: value * np.float32(factor) for name, value in load_file(file).items()}, folder / file.name)
        else:
            (folder / file.name).write_bytes(file.read_bytes())


def night(adapter: Path, history: Path, out: Path, *, other_kernels: bool) -> int:
    """Run the case in a fork of this process; return its exit status."""
    pid = os.fork()
    if not pid:
        if other_kernels:
            choose_kernels()
        os._exit(_run(["run", "--base", "builtin:llama", "--adapter", str(adapter), "--devices", "cpu",
                       "--stages", STAGES, "--load-paths", "isolated", "--quiet",
                       "--history", str(history), "--out", str(out), "--force"]))  # fmt: skip
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def choose_kernels() -> None:
    """Have MKL and oneDNN choose their oldest kernels, and leave no trace of it in the environment."""
    import torch

    os.environ |= KERNELS
    for dtype in (torch.float32, torch.bfloat16):
        torch.nn.functional.linear(torch.ones(32, 32, dtype=dtype), torch.ones(32, 32, dtype=dtype)).sum()
    for name in KERNELS:
        del os.environ[name]


def _run(arguments: Sequence[str]) -> int:
    from consistency.cli.main import main as consistency
    from tests.launch.in_this_process import in_this_process

    printed = os.open(os.devnull, os.O_WRONLY)
    os.dup2(printed, 1)
    try:
        with in_this_process():
            return consistency(list(arguments))
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    finally:
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
