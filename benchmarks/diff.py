"""Time `consistency diff` of two saved state dicts against a lower limit and against hand-written comparisons.

    python benchmarks/diff.py

Writes two float32 state dicts of safetensors (1 GiB, 200 tensors), once with three flipped bits between them and once
with every element off by rounding. Each comparison runs in a separate process, in interleaved rounds. The time is from
the files to the answer without imports, with the files in the page cache. The lower limit is to compare the two
memory-mapped files block by block with NumPy, which reports whether they differ, and in which block. Also printed: the
peak anonymous memory of each process, including torch's own if it uses torch. With CONSISTENCY_NO_KERNEL set, NumPy
replaces the compiled kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

BLOCK = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of one state dict (default 1024)")
    parser.add_argument("--tensors", type=int, default=200, help="how many tensors it has (default 200)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the files are written (default: a temporary folder)")
    parser.add_argument("--job", nargs=3, metavar=("NAME", "A", "B"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        name, a, b = arguments.job
        print(json.dumps(_timed(JOBS[name], a, b)))
        return
    from consistency.numerics.kernels import trust  # it imports torch, whose memory is not that of each job

    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        files = _make(Path(folder), arguments.mib, arguments.tensors)
        print(f"{arguments.mib} MiB in {arguments.tensors} float32 tensors, {os.cpu_count()} processors")
        print(f"numerics by {trust.state()}")
        for case, pair in files.items():
            _report(case, pair, arguments.rounds)


def _report(case: str, pair: tuple[Path, Path], rounds: int) -> None:
    best: dict[str, dict[str, float]] = {}
    for _ in range(rounds):
        for name in JOBS:
            command = [sys.executable, __file__, "--job", name, *map(str, pair)]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            if name not in best or found["seconds"] < best[name]["seconds"]:
                best[name] = found
    floor, ours = best["NumPy, block by block"]["seconds"], best["consistency diff"]["seconds"]
    print(f"\n{case}\n{'':26}{'s':>8}{'of the floor':>14}{'over ours':>11}{'anonymous MB':>14}")
    for name, found in best.items():
        seconds = found["seconds"]
        print(f"{name:26}{seconds:8.3f}{seconds / floor:14.2f}{seconds / ours:11.2f}{found['anonymous_mb']:14.0f}")


def _make(folder: Path, mib: int, tensors: int) -> dict[str, tuple[Path, Path]]:
    from safetensors.numpy import save_file

    size = mib * 2**20 // tensors // 4
    rng = np.random.default_rng(0)
    state = {f"layers.{i}.weight": rng.standard_normal(size, dtype=np.float32) for i in range(tensors)}
    save_file(state, folder / "a.safetensors")
    flipped = dict(state)
    for name, place, bit in (("layers.0.weight", 5, 0), (f"layers.{tensors // 2}.weight", size // 2, 30)):
        flipped[name] = state[name].copy()
        flipped[name].view(np.uint32)[place] ^= np.uint32(1 << bit)
    last = f"layers.{tensors - 1}.weight"
    flipped[last] = state[last].copy()
    flipped[last].view(np.uint32)[-1] ^= np.uint32(1 << 31)
    save_file(flipped, folder / "b.safetensors")
    del flipped
    for name, values in state.items():
        steps = rng.integers(1, 4, size) * rng.choice([-1, 1], size)
        state[name] = values * (1 + steps * 2.0**-23).astype(np.float32)
    save_file(state, folder / "c.safetensors")
    a, b, c = (folder / f"{name}.safetensors" for name in "abc")
    return {"three bits differ": (a, b), "every element differs by rounding": (a, c)}


def _timed(job: Callable[[str, str], object], a: str, b: str) -> dict[str, float]:
    run = job(a, b)  # does its imports, and returns what is timed
    assert callable(run)
    peak, done = 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, _anonymous_mb())
            done.wait(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    return {"seconds": seconds, "anonymous_mb": max(peak, _anonymous_mb())}


def _anonymous_mb() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


def _floor(a: str, b: str) -> Callable[[], object]:
    def run() -> list[int]:
        x, y = np.memmap(a, np.uint8, "r"), np.memmap(b, np.uint8, "r")
        return [i for i in range(0, len(x), BLOCK) if not np.array_equal(x[i : i + BLOCK], y[i : i + BLOCK])]

    return run


def _ours(a: str, b: str) -> Callable[[], object]:
    import consistency.numerics.stored
    from consistency.extras.merging.diff.weights import diff_weights

    assert consistency.numerics.stored
    return lambda: diff_weights(Path(b), Path(a))


def _loop(a: str, b: str) -> Callable[[], object]:
    import torch
    from safetensors.torch import load_file

    def run() -> None:
        x, y = load_file(a), load_file(b)
        for name, e in x.items():
            d = y[name] - e
            d.abs().max().item(), d.abs().mean().item(), (d**2).mean().item(), torch.equal(y[name], e)

    return run


def _assert_close(a: str, b: str) -> Callable[[], object]:
    import torch
    from safetensors.torch import load_file

    def run() -> None:
        x, y = load_file(a), load_file(b)
        for name, e in x.items():
            try:
                torch.testing.assert_close(y[name], e)
            except AssertionError:
                continue

    return run


JOBS: dict[str, Callable[[str, str], Callable[[], object]]] = {
    "NumPy, block by block": _floor,
    "consistency diff": _ours,
    "the reporters' loop": _loop,
    "assert_close": _assert_close,
}


if __name__ == "__main__":
    main()
