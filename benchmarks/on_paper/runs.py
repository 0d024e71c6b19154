"""A run of a case on the machine on paper, and what would make it shorter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from unittest import mock

from benchmarks.on_paper.counts import EXACT, MERGE_BYTES, SENT_BYTES, of_gpu, of_reference
from benchmarks.on_paper.machine import CORES, GPUS, START_S, XEON, Work
from benchmarks.on_paper.sizes import Sizes
from consistency.case.case import Case
from consistency.devices import cores
from consistency.devices.spec import DeviceInfo, DeviceSpec
from consistency.launch import environment
from consistency.launch.plan import WorkerPlan, plan_waves


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run: what its workers do, and the threads that `launch` gives them.

    Attributes
    ----------
    works : tuple of Work
    reference_threads : int
        Threads of the CPU's worker.
    gpu_threads : tuple of int
        Threads of the worker of a GPU in each wave.
    """

    works: tuple[Work, ...]
    reference_threads: int
    gpu_threads: tuple[int, ...]

    def of(self, work: Work, wave: int = 0) -> dict[str, float]:
        """Return the seconds that a work takes in a wave on each part of the machine."""
        return work.seconds(self.gpu_threads[wave] if work.on_gpu else self.reference_threads)

    def longest(self, work: Work, wave: int = 0) -> float:
        """Return the seconds that the slowest part of the machine takes; the others are busy at the same time."""
        return max(self.of(work, wave).values())

    def in_all_waves(self, work: Work) -> float:
        return sum(self.longest(work, wave) for wave in range(work.waves))

    def total(self) -> float:
        """Return the seconds of a run: in the first wave the GPUs go on when the CPU has made the reference."""
        reference = sum(self.longest(work) for work in self.works if not work.on_gpu)
        gpu = [work for work in self.works if work.on_gpu]
        before, after = (sum(self.longest(work) for work in gpu if work.waits is waits) for waits in (False, True))
        later = sum(self.in_all_waves(work) - self.longest(work) for work in gpu)
        return len(self.gpu_threads) * START_S + max(reference, before) + after + later


def waves_of(case: Case) -> list[list[WorkerPlan]]:
    """Return the workers that `launch` plans for eight GPUs and the CPU."""
    specs = [DeviceSpec(type="cpu"), *(DeviceSpec(type="cuda", index=index) for index in range(GPUS))]
    return plan_waves(case, [DeviceInfo(spec=spec, architecture="", model="") for spec in specs])


def run_of(sizes: Sizes) -> Run:
    """Return a run of a case on the machine."""
    waves = waves_of(sizes.case)
    with (
        mock.patch.object(cores, "available_cores", return_value=CORES),
        mock.patch.object(environment, "available_cores", return_value=CORES),
    ):
        # of a wave the maker of the reference comes first, and the workers of GPUs have equal parts
        threads = [environment.shared_out(wave, waits=True) for wave in waves]
    works = [*of_reference(sizes), *(replace(work, on_gpu=True, waves=len(waves)) for work in of_gpu(sizes))]
    return Run(
        works=tuple(works), reference_threads=threads[0][0], gpu_threads=tuple(of_wave[-1] for of_wave in threads)
    )


Change = Callable[[Work], Work]
"""Returns a work as it would be after a change."""


def _second_wave_moves(work: Work) -> Work:
    return replace(work, waves=1) if work.stage in ("merged", "gradient", "forward", "memory", "operators") else work


def _merged_on_gpu(work: Work) -> Work:
    if not work.on_gpu or work.stage != "merged":
        return work
    # value and bound of each element are products of the rank in float64, where the delta is one in float32
    flop = 2 * work.float32
    sent = max(0.0, work.link_bytes - SENT_BYTES * work.hbm_bytes / MERGE_BYTES)  # what is streamed to the GPU stays
    hbm_bytes = 2 * work.hbm_bytes
    return replace(
        work, float64=flop, float64_on_gpu=True, elements_s=0, link_bytes=sent, host_bytes=sent, hbm_bytes=hbm_bytes
    )


def _step_on_all_threads(work: Work) -> Work:
    return replace(work, elements_s=work.thread_s, thread_s=0) if work.counted == EXACT else work


def _float64_on_gpu(work: Work) -> Work:
    is_product = bool(work.float64) and not work.on_gpu
    if not is_product:
        return work
    return replace(work, float64_on_gpu=True, hbm_bytes=work.host_bytes, host_bytes=0)


def _fewer_passes(work: Work) -> Work:
    if work.stage != "gradient" or not work.noisy_passes:
        return work
    return replace(work, bfloat16=work.bfloat16 / 2, host_bytes=work.host_bytes / 2)


def _four_disks(work: Work) -> Work:
    return replace(work, disk_bytes=work.disk_bytes / 4)


def _digests_once(work: Work) -> Work:
    return replace(work, elements_s=0) if work.on_gpu and work.stage == "base" else work


def _cpu_does_not_merge(work: Work) -> Work:
    return replace(work, elements_s=0, host_bytes=0) if not work.on_gpu and work.stage == "merged" else work


CHANGES: dict[str, Change] = {
    "the second load path moves bytes alone: the first has computed with the same bits": _second_wave_moves,
    "`merged` measured on the GPU that merged, in float64": _merged_on_gpu,
    "the exact step of AdamW on all threads of a worker": _step_on_all_threads,
    "float64 passes on a GPU": _float64_on_gpu,
    "half of the passes with noise of gradients": _fewer_passes,
    "four disks": _four_disks,
    "the file digested by one worker for all": _digests_once,
    "the CPU's worker makes the reference alone, and checks no `merged` of its own": _cpu_does_not_merge,
}


def changed(run: Run, change: Change) -> Run:
    return replace(run, works=tuple(map(change, run.works)))


def as_slow(run: Run, factors: Mapping[str, float]) -> Run:
    """Return a run in which a processor takes so many times as long for the work of a stage, by its name."""

    def slow(work: Work) -> Work:
        more = factors.get(work.stage, 1.0) - 1
        return replace(
            work,
            elements_s=work.elements_s + more * (work.core_s(XEON) - work.thread_s),
            thread_s=work.thread_s * (1 + more),
        )

    return changed(run, slow)


def steps_to(wanted_s: float, run: Run, factors: Mapping[str, float]) -> Iterator[tuple[str, Run]]:
    """Yield changes by name, and the run with them: each time the one that saves most, until it is as short as wanted.

    What is wanted is the time of a processor that is as slow as `factors` say.
    """

    def total(after: Run) -> float:
        return as_slow(after, factors).total()

    left = dict(CHANGES)
    while left and total(run) > wanted_s:
        best = min(left, key=lambda name: total(changed(run, left[name])))
        run = changed(run, left.pop(best))
        yield best, run
