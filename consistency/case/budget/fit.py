"""Fit a case to the memory of its host and devices, before a worker starts.

What is cut, in this order, because each costs more than the one before: the long text; tokens of each sequence;
sequences; workers side by side. Fewer tokens and fewer sequences leave something unchecked,
and the report says so. A base that does not fit its device is streamed through it, where `--placement` allows that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from consistency.case.budget.estimate import PlannedWorker, WorkerEstimate, estimate_worker, together
from consistency.case.budget.placement import is_offloaded
from consistency.case.budget.shape import Shape, read_shape
from consistency.case.case import Case, Fit
from consistency.case.stages import stages_of
from consistency.errors import InputError

MARGIN = 1.25
"""Factor on an estimate when a case is fitted, because it may be 25 % too low; a case is refused only by the estimate
itself."""

CUT = stages_of(lambda spec: spec.feeds_inputs)
"""Stages whose memory depends on the size of the inputs."""

FEWEST_TOKENS = 4
"""Tokens of a sequence that are never cut: with fewer, attention has hardly anything to do."""

ON_DISK = "set TMPDIR to a folder on a disk: scratch files take memory where they are now"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The memory that a case takes, and what was changed so that it fits."""

    case: Case
    """The case as it is run, after the cuts."""
    shape: Shape
    workers: tuple[WorkerEstimate, ...]
    at_once: int
    """Most workers that run side by side."""
    host_available_bytes: int | None
    """Memory of the host; None where the host does not report it, and then nothing is fitted to it."""
    host_private_bytes: int
    """Private memory of the workers side by side that take the most."""
    host_mapped_bytes: int
    """Mapped files of the workers side by side that take the most."""
    scratch_bytes: int = 0
    """Bytes of files in the scratch folder, by those workers that write the most side by side."""
    scratch_in_memory: bool = False
    """Whether these files take memory of the host; they are in `host_private_bytes` then."""
    changes: tuple[str, ...] = field(default=())
    """The cuts, in words."""
    not_checked: tuple[str, ...] = field(default=())
    """The checks that are lost by the cuts, in words."""
    unknown: tuple[str, ...] = field(default=())
    """What is not estimated, and why, in words."""
    refusal: InputError | None = None
    """Why the case cannot be run: a worker does not fit, however the case is cut."""


def make_budget(case: Case, planned: Sequence[PlannedWorker], *, available_bytes: int | None) -> Budget:
    """Estimate a case and fit it to the memory of its host and devices.

    Parameters
    ----------
    planned : sequence of PlannedWorker
        At least one.
    available_bytes : int or None
        Memory of the host; None where it is not known.
    """
    shape = read_shape(case)
    fitted = _fit_case(case, shape, planned, available_bytes)
    workers = tuple(_estimate(fitted, shape, worker) for worker in planned)
    scratch_in_memory = _has_scratch_in_memory(planned)
    kept_bytes = _kept_bytes(workers) if scratch_in_memory else 0
    at_once = _count_at_once(workers, available_bytes, kept_bytes)
    private, mapped = max((_largest_bytes(wave, at_once) for wave in _waves(workers)), key=sum)
    private += kept_bytes
    beyond = available_bytes is not None and private + mapped > available_bytes
    refusal = None
    too_large = next((worker for worker in workers if not _fits_host(worker, available_bytes, kept_bytes)), None)
    if too_large is not None:
        refusal = _refusal(too_large, available_bytes, kept_bytes)
    return Budget(
        case=fitted,
        shape=shape,
        workers=workers,
        at_once=at_once,
        host_available_bytes=available_bytes,
        host_private_bytes=private,
        host_mapped_bytes=mapped,
        scratch_bytes=max(_scratch_bytes(wave, at_once) for wave in _waves(workers)) + _kept_bytes(workers),
        scratch_in_memory=scratch_in_memory,
        changes=tuple(_changes(case, fitted, workers, at_once)),
        not_checked=tuple(check for check in fitted.not_checked() if check not in case.not_checked()),
        unknown=(*shape.unknown, *_unknown(workers, beyond=beyond)),
        refusal=refusal,
    )


def _estimate(case: Case, shape: Shape, worker: PlannedWorker) -> WorkerEstimate:
    offloads = worker.on_device and is_offloaded(case, shape, worker.device_memory_bytes)
    return estimate_worker(case, shape, worker, offloads=offloads)


def _fit_case(case: Case, shape: Shape, planned: Sequence[PlannedWorker], available_bytes: int | None) -> Case:
    """Return the case with the first cut that fits; uncut where none does, because cutting it would not help.

    The largest cut is tried without the margin too, because a case is refused only by the estimate itself.
    """
    cuts = [msgspec.structs.replace(case, fit=fit) for fit in _cuts(case, shape)]
    for margin, tried_cuts in ((MARGIN, cuts), (1.0, cuts[-1:])):
        for cut in tried_cuts:
            workers = [_estimate(cut, shape, worker) for worker in planned]
            kept_bytes = _kept_bytes(workers) if _has_scratch_in_memory(planned) else 0
            if all(
                _fits_host(worker, available_bytes, kept_bytes, margin=margin) and _fits_device(worker)
                for worker in workers
            ):
                return cut
    return case


def _has_scratch_in_memory(planned: Sequence[PlannedWorker]) -> bool:
    """Report whether scratch files take memory of the host."""
    return any(worker.scratch_in_memory for worker in planned)


def _cuts(case: Case, shape: Shape) -> Iterator[Fit]:
    """Yield the cuts of a case, from none to the largest."""
    yield case.fit
    # Inputs from a file are run as they are, and stages without inputs take the same memory for any cut.
    if not set(CUT) & set(case.stages) or not case.makes_inputs:
        return
    uncut = case.fit
    if case.long_tokens:
        uncut = msgspec.structs.replace(case.fit, long_tokens=0)
        yield uncut
    sequences, tokens = shape.sequences or case.sequences(shape.matrix_elements), case.tokens
    for fewer in _halves(tokens, FEWEST_TOKENS):
        yield msgspec.structs.replace(uncut, tokens=fewer)
    for fewer in _halves(sequences, 1):
        yield msgspec.structs.replace(uncut, tokens=min(tokens, FEWEST_TOKENS), sequences=fewer)


def _halves(count: int, least: int) -> Iterator[int]:
    """Yield half of a count, half of that, and so on down to the least."""
    while count > least:
        count = max(least, count // 2)
        yield count


def _fits_host(worker: WorkerEstimate, available_bytes: int | None, kept_bytes: int, *, margin: float = 1.0) -> bool:
    """Report whether a worker alone fits; files that are mapped need no room, because their pages can be dropped.

    `kept_bytes` is memory that scratch files take until the case ends, whichever worker runs.
    """
    return available_bytes is None or margin * (worker.host_private_bytes + kept_bytes) <= available_bytes


def _kept_bytes(workers: Sequence[WorkerEstimate]) -> int:
    """Return the bytes of scratch files that stay until the case ends."""
    return sum(worker.kept_bytes for worker in workers)


def _scratch_bytes(wave: Sequence[WorkerEstimate], at_once: int) -> int:
    """Return the bytes of scratch files that the workers of a wave remove themselves."""
    return sum(sorted((worker.scratch_bytes for worker in wave), reverse=True)[:at_once])


def _fits_device(worker: WorkerEstimate) -> bool:
    """Report whether the stages that can be cut fit the worker's device; the others do not depend on the inputs."""
    memory_bytes = worker.device_memory_bytes
    stage_bytes = [stage.device_bytes or 0 for stage in worker.stages if stage.stage in CUT]
    return memory_bytes is None or max(stage_bytes, default=0) <= memory_bytes


def _count_at_once(workers: Sequence[WorkerEstimate], available_bytes: int | None, kept_bytes: int) -> int:
    """Return how many workers fit side by side in each wave, whichever workers of the wave they are.

    Where every wave fits as a whole, it is the size of the largest.
    """
    whole_waves, cut_waves = [], []
    for wave in _waves(workers):
        count = len(wave)
        if available_bytes is not None:
            while count > 1 and MARGIN * (_largest_bytes(wave, count)[0] + kept_bytes) > available_bytes:
                count -= 1
        if count < len(wave):
            cut_waves.append(count)
        else:
            whole_waves.append(count)
    # A small wave that fits must not lower the count of a large one that fits too.
    return min(cut_waves) if cut_waves else max(whole_waves)


def _largest_bytes(wave: Sequence[WorkerEstimate], count: int) -> tuple[int, int]:
    """Return private and mapped memory of so many workers of a wave, those that take the most."""
    return together(sorted(wave, key=lambda worker: -worker.host_private_bytes)[:count])


def _waves(workers: Sequence[WorkerEstimate]) -> list[list[WorkerEstimate]]:
    """Return the workers by wave: those of one wave run side by side."""
    numbers = sorted({worker.wave for worker in workers})
    return [[worker for worker in workers if worker.wave == number] for number in numbers]


def _changes(case: Case, fitted: Case, workers: Sequence[WorkerEstimate], at_once: int) -> Iterator[str]:
    """Yield, in words, how the fitted case differs from the one that was asked for."""
    largest_wave = max(map(len, _waves(workers)))
    if at_once < largest_wave:
        yield f"{at_once} of {largest_wave} workers at a time"
    if fitted.long_tokens < case.long_tokens:
        yield f"forward: no text of {case.long_tokens} tokens"
    if fitted.tokens < case.tokens:
        yield f"forward and gradient: {fitted.tokens} of {case.tokens} tokens"
    if fitted.sequences() < case.sequences():
        yield f"forward and gradient: {fitted.sequences()} of {case.sequences()} sequences"
    for worker in workers:
        if worker.placement == "offload" and case.placement == "auto":
            yield f"{worker.worker}: offload, the base is streamed from the host layer by layer"


def _unknown(workers: Sequence[WorkerEstimate], *, beyond: bool) -> Iterator[str]:
    """Yield, in words, what the estimate leaves open; `beyond`: mapped files do not fit with the private memory."""
    if beyond:
        yield (
            "the files of the base do not stay in the host's memory: they are read again for every pass, "
            "and the time of that depends on the disk"
        )
    for worker in workers:
        if worker.device_memory_bytes is not None and (worker.device_bytes or 0) > worker.device_memory_bytes:
            yield f"{worker.worker}: whether its device has room; by estimate it needs more than it has"


def _refusal(worker: WorkerEstimate, available_bytes: int | None, kept_bytes: int) -> InputError:
    """Return the error for a worker that does not fit, which names its largest stage."""
    stage = max(worker.stages, key=lambda stage: stage.host_private_bytes)
    hint = f"leave {stage.stage} out (--stages), or free memory"
    if kept_bytes:
        hint += f"; {ON_DISK}"
    return InputError(
        "the case does not fit the memory of this host, however it is cut",
        where=f"{stage.stage} on {worker.worker}",
        got=f"{_gigabytes(stage.host_private_bytes + kept_bytes)} needed, by estimate",
        wanted=f"{_gigabytes(available_bytes or 0)} at most, which is available now",
        hint=hint,
    )


def _gigabytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
