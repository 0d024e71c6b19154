"""Measure what a watch costs a training: seconds of a check, over the steps between two checks.

Two ranks train an adapter by DistributedDataParallel and gloo, each on one core. A check is the last watched step
less a usual one; the ratio is that of an interval of `--every` steps, which would take hours here.

    python -m benchmarks.watch_cost BASE ADAPTER [--every 200] [--steps 6]
    python -m benchmarks.watch_cost BASE ADAPTER --ranks 1 --beside    # the CPU's part in a process beside it
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def train(rank: int, folder: str, base: str, adapter: str, steps: int, tokens: int, world: int, beside: bool) -> None:
    """Train without the watch and with it, and write the seconds of each step, and those of the processor."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    import consistency

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    plain_model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = DistributedDataParallel(PeftModel.from_pretrained(plain_model, adapter, is_trainable=True))
    optimizer = torch.optim.AdamW([tensor for tensor in model.parameters() if tensor.requires_grad], lr=1e-4)
    torch.manual_seed(rank)

    def step() -> tuple[float, float]:
        ids = torch.randint(0, 1000, (2, tokens))
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.monotonic() - began_s, time.process_time() - began_cpu_s

    step()
    plain = [step() for _ in range(steps)]
    watch = consistency.watch.Watch(model, optimizer, every=steps, output=folder, beside=beside)
    watched = [step() for _ in range(steps)]
    if rank == 0:
        (Path(folder) / "seconds.json").write_text(json.dumps({"plain": plain, "watched": watched}))
    watch.close()
    dist.destroy_process_group()


def main() -> int:
    """Print the ratio of a training with the watch to one without it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("adapter")
    parser.add_argument("--every", type=int, default=200)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--beside", action="store_true", help="judge blocks beside the training")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, given.base, given.adapter, given.steps, given.tokens, given.ranks, given.beside)
        mp.spawn(train, arguments, nprocs=given.ranks)  # type: ignore[attr-defined,no-untyped-call]
        seconds: dict[str, Any] = json.loads((Path(folder) / "seconds.json").read_text())
    # other work on the machine makes steps wait, so that processor time tells more there
    for number, kind in enumerate(("time", "processor time of a rank")):
        plain = statistics.median(taken[number] for taken in seconds["plain"])
        unchecked = statistics.median(taken[number] for taken in seconds["watched"][3:-1])
        check = seconds["watched"][-1][number] - unchecked
        print(f"{kind}: a step: {plain:.3f} s; with the watch, unchecked: {unchecked:.3f} s; a check: {check:.3f} s")
        print(f"ratio at every={given.every}: {(unchecked * given.every + check) / (plain * given.every):.4f}")
        print(f"of that, the check alone: {check / (plain * given.every):.4f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
