"""The user's tolerances, by stage, layer and dtype. No torch here.

An override replaces the derived bound or the `relative` rule of the tensors it matches by
``|actual - exact| <= atol + rtol * |exact|``, element by element, where `exact` is the float64 value that the stage
computes anyway. A tensor without such a value is compared with the other workers, as without an override.

If several match a tensor, the last one applies, as in a `.gitignore`: general ones come first, exceptions after them,
and those of the command line follow those of the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import msgspec

from consistency.case.stages import SPECS, Kind, Stage, stages_of
from consistency.errors import UsageError
from consistency.numerics.rules import UNIT_ROUNDOFF

COMPUTED: tuple[Stage, ...] = stages_of(lambda spec: spec.kind is Kind.COMPUTES)
"""Stages that compute, and so may round."""

_KEYS = ("stage", "layer", "dtype", "atol", "rtol")
_EXAMPLE = "stage=merged,layer=*.q_proj,dtype=bfloat16,atol=1e-3,rtol=1e-2"


class Override(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The error that the elements of some computed tensors may have.

    Attributes
    ----------
    atol : float
        In the tensor's own unit; finite, 0 or more.
    rtol : float
        Share of the exact element's magnitude; finite, 0 or more.
    stage : str or None
        One of those that compute; None is all of them.
    layer : str or None
        Pattern of `fnmatch` on the layer's name as reports show it, case-sensitive; `*` matches dots too. None is
        every layer.
    dtype : str or None
        Of the tested tensor, not of its reference; None is every one.
    """

    atol: float
    rtol: float
    stage: str | None = None
    layer: str | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("atol", self.atol), ("rtol", self.rtol)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is a finite number of 0 or more, got {value}")
        if self.stage is not None and self.stage not in list(Stage):
            raise ValueError(f"unknown stage: {self.stage}; a tolerance is for {_or(COMPUTED)}")
        if self.stage is not None and self.stage not in COMPUTED:
            why = SPECS[Stage(self.stage)].kind.value
            raise ValueError(f"the stage {self.stage} {why}: a tolerance is for {_or(COMPUTED)}")
        if self.dtype is not None and self.dtype not in UNIT_ROUNDOFF:
            raise ValueError(f"no dtype that has a tolerance: {self.dtype}; it is one of {', '.join(UNIT_ROUNDOFF)}")
        if self.layer is not None and not self.layer.strip():
            raise ValueError("an empty layer matches nothing: leave it out to mean every layer")
        if self.layer is not None and "," in self.layer:
            raise ValueError(f"layer is one pattern, got {self.layer}: give one tolerance per pattern")

    def __str__(self) -> str:
        """Return the text that the command line accepts for it."""
        parts = [f"{name}={value}" for name in _KEYS[:3] if (value := getattr(self, name)) is not None]
        return ",".join([*parts, f"atol={float(self.atol)!r}", f"rtol={float(self.rtol)!r}"])

    def matches(self, *, stage: str, layer: str, dtype: str) -> bool:
        """Return whether it applies to a tensor of this stage, layer and dtype."""
        return (
            stage in COMPUTED
            and self.stage in (None, stage)
            and self.dtype in (None, dtype)
            and (self.layer is None or fnmatchcase(layer, self.layer))
        )


def choose(overrides: Sequence[Override], *, stage: str, layer: str, dtype: str) -> Override | None:
    """Return the last override that matches, None where none does."""
    return next((o for o in reversed(overrides) if o.matches(stage=stage, layer=layer, dtype=dtype)), None)


def as_tables(given: object, *, where: str) -> list[object]:
    """Turn what a user wrote into tables that convert to `Override`; texts of the command line are parsed."""
    if isinstance(given, (str, Mapping)) or not isinstance(given, Sequence):
        raise UsageError(
            "tolerances are a list of tables", where=where, got=given, wanted=f'[[tolerance]], or "{_EXAMPLE}"'
        )
    return [_as_table(item, where=where) for item in given]


def _as_table(given: object, *, where: str) -> object:
    table = _take_apart(given) if isinstance(given, str) else given
    if isinstance(table, Mapping) and not {"atol", "rtol"} <= set(table):
        one = [name for name in ("atol", "rtol") if name in table]
        raise UsageError(
            f"a tolerance with {one[0]} only" if one else "a tolerance without atol and rtol",
            where=where,
            got=", ".join(f"{name}={value}" for name, value in table.items()) or "an empty table",
            wanted="both atol and rtol, as in torch.testing; 0 is allowed",
        )
    return table


def _take_apart(text: str) -> dict[str, object]:
    table: dict[str, object] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, is_pair, value = (piece.strip() for piece in part.partition("="))
        if not is_pair or not value:
            raise UsageError("a tolerance is made of name=value", where=text, got=part, wanted=_EXAMPLE)
        if name in table:
            raise UsageError(f"a tolerance with two of {name}", where=text, wanted=_EXAMPLE)
        try:
            table[name] = float(value) if name in ("atol", "rtol") else value
        except ValueError:
            raise UsageError(f"{name} is not a number", where=text, got=value, wanted="such as 1e-3") from None
    return table


def _or(names: Sequence[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]])
