"""The decisions that every worker of a run is compared on, and how far each was from being another one.

**When is another decision healthy?** A decision rests on an operand v and changes where v crosses a boundary at the
distance m, its margin in the float64 pass. A device whose error in v is at most e can decide otherwise only if m ≤ e.
For a selection by order, m is the gap between the two scores that were chosen; each of them may be off by e: m ≤ 2e.
There is no new threshold: e is what the `relative` rule allows in v, by the error that rounding makes there
(`rules.relative_allowance`). Where m ≤ e the decision is *undecided*, and both ways are right; where m > e, rounding
does not explain another one.

**What follows an undecided decision** may jump on a healthy device: a unit's gradient comes or goes, a token takes
another expert. So all is compared on one *track*: what the CPU decided in the tested dtype. The float64 pass follows it
as far as it is undecided; where the CPU's own decision is beyond that, float64 keeps its own. A worker that decided as
the track, by digests, is compared as it is. Another computes the pass again on the track (`replay`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from consistency.capture.json_codec import decode_json, encode_json
from consistency.numerics.decision import Decision, gaps
from consistency.numerics.decisions import Watch
from consistency.numerics.digest import digest
from consistency.numerics.dtype import name_of
from consistency.numerics.independent_errors import independent_rows
from consistency.numerics.real import Real
from consistency.numerics.rules import UNIT_ROUNDOFF, RoundingError, relative_allowance
from consistency.worker.decisions.array_file import ArrayFile, Part
from consistency.worker.decisions.places import Places


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """One decision of the track.

    Attributes
    ----------
    name : str
        Of the operation.
    digest : str
        Of what was decided.
    decided, exact : Part
        What was decided; and the exact margins, or of a selection the exact scores.
    dim : int or None
        Of a selection, the dimension of its scores.
    allowed : dict
        The largest margin with which rounding explains another decision, by the name of the products.
    """

    name: str
    digest: str
    decided: Part
    exact: Part
    dim: int | None
    allowed: dict[str, Real]


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions of every pass in their order, by the name of the pass."""

    passes: dict[str, tuple[Settled, ...]] = {}

    @classmethod
    def of(cls, path: Path) -> Table:
        """Return the table of a published track."""
        return decode_json(table_of(path).read_bytes(), cls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """Elements in which a decision of a worker differs from the track.

    Attributes
    ----------
    place, name : str
        The module and the operation.
    margin, allowed : float
        The largest exact margin among the elements, and what rounding explains.
    """

    place: str
    name: str
    elements: int
    margin: float
    allowed: float

    @property
    def is_undecided(self) -> bool:
        return self.margin <= self.allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    name: str
    digest: str
    decided: Part
    operands: dict[str, list[Part]] = field(default_factory=dict)
    """Those of each pass with noise, and the CPU's own, by the name of the products."""

    def add(self, title: str, operand: Part) -> None:
        self.operands.setdefault(title, []).append(operand)


class Track:
    """Record what the CPU decides in the tested dtype, and hold other passes to it.

    Parameters
    ----------
    path : Path
        The file of arrays that all workers read. Operands are in another beside it until `publish`.
    model : torch.nn.Module
    title : str
        Name of the products of the pass whose decisions are the track: the CPU's own ones, or those of a device.

    Attributes
    ----------
    flips : list of Flip
        Where that pass itself decided otherwise than the float64 pass, and rounding does not explain it.
    places : Places
        Of the model that runs in float64.
    """

    def __init__(self, path: Path, model: torch.nn.Module, title: str) -> None:
        self.flips: list[Flip] = []
        self.places = Places(model)
        self._path = path
        self._title = title
        operands = path.with_suffix(".operands")
        for old in (path, operands):  # of the case before
            old.unlink(missing_ok=True)
        self._shared, self._operands = ArrayFile(path), ArrayFile(operands)
        self._steps: dict[str, list[_Step]] = {}
        self._settled: dict[str, list[Settled]] = {}
        self._lost: set[str] = set()

    @property
    def decides(self) -> bool:
        """Whether anything was decided in the passes that were recorded."""
        return any(self._steps.values())

    def own(self, key: str, *, is_judged: bool = False) -> Watch | None:
        """Return what records the pass that is the track; None as in `replay.Made.watch`.

        Its operands say what rounding makes of them, but those of a device that is judged by the track.
        """
        nothing = len(self._steps.keys() - {key}) > 0 and not any(self._steps.values())
        steps: list[_Step] = []
        self._steps[key] = steps

        def record(decision: Decision) -> None:
            decided = plain(decision.decided)
            step = _Step(name=decision.name, digest=digest_of(decided), decided=self._shared.append(decided))
            if not is_judged:
                step.add(self._title, self._operands.append(decision.operand))
            steps.append(step)

        return None if nothing else record

    def other(self, key: str, title: str) -> Watch | None:
        """Return what holds a pass with noise, or with a merged adapter, to the track, for the errors it makes."""
        steps = iter(self._steps[key])

        def follow(decision: Decision) -> torch.Tensor | None:
            step = next(steps, None)
            if step is None or not is_same(step.name, step.decided, decision):
                self._lost.add(key)
                return None
            step.add(title, self._operands.append(decision.operand))
            return self._shared.read(step.decided)

        return follow if self._steps[key] else None

    def exact(self, key: str) -> Watch | None:
        """Return what holds the float64 pass to the track where that is undecided, and settles what is allowed."""
        steps = iter(self._steps[key])
        settled: list[Settled] = []
        self._settled[key] = settled

        def settle(decision: Decision) -> torch.Tensor | None:
            step = next(steps, None)
            if step is None or not is_same(step.name, step.decided, decision):
                self._lost.add(key)
                return None
            own, decided, dim = self._shared.read(step.decided), plain(decision.decided), decision.dim
            exact = decision.margins(decision.operand)
            allowed = {
                title: Real(
                    decision.scores * allowed_error([self._operands.read(part) for part in parts], decision.operand)
                )
                for title, parts in step.operands.items()
            }
            limit = float(allowed.get(self._title, math.inf))
            flip = compared(step.name, self.places.now, exact, dim, own, decided, limit)
            follows = flip is None or flip.is_undecided
            if flip is not None and not follows:
                self.flips.append(flip)
            if dim is None:
                exact = exact.to(torch.float32)
            settled.append(
                Settled(
                    name=step.name, dim=dim, allowed=allowed, exact=self._shared.append(exact),
                    digest=step.digest if follows else digest_of(decided),
                    decided=step.decided if follows else self._shared.append(decided),
                )
            )  # fmt: skip
            return own if follows else None

        return settle if self._steps[key] else None

    def again(self, key: str) -> Watch | None:
        """Return what makes a further float64 pass decide as the first one did; None where it decided nothing."""
        steps = iter(self._settled.get(key, ()))

        def follow(decision: Decision) -> torch.Tensor | None:
            settled = next(steps, None)
            if settled is None or not is_same(settled.name, settled.decided, decision):
                return None
            return self._shared.read(settled.decided)

        return follow if self._settled.get(key) else None

    def was_complete(self, key: str) -> bool:
        """Report whether the passes with noise and in float64 had the operations of the track, in its order."""
        return key not in self._lost and len(self._settled.get(key, ())) == len(self._steps[key])

    def remove(self) -> None:
        """Remove the files of a track that is not published."""
        self._operands.remove()
        self._shared.remove()

    def publish(self) -> None:
        """Write the table, and remove the operands."""
        self._operands.remove()
        self._shared.touch()
        table = Table(passes={key: tuple(settled) for key, settled in self._settled.items()})
        table_of(self._path).write_bytes(encode_json(table))


def plain(decided: torch.Tensor) -> torch.Tensor:
    """Return what was decided in a dtype that does not depend on that of the pass."""
    if not decided.is_floating_point():
        return decided
    # Metal has no float64; the value is the same number on the host
    return (decided.to("cpu") if decided.device.type == "mps" else decided).to(torch.float64)


def digest_of(decided: torch.Tensor) -> str:
    """Return a digest of what was decided, computed on its device."""
    decided = plain(decided)
    return digest(decided.to(torch.uint8) if decided.dtype == torch.bool else decided).value


def is_same(name: str, decided: Part, decision: Decision) -> bool:
    """Report whether a decision is that of the track, by its operation and shape."""
    return name == decision.name and decided.shape == tuple(decision.decided.shape)


def compared(
    name: str, place: str, exact: torch.Tensor, dim: int | None, own: torch.Tensor, other: torch.Tensor, allowed: float
) -> Flip | None:
    """Compare two ways of one decision by its exact margins, or of a selection its exact scores; None if equal."""
    differs = own != other
    if not bool(differs.any()):
        return None
    margins = exact if dim is None else gaps(exact, dim, own, other)
    margin = float(margins.to(torch.float64)[differs].max())
    return Flip(place=place, name=name, elements=int(differs.sum()), margin=margin, allowed=allowed)


def allowed_error(operands: Sequence[torch.Tensor], exact: torch.Tensor) -> float:
    """Return what the `relative` rule allows in an operand, by those of the passes on the CPU."""
    exact, largest, counts = exact.to(torch.float64), 0.0, []
    finite = exact.isfinite()
    for operand in operands:
        error = torch.where((operand == exact) | ~finite, 0.0, operand.to(torch.float64) - exact)  # as masks are
        largest = max(largest, float(error.abs().max())) if error.numel() else 0.0
        if not math.isfinite(largest) or bool(error.isnan().any()):  # the values themselves are outside then
            return math.inf
        counts.append(independent_rows(error, torch.zeros_like(error)))
    dtype = name_of(operands[0].dtype)
    if dtype not in UNIT_ROUNDOFF:
        return math.inf
    magnitude = float(torch.where(finite, exact, 0.0).abs().max()) if exact.numel() else 0.0
    rounding = RoundingError(largest=Real(largest), samples=-(-sum(counts) // len(counts)), drawn=sum(counts))
    return relative_allowance(rounding, magnitude, dtype)


def table_of(path: Path) -> Path:
    """Return the file of the table beside that of the arrays."""
    return path.with_suffix(".json")
