"""Judge what each step of a training left: the averaged gradients, the parameters, and whether all ranks have them.

The average of the ranks' gradients has the bound of a sum in any order. A parameter has that of the optimizer's steps
from the gradients' bytes on this rank, with the error that each step hands on to the next: gradients that all ranks
share leave no other difference between two ranks than twice that bound.

Of a tensor that ranks hold in parts each rank judges its own part, as a fact: it is that rank's to be wrong about.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from consistency.capture.names import WHOLE_MODEL, adapter_place
from consistency.capture.records import TensorRecord
from consistency.capture.wording import some
from consistency.case.stage import Stage
from consistency.extras.training.ranks.group import Joined
from consistency.extras.training.steps import AVERAGED, OWN, UPDATED, StepFile
from consistency.extras.training.words import UNSYNCHRONIZED
from consistency.numerics import words
from consistency.numerics.chunks import Chunk, Chunks, Stretch
from consistency.numerics.diagnosis_computed import diagnose_computed
from consistency.numerics.digest import digest
from consistency.numerics.dtype import UNIT_ROUNDOFF, name_of
from consistency.numerics.error import measure_in_parts
from consistency.numerics.file_tensor import elements_of
from consistency.numerics.measure import Measure
from consistency.numerics.rules import Rule, passes
from consistency.numerics.running_error import Arithmetic, Bounded, exact_sum
from consistency.numerics.words import Word
from consistency.worker.context import Context
from consistency.worker.training.adamw import EPSILON, ExactState

PART = 1 << 16
"""Elements whose exact values are made at once: some twenty arrays of 512 KiB."""

SAME_BITS = "same bits on all ranks"

Exact = Callable[[slice], Sequence[Bounded]]
"""Return some elements of each step with their bounds."""


class StepJudge:
    """Judges what a rank, or a device alone, has of each step.

    Parameters
    ----------
    ranks : Joined or None
        None for a device that trains alone.
    files : sequence of StepFile
        Of all ranks, in their order.
    title : str
        Of a second training of the same stage, before the names of its tensors.
    """

    def __init__(
        self, context: Context, ranks: Joined | None, stage: Stage, files: Sequence[StepFile], *, title: str = ""
    ) -> None:
        self._context = context
        self._alone = ranks is None
        self._group = ranks
        self._stage = stage
        self._files = files
        self._own = files[0 if ranks is None else ranks.rank]
        self._steps = self._own.steps
        self._title = title

    @property
    def _ranks(self) -> Joined:
        assert self._group is not None
        return self._group

    def averaged(self, name: str) -> bool:
        """Record a gradient as the average of those of the ranks; return whether it is, where that can be judged."""

        def given(part: slice, step: int) -> torch.Tensor:
            return torch.stack([file.elements(OWN, name, step)(part) for file in self._files])

        def exact(part: slice) -> Sequence[Bounded]:
            return [exact_sum(given(part, step), average=True) for step in range(self._steps)]

        return self._record(AVERAGED, name, given, exact, instead=lambda step: self._not_averaged(name, step))

    def _not_averaged(self, name: str, step: int) -> Word | None:
        """Return the word for a gradient that is this rank's own one."""
        gradients = [self._own.of_step(kind, name, step) for kind in (AVERAGED, OWN)]
        return UNSYNCHRONIZED if torch.equal(*gradients) else None

    def updated(self, name: str, start: torch.Tensor) -> None:
        """Record a parameter after each step.

        A device alone is judged step by step, from the bytes that its parameter had before: what an earlier step may
        round is allowed in its moments alone.

        Parameters
        ----------
        start : torch.Tensor
            The parameter before the first step, on the CPU.
        """
        elements = [self._own.elements(AVERAGED, name, step) for step in range(self._steps)]
        self._record(UPDATED, name, lambda part, step: elements[step](part), self._trajectory(name, start))

    def apart(self, name: str, start: torch.Tensor, other: str) -> float:
        """Return how far a parameter is from another rank's after the last step, by twice its bound."""
        exact, largest = self._trajectory(name, start), 0.0
        mine, its = (
            file.elements(UPDATED, name, self._steps - 1)
            for file in (self._own, self._files[self._ranks.group.ranks.index(other)])
        )
        for first in range(0, self._size(name), PART):
            part = slice(first, min(self._size(name), first + PART))
            distance = np.abs(_wide(mine(part)) - _wide(its(part)))
            allowed = 2 * exact(part)[-1].allowed
            largest = max(largest, float(np.max(np.divide(distance, allowed, where=distance > 0, out=distance))))
        return largest

    def _trajectory(self, name: str, start: torch.Tensor) -> Exact:
        before, by = elements_of(start), Arithmetic.of(start.dtype)
        gradients = [self._own.elements(AVERAGED, name, step) for step in range(self._steps)]
        updated = [self._own.elements(UPDATED, name, step) for step in range(self._steps)]

        def exact(part: slice) -> Sequence[Bounded]:
            state = ExactState(by.known(_wide(before(part))))
            found = []
            for step, gradient in enumerate(gradients):
                if self._alone and step:
                    state = dataclasses.replace(state, parameter=by.known(_wide(updated[step - 1](part))))
                state = state.after(by.known(_wide(gradient(part))))
                found.append(state.parameter)
            return found

        return exact

    def _record(
        self,
        kind: str,
        name: str,
        given: Callable[[slice, int], torch.Tensor],
        exact: Exact,
        *,
        instead: Callable[[int], Word | None] = lambda _: None,
    ) -> bool:
        """Record the first step that is outside its bound, the last one if none is; return whether none is.

        Of steps that are judged each by itself it is the one nearest to its bound, if none is outside.

        Parameters
        ----------
        given : callable
            What it is made from.
        instead : callable, optional
            Returns the word of a step that is outside, where it is more than its numbers say.
        """
        record, (layer, part) = self._context.record, self._place(name)
        tensor = f"{part}.{kind}{'' if self._alone else self._ranks.of_so_many}"
        kept = self._own.read(kind, name)
        assert kept is not None
        if 0 in kept.shape:  # fewer rows than ranks
            return True
        if why := self._unbounded(name, kept.dtype, given, exact):
            record.skipped(self._stage, why, tensor, layer=layer, rule=Rule.BOUND)
            return True
        tolerance = record.tolerance(stage=self._stage, layer=layer, dtype=kept.dtype)
        elements = [self._own.elements(kind, name, step) for step in range(self._steps)]
        size = self._size(name)

        def stretches(parts: range) -> Iterator[tuple[Stretch, ...]]:
            for number in parts:
                part = slice(number * PART, min(size, (number + 1) * PART))
                yield tuple(
                    Stretch(
                        start=part.start,
                        actual=actual(part),
                        value=bounded.value,
                        size=None if tolerance else bounded.allowed,
                        allowance=tolerance,
                    )
                    for actual, bounded in zip(elements, exact(part), strict=True)
                )

        parts = max(1, -(-size // PART))
        steps = [self._own.of_step(kind, name, step) for step in range(self._steps)]
        found = measure_in_parts(steps, stretches, parts, PART)
        ratios = [float(one.ratio or 0) for one in found]
        last = int(np.argmax(ratios)) if self._alone else self._steps - 1
        step = next((step for step, ratio in enumerate(ratios) if not passes(ratio)), last)

        is_within = passes(float(found[step].ratio or 0))

        def chunks() -> Iterator[Chunk]:
            return itertools.chain.from_iterable(several[step].chunks() for several in stretches(range(parts)))

        evidence = {"step": step + 1, **({} if self._alone else {"ranks": list(self._ranks.names)})}
        if self._own.parts[name].dim is not None:
            record_part(
                self._context,
                self._stage,
                layer,
                tensor,
                found=found[step],
                share=float(found[step].ratio or 0),
                chunks=chunks,
                evidence=evidence,
            )
            return is_within
        row = TensorRecord(
            self._stage,
            layer,
            tensor,
            rule=Rule.BOUND,
            status="measured",
            evidence=evidence,
            word=None if is_within else instead(step),
        )
        record.computed(row, steps[step], tolerance=tolerance, found=found[step], chunks=chunks)
        return is_within

    def _unbounded(
        self, name: str, dtype: torch.dtype, given: Callable[[slice, int], torch.Tensor], exact: Exact
    ) -> str:
        """Return why there is no bound."""
        if dtype not in UNIT_ROUNDOFF:
            return f"no bound is derived in {name_of(dtype)}"
        has_epsilon = float(torch.tensor(EPSILON, dtype=dtype)) > 0
        for start in range(0, self._size(name), PART):
            part = slice(start, min(self._size(name), start + PART))
            if not all(bool(torch.isfinite(given(part, step)).all()) for step in range(self._steps)):
                return "a gradient is NaN or infinite"
            if not has_epsilon and not all(np.isfinite(bounded.allowed).all() for bounded in exact(part)):
                return f"AdamW's ε is 0 in {name_of(dtype)}: its step divides small gradients by zero"
        return ""

    def compare(self, kind: str, names: Sequence[str], what: str, *, explained: Collection[str] = ()) -> list[str]:
        """Record whether this rank has the bits of the others after each step; return the tensors of which it has not.

        Parameters
        ----------
        what : str
            What is compared, in words.
        explained : collection of str
            Tensors of which a row says already what is wrong.
        """
        found: dict[str, tuple[int, list[str]]] = {}
        for step in range(self._steps):
            for name, others in self.odd(kind, names, step).items():
                found.setdefault(name, (step, others))
        for name, (step, others) in found.items():
            layer, part = self._place(name)
            if name in explained:
                continue
            self._context.record.fact(
                self._stage,
                layer,
                f"{part}.{kind}, {SAME_BITS}",
                status="outside",
                word=words.DIFFERS,
                evidence={"step": step + 1},
                reason=f"other bits than on {some(others)} from step {step + 1} on",
            )
        if not found:
            self._context.record.fact(
                self._stage,
                WHOLE_MODEL,
                f"{self._title}{what}, {SAME_BITS}",
                status="equal",
                evidence={"tensors": len(names), "steps": self._steps, "ranks": list(self._ranks.group.ranks)},
            )
        return list(found)

    def odd(self, kind: str, names: Sequence[str], step: int) -> dict[str, list[str]]:
        """Return the tensors of which this rank has other bits than most, or than the first, and who has these."""
        own = {name: digest(self._own.of_step(kind, name, step)).value for name in names}
        answers = self._ranks.answers(f"{self._title}{kind}, step {step + 1}", json.dumps(own))
        digests = [json.loads(answer) for answer in answers]
        return {
            name: others
            for name in names
            if (others := self._ranks.others_than([one.get(name, "") for one in digests]))
        }

    def _place(self, name: str) -> tuple[str, str]:
        layer, part = adapter_place(self._context.expected[name][0])
        return layer, f"{self._title}{part}"

    def _size(self, name: str) -> int:
        return math.prod(self._own.parts[name].shape)


def record_part(
    context: Context,
    stage: Stage,
    layer: str,
    tensor: str,
    *,
    found: Measure,
    share: float,
    chunks: Chunks,
    evidence: Mapping[str, Any] | None = None,
) -> None:
    """Record how far the part that this rank holds of a tensor is from the exact one.

    Other ranks hold other parts, so it has no digest, which would be compared with theirs.

    Parameters
    ----------
    share : float
        Error over allowance.
    """
    cause = None if passes(share) else diagnose_computed(found, chunks)
    more = {} if cause is None else {**cause.evidence, "wrong_elements": found.mismatched}
    context.record.fact(
        stage,
        layer,
        tensor,
        share=share,
        word=None if cause is None else cause.word,
        status="outside" if cause is not None else "equal" if found.mismatched == 0 else "within",
        evidence={**(evidence or {}), **more},
    )


def _wide(tensor: torch.Tensor) -> Any:
    return tensor.to(torch.float64).numpy()
