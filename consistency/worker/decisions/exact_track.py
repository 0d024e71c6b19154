"""What a float64 pass decides, and what other passes may decide otherwise: the track of passes on equal inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch

from consistency.capture.json_codec import encode_json
from consistency.numerics.decision import Decision
from consistency.numerics.decisions import Watch
from consistency.numerics.real import Real
from consistency.worker.decisions.array_file import ArrayFile, Part
from consistency.worker.decisions.track import Settled, Table, allowed_error, digest_of, is_same, plain, table_of


@dataclass(slots=True, kw_only=True)
class _Step:
    name: str
    decided: Part
    digest: str
    operand: Part
    margins: Part
    dim: int | None
    scores: int
    operands: dict[str, list[Part]] = field(default_factory=dict)
    """Of each pass with noise, by the name of its products."""


class ExactTrack:
    """Record the decisions of float64 passes, and hold passes with noise to them, which show what rounding may turn.

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
        """Return what records a float64 pass."""
        steps = self._steps[key] = []

        def record(decision: Decision) -> None:
            decided, margins = plain(decision.decided), decision.margins(decision.operand)
            if decision.dim is None:
                margins = margins.to(torch.float32)
            steps.append(
                _Step(
                    name=decision.name, digest=digest_of(decided), decided=self._shared.append(decided),
                    operand=self._operands.append(decision.operand), margins=self._shared.append(margins),
                    dim=decision.dim, scores=decision.scores,
                )
            )  # fmt: skip

        return record

    def other(self, key: str, title: str = "") -> Watch | None:
        """Return what lets another pass decide as the float64 one did; a title is for the errors of its operands.

        None where nothing is decided: watching takes some 30 µs of processor time per operation.
        """
        left = iter(self._steps.get(key, ()))

        def follow(decision: Decision) -> torch.Tensor | None:
            step = next(left, None)
            if step is None or not is_same(step.name, step.decided, decision):
                return None
            if title:
                step.operands.setdefault(title, []).append(self._operands.append(decision.operand))
            return self._shared.read(step.decided)

        return follow if self._steps.get(key) else None

    def publish(self) -> None:
        """Write the table, and remove the operands."""
        table = Table(passes={key: tuple(map(self._settled, steps)) for key, steps in self._steps.items()})
        self._operands.remove()
        self._shared.touch()
        table_of(self._path).write_bytes(encode_json(table))

    def _settled(self, step: _Step) -> Settled:
        exact = self._operands.read(step.operand)
        allowed = {
            title: Real(step.scores * allowed_error([self._operands.read(part) for part in parts], exact))
            for title, parts in step.operands.items()
        }
        return Settled(
            name=step.name, digest=step.digest, decided=step.decided, exact=step.margins, dim=step.dim,
            allowed=allowed or {"": Real(math.inf)},
        )  # fmt: skip
