"""What a check says: a status, figures, and what it discovered. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from consistency.comparison.result import Severity
from consistency.extras.watching.kinds import WRONG_SUM


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """Something wrong that a check found, as every rank is told of it.

    Attributes
    ----------
    kind : str
        Kind of the finding.
    message : str
        One sentence: what is wrong, where, with the figure.
    ranks : tuple of int
        Ranks that it is about.
    tensors : tuple of (str, str)
        Layer and tensor of each tensor that is wrong, the first one first.
    ratio : float or None
        Error over what is allowed, where a rule allows something.
    next : str
        What to do.
    """

    kind: str
    message: str
    next: str
    severity: Severity = "error"
    ranks: tuple[int, ...] = ()
    tensors: tuple[tuple[str, str], ...] = ()
    ratio: float | None = None
    detail: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """What two discoveries of the same fault have in common, so that each fault is reported once."""
        if self.kind == WRONG_SUM:  # each check takes another tensor, and what adds them up is one
            return self.kind, self.ranks
        return self.kind, self.ranks, tuple(layer for layer, _ in self.tensors[:1])


@dataclass(slots=True, kw_only=True)
class CheckOutcome:
    """What one check says at one step."""

    check: str
    not_checked: str = ""
    """Why the check, or a part of it, was not made; empty where it was."""
    figures: dict[str, Any] = field(default_factory=dict)
    discoveries: list[Discovery] = field(default_factory=list)
    wrong_block: Any = None
    """The `WrongBlock` that this rank has found, which it alone knows; None where it has found none."""

    @property
    def status(self) -> str:
        if self.discoveries:
            return "finding"
        return "not checked" if self.not_checked else "ok"
