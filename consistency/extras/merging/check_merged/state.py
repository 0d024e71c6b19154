"""The result of a check: the state of each tensor of the folder, and what was found beside them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from consistency.capture.adapter_remarks import AdapterRemark
from consistency.comparison.result import Finding
from consistency.extras.merging.check_merged.adapter import LowRankTarget, Target
from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.extras.merging.check_merged.difference import Difference
from consistency.extras.merging.check_merged.effect import Effect
from consistency.extras.merging.check_merged.explain import Explanations
from consistency.extras.merging.check_merged.folder import Problem, Severity, Stored
from consistency.extras.merging.check_merged.orders import Order
from consistency.numerics.dtype import name_of

Status = Literal["equal", "within", "outside", "missing", "unexpected", "skipped"]


@dataclass(slots=True, kw_only=True)
class TensorState:
    """The state of one tensor of the folder.

    Attributes
    ----------
    name : str
        Its name in the base.
    role : str
        `adapted`, `saved` (the adapter has it whole), `untouched`, `extra`.
    status : Status
        `equal`, `within`, `outside`, `missing`, `unexpected`, `skipped`.
    shape, dtype, elements : tuple of int, str, int
        Shape, name of the dtype, and number of elements in the folder.
    outside : int
        Number of wrong elements.
    worst : tuple or None
        Index of a wrong element, its value, and the ends between which it should be.
    causes : dict of MergeCause to str
        The mistakes that explain it, each with a text that may be empty.
    is_delta_zero : bool
        Whether the adapter has something for it that adds nothing: a factor of zeros.
    reason : str
        Why it is missing, unexpected, skipped or wrong, in a few words.
    advice : str
        What to do, where its measure says more than the kind of finding.
    keys : tuple of str
        Its names in the folder, where they are others.
    difference : Difference or None
        How it differs from the base, in a check without an adapter.
    """

    name: str
    role: str
    status: Status
    shape: tuple[int, ...]
    dtype: str
    elements: int
    outside: int = 0
    worst: tuple[tuple[int, ...], float, float, float] | None = None
    causes: Explanations = field(default_factory=dict)
    is_delta_zero: bool = False
    reason: str = ""
    advice: str = ""
    keys: tuple[str, ...] = ()
    difference: Difference | None = None

    @classmethod
    def of(cls, name: str, stored: Stored, target: Target | None) -> TensorState:
        """Return the state of a tensor before it is judged."""
        return cls(
            name=name,
            role="untouched" if target is None else "adapted",
            status="within",
            shape=stored.shape,
            dtype=name_of(stored.dtype),
            elements=math.prod(stored.shape),
            keys=stored.keys if stored.keys != (name,) else (),
            is_delta_zero=isinstance(target, LowRankTarget) and target.is_zero,
        )

    def mark_wrong(self, elements: int, reason: str = "") -> None:
        """Set the status to `outside`, with this number of wrong elements."""
        self.status, self.outside, self.reason = "outside", elements, reason

    def mark_skipped(self, reason: str) -> None:
        """Set the status to `skipped`."""
        self.status, self.reason = "skipped", reason


@dataclass(slots=True, kw_only=True)
class MergedFolder:
    """The result of a check.

    Attributes
    ----------
    tensors : list of TensorState
        Every tensor of the base, and those that only the folder has.
    problems : list of Problem
        Problems of files and names, and of several tensors together.
    mapping : list of str
        How the names of base, adapter and folder were matched.
    orders : Counter of Order
        Tensors by the order of roundings that explains them.
    effect : Effect
        What rounding took of the adapter's effect.
    remarks : list of AdapterRemark
        Flaws of the adapter itself.
    settings : list of Finding
        How the folder's settings differ from the base's.
    not_checked : list of str
        Parts that could not be checked, with the reason.
    dtype : str
        Most frequent dtype of the folder's matrices.
    """

    tensors: list[TensorState] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    remarks: list[AdapterRemark] = field(default_factory=list)
    mapping: list[str] = field(default_factory=list)
    orders: Counter[Order] = field(default_factory=Counter)
    effect: Effect = field(default_factory=Effect)
    settings: list[Finding] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    dtype: str = ""

    def with_role(self, *roles: str) -> list[TensorState]:
        """Return the states of the tensors with one of these roles."""
        return [state for state in self.tensors if state.role in roles]

    def add_problem(self, cause: MergeCause, text: str, tensors: Iterable[str], severity: Severity = "error") -> None:
        """Add a problem of several tensors, or of one beside what its state has."""
        self.problems.append(Problem(cause=cause, text=text, tensors=tuple(tensors), severity=severity))
