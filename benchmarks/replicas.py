"""Time the stage `replicas` against a bare training of as many steps by DistributedDataParallel.

    python -m benchmarks.shapes DIR tinyllama
    python -m benchmarks.replicas DIR               # base DIR/base, adapter DIR/linear, two ranks of one CPU

Both have the same steps, batches of the same size, one thread a rank, and the same kernels on both ranks. The bare one
wraps the model and trains; imports and loading count on neither side. What is left of the stage is the check.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 3

_BARE = """
import sys, time
import torch, torch.distributed as dist
from peft import PeftModel
from transformers import AutoModelForCausalLM

dist.init_process_group("gloo")
base, adapter, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
model = PeftModel.from_pretrained(model, adapter, is_trainable=True).eval()
for tensor in model.state_dict().values():
    tensor.flatten()[::1024].clone()  # one number of each page: the stage finds the mapped file read
began = time.perf_counter()
wrapped = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, 1e-3, foreach=False, fused=False)
for _ in range(steps):
    ids = torch.randint(0, model.config.vocab_size, (2, 16))
    wrapped(input_ids=ids).logits.float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print(time.perf_counter() - began)
dist.destroy_process_group()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--adapter", default="linear")
    parser.add_argument("--rounds", type=int, default=3, help="of both, taking turns; medians are printed")
    arguments = parser.parse_args()
    base, adapter = arguments.folder / "base", arguments.folder / arguments.adapter
    rounds = [(bare(base, adapter), *stage(base, adapter)) for _ in range(arguments.rounds)]
    bares, stages, peaks = zip(*rounds, strict=True)
    ratios = sorted((whole - alone) / alone for alone, whole in zip(bares, stages, strict=True))
    print(f"bare {statistics.median(bares):.1f} s, stage {statistics.median(stages):.1f} s")
    print(f"the check takes {statistics.median(ratios):.2f} of the bare training ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    print(f"peak {max(peaks) / 2**30:.1f} GiB a rank, mapped files included")


def bare(base: Path, adapter: Path) -> float:
    """Return the seconds of the training by itself."""
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch) / "bare.py"
        script.write_text(_BARE, encoding="utf-8")
        ranks = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
        words = [*ranks, str(base), str(adapter), str(STEPS)]
        done = subprocess.run(words, env=_environment(), capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def stage(base: Path, adapter: Path) -> tuple[float, int]:
    """Return the seconds of the stage on the slower rank, and the most bytes that a rank held."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-P", "-m", "consistency", "run", "--base", str(base), "--adapter", str(adapter)]
        command += ["--devices", "cpu,cpu@avx512", "--threads", "1", "--stages", "replicas", "--out", f"{scratch}/out"]
        subprocess.run(command, env=_environment(), capture_output=True, check=True)
        report = json.loads(Path(scratch, "out", "report.json").read_text(encoding="utf-8"))
    seen = [one for worker in report["workers"] for one in worker["stage_memory"] if one["stage"] == "replicas"]
    return max(one["elapsed_s"] for one in seen), max(one["host_peak_bytes"] for one in seen)


def _environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    main()
