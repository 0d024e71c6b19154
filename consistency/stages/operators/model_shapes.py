"""The operations of the model at its own shapes: kernels are chosen by shape, and a model has few.

Each matrix of its blocks is multiplied with as many rows as a decoding step, a short batch, a tile and more than a tile
have; attention of its head size is computed for one query with many keys, for more queries than a tile, and for more
sequences than a small batch. All in the dtype of the model. The shapes are read from headers; nothing is loaded.

The device computes all rows. Rows of a product do not depend on each other, so the exact values are of a few: both
ends, and both sides of every power of two.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as nn

from consistency.capture.names_in_files import base_tensors
from consistency.case.budget.shape import read_shape
from consistency.case.case import Case
from consistency.case.checkpoint import read_json
from consistency.case.quantized import weights_of
from consistency.case.stage import Level
from consistency.numerics.running_error import Tracked
from consistency.stages.operators.table import SEED, Arrays, Operation, attention

ROWS = {Level.QUICK: (), Level.STANDARD: (1, 7, 128, 129), Level.THOROUGH: (1, 7, 128, 129, 4099)}
"""Rows of a product at each level: a decoding step, a short batch, a tile, one more, and a long text."""

KEYS = {Level.QUICK: 0, Level.STANDARD: 515, Level.THOROUGH: 4099}
"""Keys of one query at each level: as many as the long text of the stage `forward` has tokens."""

LARGEST_MATRIX = 1 << 24
"""Elements of the largest matrix that is multiplied: drawing it takes some tenths of a second. Heads of large
vocabularies have more."""

MOST_MATRICES = 6
"""Shapes of matrices that are multiplied, the largest ones: a block of most models has four."""

_MOST_HEADS = 8
"""Heads of attention: more are further rows of the same kernels."""

_IN_A_BLOCK = re.compile(r"\.\d+\.")


@functools.lru_cache(maxsize=2)
def operations_of(case: Case) -> tuple[Operation, ...]:
    """Return the operations of a case's model; none where it has none, and where a function makes the base."""
    if not case.needs_model or case.factory is not None or not ROWS[case.level]:
        return ()
    return tuple(_operations(case))


def _operations(case: Case) -> Iterator[Operation]:
    shape = read_shape(case)
    for outputs, inputs in _matrices(case):
        for rows in ROWS[case.level]:
            yield _linear(rows, inputs, outputs, shape.dtype)
    if shape.heads and shape.hidden:
        width = _head_size(case) or shape.hidden // shape.heads
        heads = min(shape.heads, _MOST_HEADS)
        if width % 8 == 0:  # fused kernels want a head size that 8 divides
            yield attention(1, heads, 1, width, keys=KEYS[case.level], dtypes=(shape.dtype,))
            yield attention(1, heads, 129, width, dtypes=(shape.dtype,))
            yield attention(9, heads, 7, width, dtypes=(shape.dtype,))


def _matrices(case: Case) -> list[tuple[int, int]]:
    """Return the shapes of the matrices of a base's blocks, `(outputs, inputs)`, each once, the largest first."""
    shapes = set()
    for name, header in weights_of(base_tensors(case)).items():
        is_matrix = len(header.shape) == 2 and min(header.shape) > 1
        if is_matrix and _IN_A_BLOCK.search(name) and math.prod(header.shape) <= LARGEST_MATRIX:
            shapes.add((header.shape[0], header.shape[1]))
    return sorted(shapes, key=math.prod, reverse=True)[:MOST_MATRICES]


def _head_size(case: Case) -> int | None:
    """Return the head size that the base's config states, None where it states none."""
    config: Any = read_json(Path(case.base) / "config.json")
    for part in (config, config.get("text_config")):
        size = part.get("head_dim") if isinstance(part, dict) else None
        if isinstance(size, int):
            return size
    return None


def _linear(rows: int, inputs: int, outputs: int, dtype: str) -> Operation:
    compared = _compared(rows)

    def draw(generator: np.random.Generator) -> Arrays:
        # of one sign: see the docstring of `table`
        return generator.uniform(0.25, 1, (rows, inputs)), _weight(outputs, inputs)

    def compute(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return nn.linear(x, weight)[compared]

    def exact(x: Tracked, weight: Tracked) -> Tracked:
        few = x.moved(lambda values: values[compared])
        return few.matmul(weight.moved(np.transpose)).store()

    return Operation(
        "linear", f"{rows}x{inputs}x{outputs} of the model", draw, compute, exact, dtypes=(dtype,), multiplies=True
    )


@functools.lru_cache(maxsize=1)  # the rows of one matrix follow each other
def _weight(outputs: int, inputs: int) -> np.ndarray:
    generator = np.random.Generator(np.random.PCG64([SEED, outputs, inputs]))
    return generator.uniform(0.25, 1, (outputs, inputs))


def _compared(rows: int) -> list[int]:
    """Return the rows of a product that are compared: both ends, and both sides of every power of two."""
    compared = {0, rows - 1}
    for power in range(rows.bit_length()):
        compared.update(row for row in ((1 << power) - 1, 1 << power) if row < rows)
    return sorted(compared)
