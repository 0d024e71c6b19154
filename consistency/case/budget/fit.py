"""Fit a case to the memory of its host and devices, before a worker starts.

What is cut, in this order, because each costs more than the one before: sequences of one backward pass; tokens of each
sequence; sequences; workers side by side. Fewer tokens and fewer sequences leave something unchecked,
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
"""What is fitted leaves room for an estimate that is 25 % too low; a case is refused only by the estimate itself."""

CUT = stages_of(lambda spec: spec.feeds_inputs)
"""Stages whose memory depends on the size of the inputs."""

FEWEST_TOKENS = 4
"""Of a sequence: with fewer, attention has hardly anything to do."""

ON_DISK = "set TMPDIR to a folder on a disk: scratch files take memory where they are now"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a case takes, and what was changed so that it fits."""

    case: Case
    """With what was cut: this is what is run."""
    shape: Shape
    workers: tuple[WorkerEstimate, ...]
    at_once: int
    """Workers side by side at most."""
    host_available_bytes: int | None
    """None where the host does not report it: nothing is fitted to it then."""
    host_private_bytes: int
    host_mapped_bytes: int
    """`host_private_bytes`, `host_mapped_bytes`: of the workers side by side that take the most."""
    scratch_bytes: int = 0
    """Of files in the scratch folder, of those workers that write the most side by side."""
    scratch_in_memory: bool = False
    """Whether these files take memory of the host; they are in `host_private_bytes` then."""
    changes: tuple[str, ...] = field(default=())
    """What was changed."""
    not_checked: tuple[str, ...] = field(default=())
    """What is not checked because of that."""
    unknown: tuple[str, ...] = field(default=())
    """What is not estimated, and why."""
    refusal: InputError | None = None
    """Why the case cannot be run: a worker does not fit, however the case is cut."""


def make_budget(case: Case, planned: Sequence[PlannedWorker], *, available_bytes: int | None) -> Budget:
    """Estimate a case and fit it to the memory of its host and devices.

    Parameters
    ----------
    planned : sequence of PlannedWorker
        At least one.
    available_bytes : int or None
        Of the host.
    """
    shape = read_shape(case)
    fitted = _fitted(case, shape, planned, available_bytes)
    workers = tuple(_estimate(fitted, shape, worker) for worker in planned)
    in_memory = any(worker.scratch_in_memory for worker in planned)
    kept = _kept(workers) if in_memory else 0
    too_large = next((found for found in workers if not _fits(found, available_bytes, kept)), None)
    at_once = _at_once(workers, available_bytes, kept)
    private, mapped = max((_largest(wave, at_once) for wave in _waves(workers)), key=sum)
    private += kept
    beyond = available_bytes is not None and private + mapped > available_bytes
    return Budget(
        case=fitted,
        shape=shape,
        workers=workers,
        at_once=at_once,
        host_available_bytes=available_bytes,
        host_private_bytes=private,
        host_mapped_bytes=mapped,
        scratch_bytes=max(_scratch(wave, at_once) for wave in _waves(workers)) + _kept(workers),
        scratch_in_memory=in_memory,
        changes=tuple(_changes(case, fitted, workers, at_once)),
        not_checked=tuple(text for text in fitted.not_checked() if text not in case.not_checked()),
        unknown=(*shape.unknown, *_unknown(workers, beyond=beyond)),
        refusal=None if too_large is None else _refusal(too_large, available_bytes, kept),
    )


def _estimate(case: Case, shape: Shape, worker: PlannedWorker) -> WorkerEstimate:
    offloads = worker.on_device and is_offloaded(case, shape, worker.device_memory_bytes)
    return estimate_worker(case, shape, worker, offloads=offloads)


def _fitted(case: Case, shape: Shape, planned: Sequence[PlannedWorker], available_bytes: int | None) -> Case:
    """Return the case with the first cut that fits; uncut where none does, because cutting it would not help."""
    cuts = [msgspec.structs.replace(case, fit=cut) for cut in _cuts(case, shape)]
    for margin, tried in ((MARGIN, cuts), (1.0, cuts[-1:])):
        for cut in tried:
            found = [_estimate(cut, shape, worker) for worker in planned]
            kept = _kept(found) if any(worker.scratch_in_memory for worker in planned) else 0
            if all(_fits(worker, available_bytes, kept, margin=margin) and _fits_device(worker) for worker in found):
                return cut
    return case


def _cuts(case: Case, shape: Shape) -> Iterator[Fit]:
    """Yield what a case can be cut to, from nothing to the most."""
    yield case.fit
    if not set(CUT) & set(case.stages):
        return
    sequences, tokens = shape.sequences or case.sequences(shape.matrix_elements), case.tokens
    if case.makes_inputs:
        for fewer in _halves(tokens, FEWEST_TOKENS):
            yield msgspec.structs.replace(case.fit, tokens=fewer)
        for fewer in _halves(sequences, 1):
            yield msgspec.structs.replace(case.fit, tokens=min(tokens, FEWEST_TOKENS), sequences=fewer)


def _halves(count: int, least: int) -> Iterator[int]:
    while count > least:
        count = max(least, count // 2)
        yield count


def _fits(found: WorkerEstimate, available_bytes: int | None, kept: int, *, margin: float = 1.0) -> bool:
    """Report whether a worker alone fits; files that are mapped need no room, because their pages can be dropped.

    `kept` is memory that scratch files take until the case ends, whichever worker runs.
    """
    return available_bytes is None or margin * (found.host_private_bytes + kept) <= available_bytes


def _kept(workers: Sequence[WorkerEstimate]) -> int:
    return sum(worker.kept_bytes for worker in workers)


def _scratch(wave: Sequence[WorkerEstimate], at_once: int) -> int:
    """Return the bytes of scratch files that the workers of a wave remove themselves."""
    return sum(sorted((worker.scratch_bytes for worker in wave), reverse=True)[:at_once])


def _fits_device(found: WorkerEstimate) -> bool:
    """Report whether the stages that can be cut fit the worker's device; the others do not depend on the inputs."""
    most = found.device_memory_bytes
    cut = [stage.device_bytes or 0 for stage in found.stages if stage.stage in CUT]
    return most is None or max(cut, default=0) <= most


def _at_once(workers: Sequence[WorkerEstimate], available_bytes: int | None, kept: int) -> int:
    """Return how many workers of any wave fit side by side, whichever they are."""
    counts = []
    for wave in _waves(workers):
        count = len(wave)
        if available_bytes is not None:
            while count > 1 and MARGIN * (_largest(wave, count)[0] + kept) > available_bytes:
                count -= 1
        counts.append((count < len(wave), count))
    short = [count for cut, count in counts if cut]
    return min(short) if short else max(count for _, count in counts)


def _largest(wave: Sequence[WorkerEstimate], count: int) -> tuple[int, int]:
    return together(sorted(wave, key=lambda worker: -worker.host_private_bytes)[:count])


def _waves(workers: Sequence[WorkerEstimate]) -> list[list[WorkerEstimate]]:
    numbers = sorted({worker.wave for worker in workers})
    return [[worker for worker in workers if worker.wave == number] for number in numbers]


def _changes(case: Case, fitted: Case, workers: Sequence[WorkerEstimate], at_once: int) -> Iterator[str]:
    most = max(map(len, _waves(workers)))
    if at_once < most:
        yield f"{at_once} of {most} workers at a time"
    if fitted.tokens < case.tokens:
        yield f"forward and gradient: {fitted.tokens} of {case.tokens} tokens"
    if fitted.sequences() < case.sequences():
        yield f"forward and gradient: {fitted.sequences()} of {case.sequences()} sequences"
    for worker in workers:
        if worker.placement == "offload" and case.placement == "auto":
            yield f"{worker.worker}: offload, the base is streamed from the host layer by layer"


def _unknown(workers: Sequence[WorkerEstimate], *, beyond: bool) -> Iterator[str]:
    if beyond:
        yield (
            "the files of the base do not stay in the host's memory: they are read again for every pass, "
            "and the time of that depends on the disk"
        )
    for worker in workers:
        if worker.device_memory_bytes is not None and (worker.device_bytes or 0) > worker.device_memory_bytes:
            yield f"{worker.worker}: whether its device has room; by estimate it needs more than it has"


def _refusal(found: WorkerEstimate, available_bytes: int | None, kept: int) -> InputError:
    stage = max(found.stages, key=lambda stage: stage.host_private_bytes)
    return InputError(
        "the case does not fit the memory of this host, however it is cut",
        where=f"{stage.stage} on {found.worker}",
        got=f"{_gigabytes(stage.host_private_bytes + kept)} needed, by estimate",
        wanted=f"{_gigabytes(available_bytes or 0)} at most, which is available now",
        hint=f"leave {stage.stage} out (--stages), or free memory" + (f"; {ON_DISK}" if kept else ""),
    )


def _gigabytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
