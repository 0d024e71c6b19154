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
    folder, adapter = (given := parser.parse_args()).folder, given.folder / given.adapter
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        script, out = Path(scratch) / "bare.py", Path(scratch) / "out"
        script.write_text(_BARE, encoding="utf-8")
        ranks = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
        words = [*ranks, str(folder / "base"), str(adapter), str(STEPS)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        bare = float(done.stdout.split()[-1])
        command = [sys.executable, "-P", "-m", "consistency", "run", "--base", str(folder / "base"), "--out", str(out)]
        command += ["--adapter", str(adapter), "--devices", "cpu,cpu@avx512", "--threads", "1", "--stages", "replicas"]
        subprocess.run(command, env=environment, capture_output=True, check=True)
        report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    stages = [one for worker in report["workers"] for one in worker["stage_memory"] if one["stage"] == "replicas"]
    stage = max(one["elapsed_s"] for one in stages)
    print(f"bare {bare:.1f} s, stage {stage:.1f} s: the check takes {(stage - bare) / bare:.2f} of the bare training")
    print(f"peak {max(one['host_peak_bytes'] for one in stages) / 2**30:.1f} GiB a rank, mapped files included")


if __name__ == "__main__":
    main()
