"""Rotary positions of other bases than the model's, as an engine takes that does not read the config's.

And of frequencies that were rounded to a half type: a model that is converted as a whole has its buffers converted too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from consistency.extras.serving.engine_outputs.passes import Change

_ROTARY_BASES = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0)
"""Bases of rotary positions that models commonly have."""

_ROUNDED_TO = ("bfloat16", "float16")
"""Dtypes that models are converted to."""


def other_rotary_positions(base: Any) -> Iterator[tuple[str, Callable[[], Change]]]:
    """Yield other rotary positions: their name, and what computes with them."""
    rotaries = _rotaries(base)
    tables = [module.inv_freq for module in rotaries]
    if not tables:
        return
    own_base = _base_of_positions(tables[0])
    for rotary_base in _ROTARY_BASES:
        others = [_frequencies(table, rotary_base) for table in tables]
        is_own = all(torch.allclose(table, other, rtol=1e-4) for table, other in zip(tables, others, strict=True))
        if not is_own:
            name = f"rotary positions of base {rotary_base:,.0f} (here {own_base:,.0f})"
            yield name, functools.partial(_positions_by, rotaries, others)


def rounded_frequencies(base: Any) -> Iterator[tuple[str, Callable[[], Change]]]:
    """Yield half types that change rotary frequencies when these are rounded to them, and what computes so."""
    rotaries = _rotaries(base)
    tables = [module.inv_freq for module in rotaries]
    for name in _ROUNDED_TO:
        rounded = [table.to(getattr(torch, name)).to(table.dtype) for table in tables]
        if any(not torch.equal(table, other) for table, other in zip(tables, rounded, strict=True)):
            yield name, functools.partial(_positions_by, rotaries, rounded)


def _rotaries(base: Any) -> list[Any]:
    """Return the modules that hold rotary frequencies; none where some hold them in another form."""
    rotaries = [module for module in base.modules() if isinstance(getattr(module, "inv_freq", None), torch.Tensor)]
    return [] if any(module.inv_freq.dim() != 1 for module in rotaries) else rotaries


def _base_of_positions(table: torch.Tensor) -> float:
    """Return the base that the second frequency of a table is of, as it would be without scaling."""
    if len(table) < 2:
        return 1.0
    return math.pow(float(table[1] / table[0]), -len(table))


def _frequencies(table: torch.Tensor, rotary_base: float) -> torch.Tensor:
    exponents = torch.arange(len(table), dtype=torch.float32) / len(table)
    return (1.0 / rotary_base**exponents).to(table.dtype)


@contextmanager
def _positions_by(rotaries: Sequence[Any], tables: Sequence[torch.Tensor]) -> Iterator[None]:
    with ExitStack() as stack:
        for module, table in zip(rotaries, tables, strict=True):
            stack.enter_context(mock.patch.object(module, "inv_freq", table))
        yield
