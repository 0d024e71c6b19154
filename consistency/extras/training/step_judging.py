"""Judge the results of each step of a training: averaged gradients, parameters, and whether all ranks have the same.

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
from consistency.capture.records import RecordStatus, TensorRecord
from consistency.capture.wording import some
from consistency.case.stage import Stage
from consistency.extras.training.ranks.group import JoinedGroup
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
from consistency.worker.recorder import UserTolerance
from consistency.worker.training.adamw import EPSILON, ExactState

PIECE = 1 << 16
"""Elements whose exact values are made at once: some twenty arrays of 512 KiB."""

SAME_BITS = "same bits on all ranks"

Exact = Callable[[slice], Sequence[Bounded]]
"""Return the exact values of some elements after each step, with their bounds."""

Inputs = Callable[[slice, int], torch.Tensor]
"""Return some elements of the tensors from which a step computes its result."""


def _no_word(_step: int) -> Word | None:
    return None


class StepJudge:
    """Judges the gradients and parameters that a rank, or a device alone, has after each step.

    Parameters
    ----------
    ranks : JoinedGroup or None
        None for a device that trains alone.
    files : sequence of StepFile
        The files of all ranks, in their order.
    title : str
        Name of a second training of the same stage, before the names of its tensors.
    """

    def __init__(
        self, context: Context, ranks: JoinedGroup | None, stage: Stage, files: Sequence[StepFile], *, title: str = ""
    ) -> None:
        self._context = context
        self._alone = ranks is None
        self._group = ranks
        self._stage = stage
        self._files = files
        self._own = files[0] if ranks is None else files[ranks.rank]
        self._steps = self._own.steps
        self._title = title

    @property
    def _ranks(self) -> JoinedGroup:
        assert self._group is not None
        return self._group

    def judge_average(self, name: str) -> bool:
        """Record whether a gradient is the average of the ranks' own ones; return False where it is known not to be."""

        def gradients(piece: slice, step: int) -> torch.Tensor:
            return torch.stack([file.elements(OWN, name, step)(piece) for file in self._files])

        def exact(piece: slice) -> Sequence[Bounded]:
            return [exact_sum(gradients(piece, step), average=True) for step in range(self._steps)]

        return self._record(AVERAGED, name, gradients, exact, word=lambda step: self._word_of_own_gradient(name, step))

    def _word_of_own_gradient(self, name: str, step: int) -> Word | None:
        """Return the word for a gradient that is this rank's own one in place of the average."""
        averaged, own = (self._own.tensor(kind, name, step) for kind in (AVERAGED, OWN))
        return UNSYNCHRONIZED if torch.equal(averaged, own) else None

    def judge_parameter(self, name: str, start: torch.Tensor) -> None:
        """Record a parameter after each step.

        A device alone is judged step by step, from the bytes that its parameter had before: what an earlier step may
        round is allowed in its moments alone.

        Parameters
        ----------
        start : torch.Tensor
            The parameter before the first step, on the CPU.
        """
        gradients = [self._own.elements(AVERAGED, name, step) for step in range(self._steps)]
        exact = self._exact_parameter(name, start)
        self._record(UPDATED, name, lambda piece, step: gradients[step](piece), exact)

    def drift_ratio(self, name: str, start: torch.Tensor, other: str) -> float:
        """Return a parameter's largest distance from another rank's after the last step, in units of twice its bound.

        Parameters
        ----------
        start : torch.Tensor
            The parameter before the first step, on the CPU.
        other : str
            Name of the other rank.
        """
        exact, largest = self._exact_parameter(name, start), 0.0
        other_file = self._files[self._ranks.group.ranks.index(other)]
        own, others = (file.elements(UPDATED, name, self._steps - 1) for file in (self._own, other_file))
        for piece in self._pieces(name):
            distance = np.abs(_as_float64(own(piece)) - _as_float64(others(piece)))
            # each of the two ranks may be off by the bound, to either side
            allowed = 2 * exact(piece)[-1].allowed
            # equal elements keep their distance of zero, whatever is allowed
            ratios = np.divide(distance, allowed, where=distance > 0, out=distance)
            largest = max(largest, float(np.max(ratios)))
        return largest

    def _exact_parameter(self, name: str, start: torch.Tensor) -> Exact:
        """Return a function that computes the optimizer's exact steps from the gradients that this rank has."""
        read_start, arithmetic = elements_of(start), Arithmetic.of(start.dtype)
        gradients = [self._own.elements(AVERAGED, name, step) for step in range(self._steps)]
        updated = [self._own.elements(UPDATED, name, step) for step in range(self._steps)]

        def exact(piece: slice) -> Sequence[Bounded]:
            state = ExactState(arithmetic.known(_as_float64(read_start(piece))))
            parameters = []
            for step, gradient in enumerate(gradients):
                # a device alone goes on from its own bytes, so each step is judged by itself
                if self._alone and step:
                    before = arithmetic.known(_as_float64(updated[step - 1](piece)))
                    state = dataclasses.replace(state, parameter=before)
                state = state.after(arithmetic.known(_as_float64(gradient(piece))))
                parameters.append(state.parameter)
            return parameters

        return exact

    def _record(
        self,
        kind: str,
        name: str,
        inputs: Inputs,
        exact: Exact,
        *,
        word: Callable[[int], Word | None] = _no_word,
    ) -> bool:
        """Record the first step that is outside its bound; return whether there is none, or none that can be judged.

        If no step is outside, it records the last one; for a device alone, whose steps are judged each by itself, the
        one nearest to its bound.

        Parameters
        ----------
        inputs : callable
            The tensors from which the step's result is made.
        word : callable, optional
            Returns the word of a step that is outside, where it is more than its numbers say.
        """
        record, (layer, parameter) = self._context.record, self._place(name)
        tensor = f"{parameter}.{kind}"
        if not self._alone:
            tensor += self._ranks.count_suffix
        of_all_steps = self._own.read(kind, name)
        assert of_all_steps is not None
        if 0 in of_all_steps.shape:  # fewer rows than ranks
            return True
        if reason := self._reason_unbounded(name, of_all_steps.dtype, inputs, exact):
            record.skipped(self._stage, reason, tensor, layer=layer, rule=Rule.BOUND)
            return True
        tolerance = record.tolerance(stage=self._stage, layer=layer, dtype=of_all_steps.dtype)
        tensors = [self._own.tensor(kind, name, step) for step in range(self._steps)]
        stretches = self._stretches(kind, name, exact, tolerance)
        piece_count = max(1, -(-self._size(name) // PIECE))
        measures = measure_in_parts(tensors, stretches, piece_count, PIECE)
        step = self._step_to_record(measures)
        measure = measures[step]
        is_within = passes(_ratio(measure))

        # for a diagnosis, of the recorded step alone
        def chunks() -> Iterator[Chunk]:
            return itertools.chain.from_iterable(of_step[step].chunks() for of_step in stretches(range(piece_count)))

        evidence: dict[str, Any] = {"step": step + 1}
        if not self._alone:
            evidence["ranks"] = list(self._ranks.names)
        # other ranks hold other parts, with which a row would be compared
        if self._own.parts[name].dim is not None:
            record_part(
                self._context,
                self._stage,
                layer,
                tensor,
                measure=measure,
                ratio=_ratio(measure),
                chunks=chunks,
                evidence=evidence,
            )
            return is_within
        row_word = None if is_within else word(step)
        row = TensorRecord(
            self._stage, layer, tensor, rule=Rule.BOUND, status="measured", evidence=evidence, word=row_word
        )
        record.computed(row, tensors[step], tolerance=tolerance, measure=measure, chunks=chunks)
        return is_within

    def _stretches(
        self, kind: str, name: str, exact: Exact, tolerance: UserTolerance | None
    ) -> Callable[[range], Iterator[tuple[Stretch, ...]]]:
        """Return a function that yields the stretches of some pieces, each a tuple with one of every step."""
        actual_of_steps = [self._own.elements(kind, name, step) for step in range(self._steps)]
        size = self._size(name)

        def stretches(numbers: range) -> Iterator[tuple[Stretch, ...]]:
            for number in numbers:
                piece = slice(number * PIECE, min(size, (number + 1) * PIECE))
                of_steps = []
                for actual, bounded in zip(actual_of_steps, exact(piece), strict=True):
                    allowed = None if tolerance else bounded.allowed
                    stretch = Stretch(
                        start=piece.start, actual=actual(piece), value=bounded.value, size=allowed, allowance=tolerance
                    )
                    of_steps.append(stretch)
                yield tuple(of_steps)

        return stretches

    def _step_to_record(self, measures: Sequence[Measure]) -> int:
        """Return the first step that is outside, else the last one, or the worst where each is judged by itself."""
        ratios = [_ratio(measure) for measure in measures]
        for step, ratio in enumerate(ratios):
            if not passes(ratio):
                return step
        return int(np.argmax(ratios)) if self._alone else self._steps - 1

    def _reason_unbounded(self, name: str, dtype: torch.dtype, inputs: Inputs, exact: Exact) -> str:
        """Return the reason why there is no bound; empty where there is one."""
        if dtype not in UNIT_ROUNDOFF:
            return f"no bound is derived in {name_of(dtype)}"
        # in a dtype of little range ε may round to zero
        has_epsilon = float(torch.tensor(EPSILON, dtype=dtype)) > 0
        for piece in self._pieces(name):
            if not all(bool(torch.isfinite(inputs(piece, step)).all()) for step in range(self._steps)):
                return "a gradient is NaN or infinite"
            if not has_epsilon and not all(np.isfinite(bounded.allowed).all() for bounded in exact(piece)):
                return f"AdamW's ε is 0 in {name_of(dtype)}: its step divides small gradients by zero"
        return ""

    def compare_ranks(
        self, kind: str, names: Sequence[str], subject: str, *, explained: Collection[str] = ()
    ) -> list[str]:
        """Record whether this rank has the bits of the others after each step; return the tensors with other bits.

        Parameters
        ----------
        subject : str
            The compared tensors, in words.
        explained : collection of str
            Tensors with a row that says already what is wrong.
        """
        first_difference: dict[str, tuple[int, list[str]]] = {}
        for step in range(self._steps):
            for name, others in self.differing(kind, names, step).items():
                first_difference.setdefault(name, (step, others))
        for name, (step, others) in first_difference.items():
            if name in explained:
                continue
            layer, parameter = self._place(name)
            self._context.record.fact(
                self._stage,
                layer,
                f"{parameter}.{kind}, {SAME_BITS}",
                status="outside",
                word=words.DIFFERS,
                evidence={"step": step + 1},
                reason=f"other bits than on {some(others)} from step {step + 1} on",
            )
        if not first_difference:
            self._context.record.fact(
                self._stage,
                WHOLE_MODEL,
                f"{self._title}{subject}, {SAME_BITS}",
                status="equal",
                evidence={"tensors": len(names), "steps": self._steps, "ranks": list(self._ranks.group.ranks)},
            )
        return list(first_difference)

    def differing(self, kind: str, names: Sequence[str], step: int) -> dict[str, list[str]]:
        """Return the ranks that have other bits than this one, by tensor.

        A tensor is there only where this rank differs from most, or, without a majority, from the first.
        """
        # digests in place of tensors: they go beside the collectives, which may be wrong
        own_digests = {name: digest(self._own.tensor(kind, name, step)).value for name in names}
        answers = self._ranks.exchange(f"{self._title}{kind}, step {step + 1}", json.dumps(own_digests))
        digests_of_ranks = [json.loads(answer) for answer in answers]
        ranks_by_name = {}
        for name in names:
            if others := self._ranks.ranks_against([digests.get(name, "") for digests in digests_of_ranks]):
                ranks_by_name[name] = others
        return ranks_by_name

    def _place(self, name: str) -> tuple[str, str]:
        """Return the layer of a parameter, and the name of its rows' tensor without the kind."""
        layer, parameter = adapter_place(self._context.expected[name][0])
        return layer, f"{self._title}{parameter}"

    def _size(self, name: str) -> int:
        return math.prod(self._own.parts[name].shape)

    def _pieces(self, name: str) -> Iterator[slice]:
        """Yield the pieces of a flattened parameter whose exact values fit in memory at once."""
        size = self._size(name)
        for start in range(0, size, PIECE):
            yield slice(start, min(size, start + PIECE))


def record_part(
    context: Context,
    stage: Stage,
    layer: str,
    tensor: str,
    *,
    measure: Measure,
    ratio: float,
    chunks: Chunks,
    evidence: Mapping[str, Any] | None = None,
) -> None:
    """Record the error of this rank's part of a tensor.

    Other ranks hold other parts, so it has no digest, which would be compared with theirs.
    """
    all_evidence = dict(evidence or {})
    word = None
    status: RecordStatus = "equal" if measure.mismatched == 0 else "within"
    if not passes(ratio):
        diagnosis = diagnose_computed(measure, chunks)
        status, word = "outside", diagnosis.word
        all_evidence |= {**diagnosis.evidence, "wrong_elements": measure.mismatched}
    context.record.fact(stage, layer, tensor, ratio=ratio, word=word, status=status, evidence=all_evidence)


def _ratio(measure: Measure) -> float:
    return float(measure.ratio or 0)


def _as_float64(tensor: torch.Tensor) -> Any:
    return tensor.to(torch.float64).numpy()
