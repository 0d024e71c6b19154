"""The result of checking a wrapper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from consistency.numerics.words import Word


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapperFinding:
    """One difference between the wrapper and the plain model.

    Attributes
    ----------
    check : str
        Which check found it: `reach`, `keys`, `adapter_layers`, `storages`, `dtypes` or `training_step`.
    what : str
        One sentence without a final stop.
    where : str
        The attribute, tensor or layer concerned.
    got, wanted : str
        Through the wrapper, and without it.
    hint : str
        How to fix it.
    """

    check: str
    kind: Word
    what: str
    where: str
    got: str
    wanted: str
    hint: str

    @property
    def sentence(self) -> str:
        return f"{self.what} ({self.where}: got {self.got}, wanted {self.wanted})"

    def __str__(self) -> str:
        return f"{self.sentence}; {self.hint}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapperReport:
    """The differences through a wrapper; a mismatch is never raised.

    Attributes
    ----------
    prefix : str
        Prefix of the plain model's keys in the wrapper; None where the plain model is not inside it.
    figures : dict
        By check: bytes by dtype, numbers of keys and layers, peaks in bytes.
    skipped : dict
        Why a check could not be made, by check.
    """

    findings: tuple[WrapperFinding, ...]
    prefix: str | None
    figures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        if self.passed:
            return "the wrapper hides nothing and holds nothing twice"
        return "\n".join(f"{i}  {finding}" for i, finding in enumerate(self.findings, start=1))
