"""Record the decisions that every worker of a run is compared on, and how far each was from being another one.

**When is another decision healthy?** A decision rests on an operand v and changes where v crosses a boundary at the
distance m, its margin in the float64 pass. A device whose error in v is at most e can decide otherwise only if m ≤ e.
For a selection by order, m is the gap between the two scores that were chosen; each of them may be off by e: m ≤ 2e.
There is no new threshold: e is what the `relative` rule allows in v, by the error that rounding makes there
(`rules.relative_allowance`). Where m ≤ e the decision is *undecided*, and both ways are right; where m > e, rounding
does not explain another one.

**What follows an undecided decision** may jump on a healthy device: a unit's gradient comes or goes, a token takes
another expert. So all is compared on one *track*: what the float64 pass decides, on values that are the same for all.
Passes with noise and those of devices follow it; what a device would have decided itself is compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from consistency.capture.json_codec import decode_json, encode_json
from consistency.capture.names import WHOLE_MODEL
from consistency.numerics.decision import Decision, gaps
from consistency.numerics.decisions import Watch
from consistency.numerics.dtype import name_of
from consistency.numerics.independent_errors import independent_rows
from consistency.numerics.real import Real
from consistency.numerics.rules import UNIT_ROUNDOFF, RoundingError, relative_allowance
from consistency.worker.decisions.array_file import ArrayFile, Part
from consistency.worker.model.structure import prefix_of_base


class Places(AbstractContextManager["Places"]):
    """Follow the modules of a model while it runs.

    Attributes
    ----------
    now : str
        The innermost module that is running, by its name in the base; the whole model in a backward pass.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        prefix = prefix_of_base(model)
        self._names = {id(module): name.removeprefix(prefix) for name, module in model.named_modules()}
        self._running: list[str] = []
        """Names of the modules that are running, the innermost last; empty for modules that are not the model's."""
        self._hooks = ExitStack()

    @property
    def now(self) -> str:
        return next((name for name in reversed(self._running) if name), WHOLE_MODEL)

    def __enter__(self) -> Places:
        self._running.clear()
        begins = register_module_forward_pre_hook(self._begin)
        self._hooks.callback(begins.remove)
        self._hooks.callback(register_module_forward_hook(self._end, always_call=True).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _begin(self, module: torch.nn.Module, _: Any) -> None:
        self._running.append(self._names.get(id(module), ""))

    def _end(self, *_: Any) -> None:
        if self._running:
            self._running.pop()


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """One decision of the track."""

    name: str
    """Name of the operation."""
    decided: Part
    """The decision, element by element: truth values, numbers of intervals or integers; for a selection, indices."""
    exact: Part
    """The exact margins; for a selection, the exact scores."""
    dim: int | None
    """The dimension of a selection's scores; None of another decision."""
    allowed: dict[str, Real]
    """The largest margin with which rounding explains another decision, by the name of the products."""


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions of every pass in their order, by the name of the pass."""

    passes: dict[str, tuple[Settled, ...]] = {}

    @classmethod
    def of(cls, path: Path) -> Table:
        """Return the table of a published track."""
        return decode_json(table_of(path).read_bytes(), cls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """Elements in which a decision of a worker differs from the track."""

    place: str
    """Name of the module."""
    name: str
    """Name of the operation."""
    elements: int
    """Number of these elements."""
    margin: float
    """The largest exact margin among them."""
    allowed: float
    """The largest margin that rounding explains."""

    @property
    def is_undecided(self) -> bool:
        return self.margin <= self.allowed


@dataclass(slots=True, kw_only=True)
class _Step:
    """A decision of the float64 pass, before the errors of its operand are known."""

    name: str
    decided: Part
    operand: Part
    margins: Part
    dim: int | None
    scores: int
    """Number of values of the operand that a margin lies between, each of which may be off: two for a selection."""
    operands: dict[str, list[Part]] = field(default_factory=dict)
    """The operand in each noisy pass, by the name of the products."""


class Track:
    """Record the decisions of float64 passes, and let noisy passes decide the same, which show the errors of operands.

    Parameters
    ----------
    path : Path
        The file of arrays that all workers read. Operands are in another beside it until `publish`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        operands = path.with_suffix(".operands")
        for old in (path, operands):  # of the case before
            old.unlink(missing_ok=True)
        self._shared, self._operands = ArrayFile(path), ArrayFile(operands)
        self._steps: dict[str, list[_Step]] = {}

    def exact(self, key: str) -> Watch:
        """Return a watch that records a float64 pass under a key."""
        steps = self._steps[key] = []

        def record(decision: Decision) -> None:
            decided, margins = plain(decision.decided), decision.margins(decision.operand)
            if decision.dim is None:
                margins = margins.to(torch.float32)
            steps.append(
                _Step(
                    name=decision.name,
                    decided=self._shared.append(decided),
                    operand=self._operands.append(decision.operand),
                    margins=self._shared.append(margins),
                    dim=decision.dim,
                    scores=decision.scores,
                )
            )

        return record

    def other(self, key: str, title: str = "") -> Watch | None:
        """Return a watch that lets another pass decide as the float64 one did; None where that decided nothing.

        Watching takes some 30 µs of processor time per operation.

        Parameters
        ----------
        title : str
            Name of the products of a noisy pass, whose operands are kept to measure their errors; empty for a pass
            whose operands are not.
        """
        remaining = iter(self._steps.get(key, ()))

        def follow(decision: Decision) -> torch.Tensor | None:
            step = next(remaining, None)
            if step is None or not is_same(step.name, step.decided, decision):
                return None
            if title:
                step.operands.setdefault(title, []).append(self._operands.append(decision.operand))
            return self._shared.read(step.decided)

        return follow if self._steps.get(key) else None

    @property
    def decides(self) -> bool:
        """Whether any pass decides something."""
        return any(self._steps.values())

    def publish(self) -> None:
        """Write the table, and remove the operands."""
        table = Table(passes={key: tuple(map(self._settled, steps)) for key, steps in self._steps.items()})
        self._operands.remove()
        self._shared.touch()
        table_of(self._path).write_bytes(encode_json(table))

    def _settled(self, step: _Step) -> Settled:
        """Return a decision of the track, with the errors that noisy passes show in its operand."""
        exact = self._operands.read(step.operand)
        allowed = {
            title: Real(step.scores * allowed_error([self._operands.read(part) for part in parts], exact))
            for title, parts in step.operands.items()
        }
        return Settled(
            name=step.name,
            decided=step.decided,
            exact=step.margins,
            dim=step.dim,
            allowed=allowed or {"": Real(math.inf)},
        )


def plain(decided: torch.Tensor) -> torch.Tensor:
    """Return a decision in a dtype that does not depend on the dtype of the pass."""
    if not decided.is_floating_point():
        return decided
    if decided.device.type == "mps":  # Metal has no float64; the value is the same number on the host
        decided = decided.to("cpu")
    return decided.to(torch.float64)


def is_same(name: str, decided: Part, decision: Decision) -> bool:
    """Report whether a decision has the operation and the shape of one of the track."""
    return name == decision.name and decided.shape == tuple(decision.decided.shape)


def compared(
    name: str, place: str, exact: torch.Tensor, dim: int | None, own: torch.Tensor, other: torch.Tensor, allowed: float
) -> Flip | None:
    """Compare two outcomes of one decision; return how far they differ, None if they are equal.

    Parameters
    ----------
    name, place : str
        The operation and the module.
    exact : torch.Tensor
        Exact margins; for a selection (`dim` is not None) its exact scores.
    own, other : torch.Tensor
        The outcomes.
    allowed : float
        The largest margin that rounding explains.
    """
    differs = own != other
    if not bool(differs.any()):
        return None
    margins = exact if dim is None else gaps(exact, dim, own, other)
    margin = float(margins.to(torch.float64)[differs].max())
    return Flip(place=place, name=name, elements=int(differs.sum()), margin=margin, allowed=allowed)


def allowed_error(operands: Sequence[torch.Tensor], exact: torch.Tensor) -> float:
    """Return the tolerance of the `relative` rule for an operand, by the operands of noisy passes on the CPU.

    It is infinite where a noisy pass has NaN or infinity, and for a dtype that is not rounded to.
    """
    exact, largest, counts = exact.to(torch.float64), 0.0, []
    is_finite = exact.isfinite()
    for operand in operands:
        # masks have infinities, in the exact operand too
        error = torch.where((operand == exact) | ~is_finite, 0.0, operand.to(torch.float64) - exact)
        largest = max(largest, float(error.abs().max())) if error.numel() else 0.0
        if not math.isfinite(largest) or bool(error.isnan().any()):  # the values themselves are outside then
            return math.inf
        counts.append(independent_rows(error, torch.zeros_like(error)))
    dtype = name_of(operands[0].dtype)
    if dtype not in UNIT_ROUNDOFF:
        return math.inf
    magnitude = float(torch.where(is_finite, exact, 0.0).abs().max()) if exact.numel() else 0.0
    samples = -(-sum(counts) // len(counts))  # rounded up
    rounding = RoundingError(largest=Real(largest), samples=samples, drawn=sum(counts))
    return relative_allowance(rounding, magnitude, dtype)


def table_of(path: Path) -> Path:
    """Return the file of the table beside that of the arrays."""
    return path.with_suffix(".json")
