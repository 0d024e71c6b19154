"""Print the generated parts of `docs/on-paper.md`, or write them into it."""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks import on_paper
from benchmarks.generated_parts import show
from benchmarks.on_paper.counts import LONG, of_reference
from benchmarks.on_paper.machine import CORES, ELEMENTS, EPYC, GPUS, SOURCES, START_S
from benchmarks.on_paper.runs import Run, as_slow, run_of, steps_to
from benchmarks.on_paper.sizes import Sizes, sizes_of

PAGE = Path(__file__).parents[2] / "docs" / "on-paper.md"

MODELS = {"llama-8b": "Llama 3.1 8B", "llama-70b": "Llama 3.1 70B"}

WANTED_S = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Processor seconds that a stage took on two cores of an AMD EPYC (family 25, model 1)."""

    shape: str
    stage: str
    seconds: float
    is_run: bool = False
    """Whether imports and loading are in it, and no long text, which came later."""


MEASURED = (
    Measured(shape="tinyllama", stage="gradient", seconds=70, is_run=True),
    Measured(shape="tinyllama", stage="forward", seconds=42, is_run=True),
    Measured(shape="two-blocks", stage="gradient", seconds=24.0),
    Measured(shape="two-blocks", stage="forward", seconds=44.3),
    Measured(shape="two-blocks", stage="merged", seconds=10.0),
    Measured(shape="two-blocks", stage="memory", seconds=6.6),
)
"""Of 1.1 B parameters `consistency run --stages STAGE` on 2026-11-27 (commit 156f5113); of two blocks of an 8 B
`python -m benchmarks.large DIR --no-bare --threads 1 --stages STAGE` on 2026-11-29."""


def text_of_seconds(seconds: float) -> str:
    return "" if seconds < 0.05 else f"{seconds:.1f}"


def table(run: Run) -> Iterator[str]:
    """Yield the table of a model: one line for each work."""
    yield (
        "| worker | stage | counted | float64, TFLOP | float32 | bfloat16 | GB, most | CPU s | GPU s | PCIe s | "
        "host memory s | disk s | bound by |"
    )
    yield "|---" * 13 + "|"
    for work in run.works:
        seconds = run.of(work)
        bound = max(seconds, key=lambda part: seconds[part])
        if bound == "CPU" and work.thread_s:
            bound = "one thread"
        moved = max(work.hbm_bytes, work.link_bytes, work.host_bytes, work.disk_bytes)
        flop = [text_of_seconds(count / 1e12) for count in (work.float64, work.float32, work.bfloat16)]
        who = "each GPU" if work.on_gpu else "CPU"
        cells = [who, work.stage, work.counted, *flop, text_of_seconds(moved / 1e9)]
        cells += [text_of_seconds(seconds[part]) for part in ("CPU", "GPU", "PCIe", "host memory", "disk")]
        yield f"| {' | '.join([*cells, bound])} |"


def summary(name: str, sizes: Sizes, run: Run, factors: Mapping[str, float]) -> Iterator[str]:
    """Yield the total, what dominates it, and the way to two minutes."""
    by_name: defaultdict[str, float] = defaultdict(float)
    for work in run.works:
        by_name[f"`{work.stage}` of {'each GPU' if work.on_gpu else 'the CPU'}"] += run.in_all_waves(work)
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:3]
    largest = ", ".join(f"{which} {seconds:.0f} s" for which, seconds in longest)
    where = "streamed from the host, for it does not fit on one GPU" if sizes.offloads else "on each GPU"
    threads = " and then ".join(map(str, run.gpu_threads))
    yield (
        f"**{name}**: {run.total():.0f} s in {len(run.gpu_threads)} waves, the base {where}. The CPU's worker has "
        f"{run.reference_threads} threads, each GPU's {threads}. Longest, beside each other: {largest}."
    )
    yield ""
    yield _what_sharing_saves(run)
    yield ""
    yield "| change, beside those above it | s on paper | s, as slow as measured |"
    yield "|---|---|---|"
    for change, after in [("as it is", run), *steps_to(WANTED_S, run, factors)]:
        yield f"| {change} | {after.total():.0f} | {as_slow(after, factors).total():.0f} |"


def _what_sharing_saves(run: Run) -> str:
    """Say what the reference takes, and what it would take if each worker made its own."""
    exact_s = shared_s = alone_s = 0.0
    for work in run.works:
        if not work.on_gpu and (work.float64 or work.noisy_passes):
            seconds = work.seconds(CORES // GPUS)
            seconds["host memory"] *= GPUS
            exact_s += run.longest(work) if work.float64 else 0
            shared_s += run.longest(work)
            alone_s += max(seconds.values())
    return (
        f"The CPU's worker makes the reference for all: float64 passes {exact_s:.0f} s, with those with noise "
        f"{shared_s:.0f} s. If each of {GPUS} workers made its own on {CORES // GPUS} cores, these would take "
        f"{alone_s:.0f} s."
    )


def check(sizes_by_shape: Mapping[str, Sizes]) -> Iterator[str]:
    """Yield counts on a core of the EPYC, beside what a run took there."""
    yield "| model | stage | s on paper | measured | measured / paper |"
    yield "|---|---|---|---|---|"
    for measured in MEASURED:
        sizes = sizes_by_shape[measured.shape]
        counted_s = on_epyc(sizes, measured)
        name = f"{sizes.shape.elements / 1e9:.1f} B, {sizes.shape.blocks} blocks"
        cells = [name, f"`{measured.stage}`", f"{counted_s:.1f}", f"{measured.seconds:.1f}"]
        yield f"| {' | '.join(cells)} | {measured.seconds / counted_s:.1f} |"


def on_epyc(sizes: Sizes, measured: Measured) -> float:
    """Return the processor seconds on paper of what was measured."""
    works = [work for work in of_reference(sizes) if work.stage == measured.stage]
    if measured.is_run:
        works = [work for work in works if LONG not in work.counted]
    return sum(work.core_s(EPYC) for work in works) + (START_S if measured.is_run else 0)


def slowness(sizes_by_shape: Mapping[str, Sizes]) -> dict[str, float]:
    """Return how many times as long as on paper each stage took, at most, by its name; not less than 1."""
    factors: dict[str, float] = {}
    for measured in MEASURED:
        factor = measured.seconds / on_epyc(sizes_by_shape[measured.shape], measured)
        factors[measured.stage] = max(1.0, factor, factors.get(measured.stage, 1.0))
    return factors


def assumed() -> Iterator[str]:
    yield "| rate | | from |"
    yield "|---|---|---|"
    for what, rate, unit, source in SOURCES:
        yield f"| {what} | {rate / 1e9:,.0f} G{unit} | {source} |"
    for what, seconds in ELEMENTS:
        rates = "; ".join(f"{each * 1e9:.2g}" for each in seconds)
        yield f"| {what} | {rates} ns | one core of an AMD EPYC, `python -m benchmarks.host_rates` |"


def parts() -> dict[str, str]:
    """Return the generated parts of the page by name."""
    found = {"rates": "\n".join(assumed())}
    with tempfile.TemporaryDirectory(prefix="on-paper-") as folder:
        shapes = dict.fromkeys(measured.shape for measured in MEASURED)
        checked = {shape: sizes_of(shape, Path(folder) / shape) for shape in shapes}
        found["check"] = "\n".join(check(checked))
        for shape, name in MODELS.items():
            sizes = sizes_of(shape, Path(folder) / shape)
            run = run_of(sizes)
            found[shape] = "\n".join(table(run))
            found[f"{shape}, total"] = "\n".join(summary(name, sizes, run, slowness(checked)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.on_paper",
        description=on_paper.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(PAGE.parents[1])}")
    show(parts(), PAGE, write=parser.parse_args().write)


if __name__ == "__main__":
    main()
