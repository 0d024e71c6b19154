"""Time a suite of many adapters on a built-in base, one of which kills its worker, and the swap of an adapter.

    python benchmarks/suite.py

Adapters of several methods and ranks are made by PEFT on `builtin:llama` in a temporary folder, and checked as one
suite on the CPU. Wall and processor time are those of the whole command, with its workers; the peak of resident memory
is the command's own, which compares and reports. Then single runs of some of the adapters are timed.

`--swap` times what each further adapter takes on a base that is loaded, in one process on one thread: taking the
adapter before off, proving that nothing of it is left, and the case itself; against `load_adapter` and `merge_adapter`
of PEFT for the same adapters. `--base` and `--adapters` name other models, such as those of `benchmarks/shapes.py`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KILLED = "adapter-050"
SWAP = ("take the adapter off", "load adapter", "base, after the adapter")
"""What a kept base costs the next case, with the proof that nothing of the adapter before is left."""


def configs() -> Iterator[Any]:
    """Yield configurations of adapters, of several methods and ranks, without end."""
    import peft

    q_v, q = {"target_modules": ["q_proj", "v_proj"]}, {"target_modules": ["q_proj"]}
    makes: list[Callable[[int], Any]] = [
        lambda rank: peft.LoraConfig(r=rank, **q_v),
        lambda rank: peft.LoraConfig(r=rank, target_modules=LINEAR),
        lambda rank: peft.LoraConfig(r=rank, use_rslora=True, target_modules=LINEAR),
        lambda rank: peft.LoraConfig(r=rank, use_dora=True, **q_v),
        lambda rank: peft.LoraConfig(r=rank, modules_to_save=["lm_head"], **q_v),
        lambda rank: peft.LoraConfig(r=rank, target_modules=["q_proj", "embed_tokens"]),
        lambda rank: peft.LoHaConfig(r=rank, **q),
        lambda rank: peft.LoKrConfig(r=rank, **q),
        lambda rank: peft.VeraConfig(r=rank, **q),
        lambda _: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ]
    for rank in itertools.cycle((4, 8, 16, 2, 32)):
        for make in makes:
            yield make(rank)


def make_adapters(base: str, home: Path, count: int) -> list[Path]:
    """Make adapters whose values are not those of their initialization."""
    import peft
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    made = []
    for number, config in enumerate(itertools.islice(configs(), count)):
        model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), config)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.01)
        made.append(home / f"adapter-{number:03}")
        model.save_pretrained(made[-1])
    return made


def time_suite(base: str, home: Path, level: str) -> dict[str, Any]:
    """Run the suite in this process, one case with a planted fault, and return what it took."""
    from consistency.case.options import Edge
    from consistency.case.suite import gather_suite
    from consistency.report.json import read
    from consistency.workflows.suite import prepare_suite, run_suite

    given = {"base": base, "adapter": str(home / "adapter-*"), "devices": "cpu", "level": level}
    found = gather_suite(None, given, Edge.COMMAND_LINE)
    assert found is not None
    before, started = _processor_seconds(), time.monotonic()
    plan = prepare_suite(found)
    planned = time.monotonic()
    plan = plan.with_faults({KILLED: {"cpu": "killed"}})
    result = run_suite(plan, home / "out", watch=lambda *_: None)
    ended, after = time.monotonic(), _processor_seconds()
    own, workers = (after[who] - before[who] for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    kept = Counter(
        worker.environment.get("base", "loaded").split(",")[0].split(":")[0]
        for report in (home / "out" / "cases").glob("*/report.json")
        for worker in read(report.read_bytes()).workers
    )
    times = [case.elapsed_s for case in result.cases]
    return {
        "cases": len(result.cases),
        "verdicts": dict(result.counts),
        "exit_status": result.exit_status,
        "not_consistent": {case.name: case.headline for case in result.cases if case.verdict != "consistent"},
        "seconds": round(ended - started, 1),
        "planning_seconds": round(planned - started, 2),
        "processor_seconds": round(own + workers, 1),
        "of_the_parent": round(own, 1),
        "median_case_seconds": round(statistics.median(times), 2),
        "parent_peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "worker_peak_mb": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024),
        "bases": dict(kept),
    }


def _processor_seconds() -> dict[int, float]:
    """Return those of this process and of its children, by `resource.RUSAGE_*`."""
    return {who: sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)}


def time_single(base: str, adapter: Path, level: str) -> float:
    command = [sys.executable, "-m", "consistency", "run", "--base", base, "--adapter", str(adapter)]
    began = time.monotonic()
    done = subprocess.run([*command, "--devices", "cpu", "--level", level], check=False, capture_output=True)
    if done.returncode:
        raise SystemExit(done.stderr.decode())
    return time.monotonic() - began


def time_swaps(base: str, adapters: list[Path], stages: tuple[str, ...], dtype: str) -> dict[str, Any]:
    """Return the processor time of each further adapter: bare, and as a case of a suite, in this process."""
    import peft
    import torch
    import transformers

    from consistency.capture.writer import CaptureWriter
    from consistency.case.options import Options
    from consistency.case.preflight import prepare_case
    from consistency.case.stage import Stage
    from consistency.worker import session
    from consistency.worker.model.kept_base import BaseKeeper
    from consistency.worker.protocol import EventLog, Job

    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()

    def jobs(home: Path) -> Iterator[Job]:
        for number, adapter in enumerate(adapters):
            chosen = tuple(Stage(name) for name in stages)
            options = Options(base=base, adapter=str(adapter), dtype=dtype, stages=chosen, level="quick")  # type: ignore[arg-type]
            scratch, writer = home / f"scratch-{number}", CaptureWriter(home / f"capture-{number}")
            scratch.mkdir()
            yield Job(
                case=prepare_case(options), name="cpu", device="cpu", load_path="isolated", threads=1, settings={},
                folder=str(writer.worker_folder("cpu")), blobs=str(writer.blobs), scratch=str(scratch),
                makes_reference=True, parent_pid=os.getpid(),
            )  # fmt: skip

    cases, swaps, where = [], [], Counter[str]()
    with tempfile.TemporaryDirectory() as home:
        planned = list(jobs(Path(home)))
        bases = BaseKeeper(planned)
        for job in planned:
            began = time.process_time()
            with EventLog(Path(job.folder, "events.jsonl")) as events:
                session.run(job, events, bases)
            cases.append(time.process_time() - began)
            state = json.loads(Path(job.folder, "state.json").read_text())
            where[state["environment"].get("base", "loaded").split(",")[0]] += 1
            steps = {one["stage"]: round(one["processor_s"], 3) for one in state["stage_memory"]}
            swaps.append(sum(steps.get(name, 0.0) for name in SWAP))
    kind = "auto" if dtype == "auto" else getattr(torch, dtype)
    folder = str(planned[0].case.base)
    model = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=kind), str(adapters[0])
    )
    model.merge_adapter()
    bare = []
    for number, adapter in enumerate(adapters[1:]):
        model.unmerge_adapter()
        began = time.process_time()
        model.load_adapter(str(adapter), f"a{number}")
        model.set_adapter(f"a{number}")
        model.merge_adapter()
        bare.append(time.process_time() - began)
    return {
        "stages": list(stages),
        "bare_seconds": round(statistics.median(bare), 4),
        "case_seconds": round(statistics.median(cases[1:]), 4),
        "swap_seconds": round(statistics.median(swaps[1:]), 4),
        "first_case_seconds": round(cases[0], 2),
        "swap_over_bare": round(statistics.median(swaps[1:]) / statistics.median(bare), 2),
        "case_over_bare": round(statistics.median(cases[1:]) / statistics.median(bare), 2),
        "bases": dict(where),
        "steps_of_the_last": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="builtin:llama")
    parser.add_argument("--adapters", nargs="*", type=Path, help="with --swap: folders, instead of LoRAs made here")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--level", default="standard")
    parser.add_argument("--singles", type=int, default=3, help="single runs to time")
    parser.add_argument("--swap", nargs="*", metavar="STAGE", help="time swaps, with these stages in each case")
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="consistency-suite-") as scratch:
        home = Path(scratch)
        if given.swap is not None:
            adapters = given.adapters or make_adapters(_folder(given.base), home, 30)[1::10]
            table = time_swaps(given.base, adapters * (1 if len(adapters) > 2 else 3), tuple(given.swap), given.dtype)
        else:
            adapters = make_adapters(_folder(given.base), home, given.count)
            table = time_suite(given.base, home, given.level)
            singles = [time_single(given.base, one, given.level) for one in adapters[: given.singles]]
            table["single_run_seconds"] = [round(one, 1) for one in singles]
    print(json.dumps(table, indent=1))


def _folder(base: str) -> str:
    from consistency.case.builtin import resolve

    return str(resolve(base, None)[0])


if __name__ == "__main__":
    main()
