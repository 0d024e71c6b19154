"""Sizes of made models, for the tests of the budget."""

from __future__ import annotations

import dataclasses

from consistency.case.budget.shape import Layer, Shape

GIB = 2**30


def llama(hidden: int, inner: int, blocks: int, vocabulary: int) -> Shape:
    """Return the sizes of a Llama in bfloat16 with a LoRA of rank 16 on all linear layers of its blocks."""
    of_block = [(hidden, hidden)] * 2 + [(hidden // 8, hidden)] * 2 + [(inner, hidden)] * 3
    elements = sum(a * b for a, b in of_block)
    ends = vocabulary * hidden
    layers = tuple(
        Layer(name=f"layers.{block}.{number}", elements=a * b, rank=16)
        for block in range(blocks)
        for number, (a, b) in enumerate(of_block)
    )
    factors = blocks * sum(16 * (a + b) for a, b in of_block)
    return Shape(
        dtype="bfloat16",
        elements=blocks * elements + 2 * ends,
        mapped_bytes=2 * (blocks * elements + 2 * ends),
        largest_elements=max(ends, inner * hidden),
        blocks=blocks,
        block_features=sum(a + b for a, b in of_block),
        matrix_elements=blocks * elements + ends,
        hidden=hidden,
        vocabulary=vocabulary,
        heads=hidden // 128,
        positions=2048,
        adapter_bytes=4 * factors,
        trained_elements=factors,
        largest_trained_elements=16 * inner,
        method="LORA",
        layers=layers,
    )


SMALL = llama(256, 512, 4, 1000)
LARGE = llama(4096, 14336, 32, 128256)


def deeper(shape: Shape, times: int) -> Shape:
    """Return the same model with as many times the blocks, and an unchanged adapter."""
    more = (times - 1) * (shape.elements - 2 * (shape.vocabulary or 0) * (shape.hidden or 0))
    return dataclasses.replace(
        shape,
        blocks=times * shape.blocks,
        elements=shape.elements + more,
        mapped_bytes=shape.mapped_bytes + 2 * more,
        matrix_elements=shape.matrix_elements + more,
    )
