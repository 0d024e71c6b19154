"""The sizes of a case that its counts are made of, and how many passes it makes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from benchmarks.on_paper.machine import GPU_MEMORY
from benchmarks.shapes import SHAPES, base_tensors, make_headers
from consistency.case.budget.costs import LEAST_PASSES, Setting, noisy_gradients
from consistency.case.budget.placement import is_offloaded
from consistency.case.budget.shape import Shape, read_shape
from consistency.case.case import Case
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.devices.products import Products, permitted
from consistency.devices.settings import SETTINGS
from consistency.worker import cpu_error
from consistency.worker.judging.block_rule import ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A case, and the sizes that its counts are made of."""

    case: Case
    shape: Shape
    block: int
    """Elements of the matrices of a block."""
    to_keys: int
    """Those of its projections to queries, keys and values."""
    kinds: tuple[int, ...]
    """Elements of each different matrix of a block."""
    head: int
    offloads: bool
    """Whether the base does not fit on a GPU, and is streamed."""

    @property
    def setting(self) -> Setting:
        return Setting(shape=self.shape, case=self.case, on_device=False, makes_reference=True)

    @property
    def adapted(self) -> int:
        """Return the elements of the adapted layers."""
        return sum(layer.elements for layer in self.shape.layers)

    @property
    def factors(self) -> int:
        """Return the elements of the adapter in one block."""
        return self.shape.trained_elements // self.shape.blocks

    @property
    def states(self) -> int:
        """Return the elements of the results of `forward` that are judged: of blocks, and the logits."""
        hidden, vocabulary = self.shape.hidden or 0, self.shape.vocabulary or 0
        return self.setting.positions * ((5 * self.shape.blocks + 1) * hidden + vocabulary)

    @property
    def borders(self) -> int:
        """Return the elements of what enters and leaves all blocks."""
        return self.setting.positions * (self.shape.blocks + 1) * (self.shape.hidden or 0)

    @property
    def forward_passes(self) -> int:
        """Return the passes with noise of `forward`, as `judging.block_rule.passes_for` chooses them."""
        setting = self.setting
        is_large = cpu_error.is_large(cpu_error.passes_for(self.shape.matrix_elements * setting.positions))
        least = LEAST_PASSES - 1 if is_large else LEAST_PASSES
        return max(least, -(-ROWS // setting.tokens)) * kinds_of_products()

    @property
    def gradient_passes(self) -> int:
        return noisy_gradients(self.case, self.shape.matrix_elements) * kinds_of_products()

    def through_blocks(self, rows: int, keys: int, blocks: int | None = None) -> float:
        """Return the operations of a pass of so many rows through blocks, with their attention and adapter."""
        each = 2 * rows * (self.block + self.factors) + 4 * rows * keys * (self.shape.hidden or 0)
        return float((self.shape.blocks if blocks is None else blocks) * each)

    def through_head(self, rows: int) -> float:
        return float(2 * rows * self.head)

    def forward(self, sequences: int) -> float:
        """Return the operations of a pass of so many short sequences through the whole model."""
        rows = sequences * self.setting.tokens
        return self.through_blocks(rows, self.setting.tokens) + self.through_head(rows)


def kinds_of_products() -> int:
    """Return how many kinds of float32 products the workers have: each has passes with noise of its own."""
    pinned = {name: spec.pinned for name, spec in SETTINGS.items()}
    kinds = [Products(), *(permitted(kind, pinned, {}) for kind in ("cpu", "cuda"))]
    return len({cpu_error.name_of(products) for products in kinds})


def sizes_of(name: str, folder: Path) -> Sizes:
    """Return the sizes of a shape of `benchmarks.shapes`, read from headers as `--plan` reads them."""
    make_headers(folder, SHAPES[name])
    case = prepare_case(Options(base=str(folder / "base"), adapter=str(folder / "linear")))
    shape = read_shape(case)
    matrices = {
        tensor.rpartition(".layers.0.")[2]: math.prod(size)
        for tensor, size in base_tensors(SHAPES[name]).items()
        if ".layers.0." in tensor and len(size) == 2
    }
    block = sum(matrices.values())
    to_keys = sum(count for tensor, count in matrices.items() if tensor.split(".")[1][:2] in ("q_", "k_", "v_"))
    distinct = {
        size for tensor, size in base_tensors(SHAPES[name]).items() if ".layers.0." in tensor and len(size) == 2
    }
    return Sizes(
        case=case,
        shape=shape,
        block=block,
        to_keys=to_keys,
        kinds=tuple(map(math.prod, distinct)),
        head=shape.matrix_elements - block * shape.blocks,
        offloads=is_offloaded(case, shape, GPU_MEMORY),
    )
