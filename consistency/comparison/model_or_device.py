"""Decide who is to blame for a result that is wrong in float64 too: the model's code, or one device.

The model's code makes it wrong everywhere. A worker that finds itself wrong in a way of generating runs that way in
float64, with its own kernels. One that is wrong in every dtype is wrong there too. So the model's code is accused only
where no other worker got that way right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from consistency.comparison.outcomes import Outcome
from consistency.comparison.workers import ComparedWorker
from consistency.numerics import words

IN_FLOAT64 = "in_float64"
"""Name of the evidence of such a result: what its own float64 pass said, and who contradicts it."""


def accuse_devices(outcomes: Sequence[Outcome], members: Sequence[ComparedWorker]) -> tuple[Outcome, ...]:
    """Return the outcomes of a tensor, with the device accused where another worker got it right by the same code."""
    workers = {worker.label: worker for worker in members}
    judged = []
    for outcome in outcomes:
        device_word = words.of_device(outcome.word)  # None where the word accuses no model
        witness = None
        if device_word is not None:
            witness = _witness(workers[outcome.workers[0]], outcomes, workers)
        if witness is not None:
            evidence = {**outcome.evidence, IN_FLOAT64: f"wrong on this worker too, and right on {witness.label}"}
            outcome = msgspec.structs.replace(outcome, word=device_word, evidence=evidence)
        judged.append(outcome)
    return tuple(judged)


def _witness(
    accused: ComparedWorker, outcomes: Sequence[Outcome], workers: Mapping[str, ComparedWorker]
) -> ComparedWorker | None:
    """Return a worker with the right result in the same dtype, and with limits no wider than those of the accused."""
    dtype = accused.info.environment.get("dtype")
    for outcome in outcomes:
        if outcome.status not in ("equal", "within"):
            continue
        for label in outcome.workers:
            worker = workers[label]
            # a witness with coarser products would pass by wider limits
            is_as_exact = not worker.products or worker.products == accused.products
            if is_as_exact and worker.info.environment.get("dtype") == dtype:
                return worker
    return None
