"""Run the benchmarks whose figures `docs/performance.md` shows, and write that page.

    python -m benchmarks.performance_page                    # run the quick ones, print the page; five minutes
    python -m benchmarks.performance_page --write            # into docs/performance.md
    python -m benchmarks.performance_page --write --long     # those of real sizes too; half an hour on two cores
    python -m benchmarks.performance_page --only Digests     # run one section, print it

The page has what the commands printed, on the machine and the day it was written: a figure that is not measured again
is not on it. Nothing else should run on the machine meanwhile; every benchmark compares things within one run, so its
ratios hold on a busy machine too.
"""

from __future__ import annotations

import argparse
import atexit
import datetime
import functools
import importlib.metadata
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"

_SHAPES = "SHAPES"
"""In a command: the folder with the model of 1.1 B parameters, which is made first."""

_MOST_LINES = 16  # of what a command prints

_LIBRARIES = ("torch", "transformers", "peft", "numpy")

_START_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section of the page: what one command prints.

    Attributes
    ----------
    title : str
        Its heading.
    says : str
        What is compared, and what to read in the figures.
    command : str
        After `python -m benchmarks.`; `SHAPES` stands for a folder with a model.
    is_long : bool
        Whether it takes minutes: without `--long` the page has its command alone.
    """

    title: str
    says: str
    command: str
    is_long: bool = False


SECTIONS = (
    Section(
        title="A run against bare processes",
        says="A base of 495 MB with a LoRA of rank 16 on all its linear layers, stages base, adapter and merged, three "
        "workers. *Bare* are three processes, one after the other, that import, load base and adapter, and merge.",
        command="run --rounds 2",
        is_long=True,
    ),
    Section(
        title="A model of 1.1 B parameters",
        says="In bfloat16, with a LoRA of rank 16 on all linear layers, level `standard`, one worker on the CPU. "
        "*Bare* is the same work by hand: for `gradient` two plain backward passes and one in float64, block by "
        "block; for the rest loading, merging, two forward passes and one in float64.",
        command="large SHAPES",
        is_long=True,
    ),
    Section(
        title="What --plan says, and what the run takes",
        says="The same model: memory by stage, estimated by `consistency run --plan`, and the worker's peak.",
        command="budget SHAPES --threads 1",
        is_long=True,
    ),
    Section(
        title="Two files of 1 GiB",
        says="200 float32 tensors, from the files to the answer, without imports. The floor compares the mapped files "
        "block by block with NumPy and says only whether and where they differ; the loop is the one that bug reports "
        "paste; `assert_close` is `torch.testing.assert_close`.",
        command="diff",
    ),
    Section(
        title="Measures of a tensor",
        says="All elements differ by rounding, both state dicts in memory, one thread.",
        command="measures --threads 1",
    ),
    Section(
        title="Digests",
        says="The digest of a state dict against copying the same bytes, on one core.",
        command="digest",
    ),
    Section(
        title="Many adapters",
        says="Thirty adapters of ten methods on `builtin:llama`, level `standard`, two cases at a time; one of them "
        "kills its worker, which costs that case alone.",
        command="suite --count 30 --singles 1",
        is_long=True,
    ),
    Section(
        title="A fleet",
        says="Made-up captures in the real format, compared by the real command on one core; captures × workers × "
        "tensors. Time grows with the bytes of the records, memory hardly.",
        command="scaling --size 125x8x2000 --size 500x8x2000",
        is_long=True,
    ),
    Section(
        title="The page of a run",
        says="Processor time to write `report.html` and `report.md`, and the page's size; tensors × devices.",
        command="page --no-browser",
    ),
    Section(
        title="A history",
        says="Of 1000 runs of 50 devices.",
        command="history",
    ),
    Section(
        title="An assertion in a test",
        says="`consistency.testing` against the time of the function that it checks, on one core.",
        command="assertion_time",
    ),
    Section(
        title="False alarms",
        says="The built-in case on healthy hardware, complete runs at level `standard` on three kernel variants of the "
        "CPU: every finding would be a mistake.",
        command="false_alarms --runs 5",
    ),
)

_HEAD = """# Performance

What `python -m benchmarks.performance_page --write` measured on {date}: {machine}; {libraries}.
Each section has a command, which runs a script of `benchmarks/` and measures again on your machine, and what it
printed. Machines are shared and noisy, so read the ratios: both sides took turns within one run. The
[hardware log](hardware-log.md) has what was run for long, [on paper](on-paper.md) what eight H100 should take.

## How long a command takes to start

Whole processes, the median of {rounds} interleaved rounds. `consistency run` checks the built-in case on three kernel
variants of the CPU at level `standard`. Python keeps the byte code of what it imports, as `pip install` leaves it.
Where nothing does (`uv pip install` without `--compile-bytecode`, and `PYTHONDONTWRITEBYTECODE` set), every process
compiles its libraries anew, and the imports take twice as long.
"""

_FIRST_ASSERTION = """
import torch
from consistency.testing import assert_within_rounding
assert_within_rounding(lambda x: torch.relu(x @ x), torch.eye(8))
"""


def started() -> Iterator[str]:
    """Yield a table of what commands take from their start to their end."""
    commands = {
        "python -c pass": ["-c", "pass"],
        "python -c 'import consistency'": ["-c", "import consistency"],
        "consistency --help": ["-m", "consistency", "--help"],
        "python -c 'import torch, transformers, peft'": ["-c", "import torch, transformers, peft"],
        "python -c 'import torch'": ["-c", "import torch"],
        "import torch, and one assert_within_rounding": ["-c", _FIRST_ASSERTION],
        "consistency run": ["-m", "consistency", "run"],
    }
    for words in commands.values():
        _seconds_of(words)  # leaves the byte code
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(_START_ROUNDS):
        for name, words in commands.items():
            seconds[name].append(_seconds_of(words))
    yield "| command | wall s | processor s |"
    yield "|---|---|---|"
    for name, rounds in seconds.items():
        wall, processor = (statistics.median(column) for column in zip(*rounds, strict=True))
        yield f"| `{name}` | {wall:.2f} | {processor:.2f} |"


def _seconds_of(words: list[str]) -> tuple[float, float]:
    """Return the wall and processor seconds of a process and its children."""
    before = os.times()
    began = time.perf_counter()
    # the exit status is not asked for: a run with a finding takes as long
    subprocess.run([sys.executable, "-P", *words], cwd=ROOT, env=_environment(), capture_output=True, check=False)
    wall = time.perf_counter() - began
    after = os.times()
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    return wall, processor


def section_text(section: Section, shapes: Path) -> str:
    """Run a section's command and return its part of the page."""
    words = shlex.split(section.command.replace(_SHAPES, str(shapes)))
    if _SHAPES in section.command and not (shapes / "base").exists():
        _output_of(["shapes", str(shapes), "tinyllama"])
    printed = _output_of(words)
    shown = section.command.replace(_SHAPES, "DIR")
    lines = [line.rstrip() for line in printed.splitlines() if line.strip()]
    output = "\n".join(lines[-_MOST_LINES:]).replace(str(shapes), "DIR")
    typed = f"```\n$ python -m benchmarks.{shown}\n```"
    return f"## {section.title}\n\n{section.says}\n\n{typed}\n\n```text\n{output}\n```\n"


def _output_of(words: list[str]) -> str:
    """Return what a benchmark prints."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", f"benchmarks.{words[0]}", *words[1:]],
        cwd=ROOT,
        env=_environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


@functools.cache
def _environment() -> dict[str, str]:
    """Return the environment of what is run; its byte code is kept in a folder of this run."""
    byte_code = tempfile.mkdtemp(prefix="consistency-byte-code-")
    atexit.register(shutil.rmtree, byte_code, ignore_errors=True)
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": byte_code}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    return variables


def _machine() -> str:
    """Return the processor and the number of its cores that this process may use."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {names[0]}, Python {platform.python_version()}"


def page(shapes: Path, *, with_long: bool) -> str:
    """Run the sections and return the page; without `with_long`, long ones have their command alone."""
    libraries = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _LIBRARIES)
    head = _HEAD.format(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        machine=_machine(),
        libraries=libraries,
        rounds=_START_ROUNDS,
    )
    parts = [head, "\n".join(started()) + "\n"]
    parts.extend(section_text(section, shapes) for section in SECTIONS if with_long or not section.is_long)
    left_out = [section for section in SECTIONS if section.is_long and not with_long]
    if left_out:
        parts.append("\n".join(_commands_of(left_out)))
    return "\n".join(parts)


def _commands_of(sections: Sequence[Section]) -> Iterator[str]:
    """Yield a part of the page with the commands of sections that were not run."""
    yield "## Of real sizes"
    yield ""
    yield "These take minutes, and `--long` adds them to the page."
    yield "`DIR` is made by `python -m benchmarks.shapes DIR tinyllama`."
    yield ""
    for section in sections:
        command = section.command.replace(_SHAPES, "DIR")
        yield f"* {section.title}: `python -m benchmarks.{command}`. {section.says}"
    yield ""


def main() -> None:
    """Print or write the page, or print one section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--only", choices=[section.title for section in SECTIONS], help="run this section alone")
    parser.add_argument("--long", action="store_true", help="run those of real sizes too")
    parser.add_argument("--shapes", type=Path, metavar="DIR", help="where the model of 1.1 B is, or is to be made")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        shapes = parsed.shapes or Path(scratch) / "shapes"
        if parsed.only:
            (section,) = (section for section in SECTIONS if section.title == parsed.only)
            print(section_text(section, shapes))
        elif parsed.write:
            PAGE.write_text(page(shapes, with_long=parsed.long), encoding="utf-8")
        else:
            print(page(shapes, with_long=parsed.long))


if __name__ == "__main__":
    main()
