"""Time a check of a model of real size against bare transformers and PEFT, and look at its memory.

    python -m benchmarks.shapes DIR tinyllama
    python -m benchmarks.large DIR                      # adapter DIR/linear, level standard, on the CPU
    python -m benchmarks.large DIR --rounds 3           # the same three times: ratios of medians
    python -m benchmarks.large DIR --adapter whole --stages gradient

Bare is one process that does, by hand and with as many threads, what a check cannot do without:

* *rest*: load the base, load the adapter, merge it, two forward passes of the inputs of the level standard in the dtype
  of the model, and one in float64, block by block: each block is widened when it is run, and narrowed again;
* *gradient*: two plain backward passes of the same inputs in float32, and one in float64, block by block: forwards
  without keeping activations, then backwards, each block run once more.

The files of the base are read once before each, so that both find them in the page cache as far as it holds them.
Imports count on neither side. Of the check the seconds of its stages are added up, as the worker records them.

Memory is the peak of the worker's resident pages, mapped ones included (`VmHWM`), and of its private ones.
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
from typing import Any

_BARE = """
import copy, json, sys, time
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

base, adapter, what = sys.argv[1:]
clock = {}

def timed(name, action):
    wall, cpu = time.perf_counter(), time.process_time()
    found = action()
    clock[name] = (time.perf_counter() - wall, time.process_time() - cpu)
    return found

ids = torch.randint(0, 1000, (8, 16), generator=torch.Generator().manual_seed(0))

def load(dtype):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    return model

def parts_of(model):
    inner = model.base_model.model
    return inner.model, inner.lm_head

class Wide:
    # a module in float64 while it runs
    def __init__(self, module):
        self.module = module
    def __enter__(self):
        self.kept = [(p, p.data) for p in self.module.parameters()]
        for p, data in self.kept:
            p.data = data.double()
        return self.module
    def __exit__(self, *_):
        for p, data in self.kept:
            p.data = data

def float64_forward(model):
    inner, head = parts_of(model)
    with torch.no_grad():
        with Wide(inner.embed_tokens) as embed:
            x = embed(ids)
        rotary = inner.rotary_emb(x, torch.arange(ids.shape[1])[None])
        for block in inner.layers:
            with Wide(block) as wide:
                x = wide(x, position_embeddings=rotary)
        with Wide(inner.norm) as norm:
            x = norm(x)
        with Wide(head) as wide:
            return wide(x)

def plain_backward(model):
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)
    model(input_ids=ids).logits.sum().backward()
    model.zero_grad()

def float64_backward(model):
    inner, head = parts_of(model)
    with torch.no_grad():
        with Wide(inner.embed_tokens) as embed:
            x = embed(ids)
        rotary = inner.rotary_emb(x, torch.arange(ids.shape[1])[None])
        states = [x]
        for block in inner.layers:
            with Wide(block) as wide:
                states.append(wide(states[-1], position_embeddings=rotary))
    x = states[-1].requires_grad_()
    norm, twin = copy.deepcopy(inner.norm).double(), copy.deepcopy(head).double()
    logits = twin(norm(x))
    (gradient,) = torch.autograd.grad(logits, x, torch.ones_like(logits))
    del twin
    for block, x in zip(reversed(inner.layers), reversed(states[:-1])):
        twin = copy.deepcopy(block).double()
        factors = [p for n, p in twin.named_parameters() if "lora_" in n]
        for p in factors:
            p.requires_grad_()
        x = x.detach().requires_grad_()
        gradient, *_ = torch.autograd.grad(twin(x, position_embeddings=rotary), [x, *factors], gradient)

if what == "rest":
    model = timed("load", lambda: load("auto"))
    model = timed("adapter", lambda: PeftModel.from_pretrained(model, adapter).eval())
    with torch.no_grad():
        timed("forward", lambda: (model(input_ids=ids), model(input_ids=ids)))
    timed("float64", lambda: float64_forward(model))
    timed("merge", model.merge_adapter)
else:
    model = PeftModel.from_pretrained(load(torch.float32), adapter).eval()
    timed("float32", lambda: (plain_backward(model), plain_backward(model)))
    timed("float64", lambda: float64_backward(model))
print(json.dumps(clock))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="with base/ and adapters, by shapes.py")
    parser.add_argument("--adapter", default="linear")
    parser.add_argument("--stages", help="default: those of the level standard")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--no-bare", action="store_true", help="the check alone")
    arguments = parser.parse_args()
    rounds = [_one(arguments) for _ in range(arguments.rounds)]
    if len(rounds) > 1 and not arguments.no_bare:
        for what in rounds[0]:
            wall, cpu = (
                statistics.median(taken[what][0][i] for taken in rounds)
                / statistics.median(taken[what][1][i] for taken in rounds)
                for i in range(2)
            )
            print(f"{what} / bare, medians of {len(rounds)} rounds: {wall:.2f} wall, {cpu:.2f} cpu")


def _one(arguments: argparse.Namespace) -> dict[str, tuple[list[float], list[float]]]:
    """Run both sides once, show them, and return the seconds of the check and of the bare work by what they are for."""
    base, adapter = arguments.folder / "base", arguments.folder / arguments.adapter
    bare: dict[str, dict[str, list[float]]] = {}
    if not arguments.no_bare:
        for what in ("rest", "gradient"):
            _read(base)
            bare[what] = json.loads(_run(arguments.threads, "-c", _BARE, str(base), str(adapter), what))
    with tempfile.TemporaryDirectory(prefix="large-") as scratch:
        case = ["--base", str(base), "--adapter", str(adapter), "--devices", "cpu", "--out", scratch, "--force"]
        case += ["--stages", arguments.stages] if arguments.stages else []
        _read(base)
        _run(arguments.threads, "-m", "consistency", "run", *case, "--threads", str(arguments.threads))
        report = json.loads(Path(scratch, "report.json").read_bytes())
        (worker,) = (json.loads(p.read_bytes()) for p in Path(scratch).glob("captures/workers/*/worker.json"))
    size = sum(path.stat().st_size for path in base.glob("*.safetensors"))
    print(f"{arguments.folder.name} + {arguments.adapter}: {report['verdict']}, base {size / 1e6:.0f} MB")
    _show_stages(worker["stage_memory"])
    taken = _totals(worker["stage_memory"], bare)
    for what, steps in bare.items():
        print(
            f"bare, {what}: " + ", ".join(f"{name} {wall:.1f} s ({cpu:.1f} cpu)" for name, (wall, cpu) in steps.items())
        )
        wall, cpu = (mine / by_hand for mine, by_hand in zip(*taken[what], strict=True))
        print(f"{what} / bare: {wall:.2f} wall, {cpu:.2f} cpu (wanted: at most 1.5)")
    print(f"peak resident {worker['peak_bytes'] / 1e6:.0f} MB, {worker['peak_bytes'] / size:.2f} of the base")
    return taken


def _read(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def _run(threads: int, *arguments: str) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _show_stages(stages: list[dict[str, Any]]) -> None:
    print(f"{'':26}{'wall s':>10}{'cpu s':>10}{'peak MB':>10}{'private MB':>12}")
    for stage in stages:
        memory = f"{stage['host_peak_bytes'] / 1e6:>10.0f}{stage['host_private_bytes'] / 1e6:>12.0f}"
        print(f"{stage['stage']:26}{stage['elapsed_s']:>10.1f}{stage['processor_s']:>10.1f}{memory}")


def _totals(
    stages: list[dict[str, Any]], bare: dict[str, dict[str, list[float]]]
) -> dict[str, tuple[list[float], list[float]]]:
    found = {}
    for what, steps in bare.items():
        mine = [stage for stage in stages if (stage["stage"] == "gradient") == (what == "gradient")]
        checked = [sum(stage[key] for stage in mine) for key in ("elapsed_s", "processor_s")]
        found[what] = checked, [sum(step[i] for step in steps.values()) for i in range(2)]
    return found


if __name__ == "__main__":
    main()
