"""The user's tolerances, by stage, architecture, layer and dtype. No torch here.

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

from consistency.case.stage import Kind, Stage
from consistency.case.stages import SPECS, stages_of
from consistency.errors import UsageError, did_you_mean
from consistency.numerics.rules import UNIT_ROUNDOFF

COMPUTED: tuple[Stage, ...] = stages_of(lambda spec: spec.kind is Kind.COMPUTES)
"""Stages that compute, and so may round."""

_PLACES = ("stage", "arch", "layer", "dtype")
_KEYS = (*_PLACES, "atol", "rtol")
_EXAMPLE = "stage=merged,layer=*.q_proj,dtype=bfloat16,atol=1e-3,rtol=1e-2"


class Override(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tolerance that a user gives for some computed tensors, in place of the derived bound.

    An element may be off by `atol + rtol * |exact element|`.

    Attributes
    ----------
    atol : float
        Absolute part, in the tensor's own unit; finite, 0 or more.
    rtol : float
        Relative part, a fraction of the exact element's magnitude; finite, 0 or more.
    stage : str or None
        Stage that computes; None for every such stage.
    arch : str or None
        Pattern of `fnmatch`, in any case, on the name of the device's architecture (`Hopper sm_90`) or on one word of
        it (`sm_90`, `hopper`, `AVX-512`). None for every architecture.
    layer : str or None
        Pattern of `fnmatch` on the layer's name as reports show it, case-sensitive; `*` matches dots too. None for
        every layer.
    dtype : str or None
        Dtype of the tested tensor, not of its reference; None for every dtype.
    """

    atol: float
    rtol: float
    stage: str | None = None
    layer: str | None = None
    dtype: str | None = None
    arch: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("atol", self.atol), ("rtol", self.rtol)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is a finite number of 0 or more, got {value}")
        if self.stage is not None:
            _check_stage(self.stage)
        if self.dtype is not None and self.dtype not in UNIT_ROUNDOFF:
            raise ValueError(f"no dtype that has a tolerance: {self.dtype}; it is one of {', '.join(UNIT_ROUNDOFF)}")
        for name, pattern in (("layer", self.layer), ("arch", self.arch)):
            if pattern is not None:
                _check_pattern(name, pattern)

    def __str__(self) -> str:
        """Return the text that the command line accepts for it."""
        fields = {name: getattr(self, name) for name in _PLACES}
        texts = [f"{name}={value}" for name, value in fields.items() if value is not None]
        return ",".join([*texts, f"atol={float(self.atol)!r}", f"rtol={float(self.rtol)!r}"])

    def is_for(self, architecture: str) -> bool:
        """Return whether it applies to devices of this architecture."""
        if self.arch is None:
            return True
        names = architecture.lower()
        return any(fnmatchcase(name, self.arch.strip().lower()) for name in (names, *names.split()))

    def matches(self, *, stage: str, layer: str, dtype: str) -> bool:
        """Return whether it applies to a tensor of this stage, layer and dtype, on the architecture that it is for."""
        return (
            stage in COMPUTED
            and self.stage in (None, stage)
            and self.dtype in (None, dtype)
            and (self.layer is None or fnmatchcase(layer, self.layer))
        )


def _check_stage(stage: str) -> None:
    """Raise ValueError for a stage that is unknown, or does not compute."""
    if stage not in SPECS:
        hint = did_you_mean(stage, COMPUTED) or f"a tolerance is for {_or(COMPUTED)}"
        raise ValueError(f"unknown stage: {stage}; {hint}")
    if stage not in COMPUTED:
        kind = SPECS[Stage(stage)].kind.value
        raise ValueError(f"the stage {stage} {kind}: a tolerance is for {_or(COMPUTED)}")


def _check_pattern(name: str, pattern: str) -> None:
    """Raise ValueError for a pattern that is empty, or a list of patterns."""
    if not pattern.strip():
        raise ValueError(f"an empty {name} matches nothing: leave it out to mean every {name}")
    if "," in pattern:
        raise ValueError(f"{name} is one pattern, got {pattern}: give one tolerance per pattern")


def choose(overrides: Sequence[Override], *, stage: str, layer: str, dtype: str) -> Override | None:
    """Return the last override that matches a tensor; None where none does."""
    for override in reversed(overrides):
        if override.matches(stage=stage, layer=layer, dtype=dtype):
            return override
    return None


def of_architecture(overrides: Sequence[Override], architecture: str) -> tuple[Override, ...]:
    """Return the overrides that apply to devices of an architecture, in the same order."""
    return tuple(override for override in overrides if override.is_for(architecture))


def as_overrides(given: object, *, where: str) -> tuple[Override, ...]:
    """Read what a user wrote: tables, or texts as the command line has them; one alone needs no list.

    Raises
    ------
    UsageError
        It is no such list, or an item has an unknown field or a value that cannot be used.
    """
    given = [given] if isinstance(given, (str, Mapping)) else given
    if not isinstance(given, Sequence):
        raise UsageError(
            "tolerances are a list of tables", where=where, got=given, wanted=f'[[tolerance]], or "{_EXAMPLE}"'
        )
    return tuple(item if isinstance(item, Override) else _override(item, where=where) for item in given)


def _override(given: object, *, where: str) -> Override:
    """Return the override that a table, or a text of the command line, describes."""
    table = _read_pairs(given, where=where) if isinstance(given, str) else given
    if not isinstance(table, Mapping):
        raise UsageError("a tolerance is a table", where=where, got=table, wanted=f'[[tolerance]], or "{_EXAMPLE}"')
    shown = ", ".join(f"{name}={value}" for name, value in table.items()) or "an empty table"
    _check_fields(table, shown, where=where)
    for name, value in table.items():
        _check_value(name, value, where=where)
    try:
        return Override(**table)
    except ValueError as error:
        raise UsageError(str(error), where=where, got=shown) from None


def _check_fields(table: Mapping[str, object], shown: str, *, where: str) -> None:
    """Raise UsageError for an unknown field, or without `atol` and `rtol`; `shown` is the table in the message."""
    for name in table:
        if name not in _KEYS:
            raise UsageError(
                f"a tolerance has no field {name}",
                where=where,
                got=shown,
                wanted=", ".join(_KEYS),
                hint=did_you_mean(str(name), _KEYS),
            )
    missing = [name for name in ("atol", "rtol") if name not in table]
    if missing:
        raise UsageError(
            "a tolerance without atol and rtol" if len(missing) > 1 else f"a tolerance without {missing[0]}",
            where=where,
            got=shown,
            wanted="both atol and rtol, as in torch.testing; 0 is allowed",
        )


def _check_value(name: str, value: object, *, where: str) -> None:
    """Raise UsageError for a value of another type than the field's."""
    kind: type | tuple[type, ...] = str
    wanted = f"a text, as in {_EXAMPLE}"
    if name in ("atol", "rtol"):
        kind, wanted = (int, float), "a number, such as 1e-3"
    # True is an int in Python
    if isinstance(value, bool) or not isinstance(value, kind):
        raise UsageError(
            f"{name} of a tolerance is not {wanted.partition(',')[0]}", where=where, got=repr(value), wanted=wanted
        )


def _read_pairs(text: str, *, where: str) -> dict[str, object]:
    """Return the fields of a tolerance as the command line has it: `stage=merged,atol=1e-3,rtol=1e-2`."""
    table: dict[str, object] = {}
    for pair in filter(None, map(str.strip, text.split(","))):
        name, equals, value = (piece.strip() for piece in pair.partition("="))
        if not equals or not value:
            raise UsageError("a tolerance is made of name=value", where=where, got=f"{pair} in {text}", wanted=_EXAMPLE)
        if name in table:
            raise UsageError(f"a tolerance with two of {name}", where=where, got=text, wanted=_EXAMPLE)
        try:
            table[name] = float(value) if name in ("atol", "rtol") else value
        except ValueError:
            wanted = "a number, such as 1e-3"
            raise UsageError(f"{name} of a tolerance is not a number", where=where, got=value, wanted=wanted) from None
    return table


def _or(names: Sequence[str]) -> str:
    """Join names as in a sentence: `a, b or c`."""
    return " or ".join([", ".join(names[:-1]), names[-1]])
