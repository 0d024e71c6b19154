"""Time a run of several workers against bare processes that load the same model and adapter and merge it.

    python benchmarks/run.py

A random base of half a gigabyte and a LoRA adapter on its linear layers are made in a temporary folder. Then two take
turns. As many bare processes as the run has workers, one after the other, on as many threads as torch takes: each
imports, loads the base (`from_pretrained`) and the adapter (`PeftModel.from_pretrained`) and merges (`merge_adapter`).
And one `consistency run` over the stages base, adapter and merged. Each figure is the best of several rounds, whole
processes with their imports. A process's peak of resident memory is the kernel's high-water mark of its own, read
before it ends (`VmHWM`): the one that comes with an exit status counts children too. It holds what is merely mapped.

Only Linux tells that mark; elsewhere the memory is not shown.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

RANK = 16
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

PEAK = """
def peak():
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    except OSError:
        return 0
"""

BARE = (
    PEAK
    + """
import sys
from peft import PeftModel
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
model = PeftModel.from_pretrained(model, sys.argv[2])
model.merge_adapter()
print(f"peak {peak()}")
"""
)

TOOL = (
    PEAK
    + """
import sys
from consistency.cli.main import main
status = main(sys.argv[1:])
print(f"peak {peak()}")
sys.exit(status)
"""
)

# torch in this process would count as memory of its children, which the kernel starts with their parent's mark
MAKE = """
import sys
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

folder, hidden, layers, vocabulary, rank, *targets = sys.argv[1:]
rng = np.random.default_rng(0)

def fill(parameters):
    for parameter in parameters:
        values = rng.standard_normal(tuple(parameter.shape), dtype=np.float32) * np.float32(0.02)
        parameter.data.copy_(torch.from_numpy(values))

config = LlamaConfig(
    hidden_size=int(hidden), intermediate_size=2 * int(hidden), num_hidden_layers=int(layers), num_attention_heads=16,
    num_key_value_heads=4, vocab_size=int(vocabulary), tie_word_embeddings=True, max_position_embeddings=512,
)
model = LlamaForCausalLM(config)
fill(p for p in model.parameters() if p.dim() > 1)
model.save_pretrained(f"{folder}/base")
model = get_peft_model(model, LoraConfig(r=int(rank), lora_alpha=2 * int(rank), target_modules=targets))
fill(p for name, p in model.named_parameters() if "lora_" in name)
model.save_pretrained(f"{folder}/adapter")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What one process took: wall seconds, processor seconds with those of its children, and its own peak of memory.

    `peak_bytes` is 0 where the system does not tell.
    """

    wall_s: float
    cpu_s: float
    peak_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size of the base (default 1024)")
    parser.add_argument("--layers", type=int, default=12, help="its layers (default 12: 0.5 GB in float32)")
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--devices", default="cpu,cpu@baseline,cpu@avx2", help="workers of the run")
    parser.add_argument("--level", default="standard", help="what each worker looks at (default standard)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", metavar="DIR", type=Path, help="keep model, adapter and captures here, and use them")
    parser.add_argument("--quick", action="store_true", help="a base of 30 MB, one round: does it run at all?")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.hidden, arguments.layers, arguments.vocabulary, arguments.rounds = 256, 8, 4096, 1
    with ExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="run-cost-")))
        base, adapter = folder / "base", folder / "adapter"
        if not adapter.exists():
            shape = (arguments.hidden, arguments.layers, arguments.vocabulary, RANK)
            _start(MAKE, [str(folder), *map(str, shape), *TARGETS])
        workers = len(arguments.devices.split(","))
        bare: list[list[Ran]] = []
        tool: list[Ran] = []
        for number in range(arguments.rounds):
            bare.append([_start(BARE, [str(base), str(adapter)]) for _ in range(workers)])
            out = folder / f"out-{time.time_ns()}"
            case = ["--base", str(base), "--adapter", str(adapter), "--devices", arguments.devices]
            case += ["--stages", "base,adapter,merged", "--level", arguments.level, "--out", str(out)]
            tool.append(_start(TOOL, ["run", *case]))
            alone = sum(ran.wall_s for ran in bare[-1])
            print(f"round {number + 1}: bare {alone:.2f} s, run {tool[-1].wall_s:.2f} s", file=sys.stderr)
        _show(bare, tool, out, base=base, adapter=adapter)


def _start(code: str, arguments: Sequence[str]) -> Ran:
    cpu_before, started = _cpu_of_children(), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    wall_s, cpu_s = time.perf_counter() - started, _cpu_of_children() - cpu_before
    if done.returncode:
        sys.exit(f"ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    last = done.stdout.split()[-2:]
    return Ran(wall_s=wall_s, cpu_s=cpu_s, peak_bytes=int(last[1]) if last[:1] == ["peak"] else 0)


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _show(bare: list[list[Ran]], tool: list[Ran], out: Path, *, base: Path, adapter: Path) -> None:
    report = json.loads((out / "report.json").read_bytes())
    workers = {path.parent.name: json.loads(path.read_bytes()) for path in out.glob("captures/workers/*/worker.json")}
    alone = min(sum(ran.wall_s for ran in turn) for turn in bare)
    run = min(ran.wall_s for ran in tool)
    cpu_alone = min(sum(ran.cpu_s for ran in turn) for turn in bare)
    cpu = min(ran.cpu_s for ran in tool)
    typical = statistics.median(t.wall_s / sum(r.wall_s for r in turn) for t, turn in zip(tool, bare, strict=True))
    memory = min(ran.peak_bytes for turn in bare for ran in turn)
    model, kept = _bytes(base), _bytes(out / "captures")
    beyond = kept - (adapter / "adapter_model.safetensors").stat().st_size
    print(f"base {model / 1e6:.0f} MB, {len(workers)} workers, verdict: {report['verdict']}")
    print(f"{'':34}{'':>12}{'of the bare':>14}{'wanted':>24}")
    _row(f"{len(workers)} bare processes, best", f"{alone:.2f} s")
    _row("consistency run, best", f"{run:.2f} s", f"{run / alone:.2f}", "1.25 at most")
    _row("the same, median of rounds", "", f"{typical:.2f}", "1.25 at most")
    _row("bare processes, processor time", f"{cpu_alone:.2f} s")
    _row("consistency run, processor time", f"{cpu:.2f} s", f"{cpu / cpu_alone:.2f}")
    if memory:
        _row("bare process, peak resident", _mb(memory))
        allowed = f"{_mb(int(1.15 * memory + 200e6))} at most"
        for slug, worker in sorted(workers.items()):
            peak = worker["peak_bytes"]
            _row(f"worker {slug}", _mb(peak), f"{peak / memory:.2f}", allowed)
        _row("the consistency process", _mb(max(ran.peak_bytes for ran in tool)), "", "300 MB at most")
    _row("capture beyond one adapter", f"{beyond / 1e3:.0f} kB", "", "")
    _row("the same, of the model's size", f"{100 * beyond / model:.3f} %", "", "0.2 % at most")


def _row(name: str, value: str, ratio: str = "", wanted: str = "") -> None:
    print(f"{name:34}{value:>12}{ratio:>14}{wanted:>24}")


def _mb(size: int) -> str:
    return f"{size / 1e6:.0f} MB"


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
