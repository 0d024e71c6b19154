"""The operations and bytes of each stage, for the worker that makes the reference and for that of each GPU."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.on_paper.machine import (
    BOTH_MEASURED_S,
    DELTA_MEASURED_S,
    DELTA_S,
    DIGEST_S,
    FIGURES_S,
    GPUS,
    GRADIENT_FIGURES_S,
    GRADIENT_SPREAD_S,
    MERGED_MEASURED_S,
    SPREAD_S,
    STEP_S,
    SUM_S,
    XEON,
    Work,
)
from benchmarks.on_paper.sizes import Sizes
from benchmarks.shapes import RANK
from consistency.case.case import Case
from consistency.stages.merged.worker import _TOGETHER_BYTES
from consistency.stages.operators.model_shapes import LARGEST_MATRIX, ROWS, _compared
from consistency.stages.transfer.worker import SIZES
from consistency.worker.model.sampled_rows import rows_to_judge

MERGE_BYTES = 22
"""Bytes per element that a merge reads and writes, plain and safe: the delta in float32, written and read; both merged
weights in bfloat16, written and read; the weight twice, and its bytes in the file."""

PEAK_MERGES = 8
"""Merges of the stage `memory`: plain and safe, each twice by PEFT and twice frugally."""

SENT_BYTES = 6
"""Bytes per element that go to the host to be measured: the delta in float32, the merged weight in bfloat16."""

LONG, EXACT = "long text", "exact step of AdamW"


def of_reference(sizes: Sizes) -> Iterator[Work]:
    """Yield what the worker of the CPU does, which makes the reference for all."""
    shape, setting, case = sizes.shape, sizes.setting, sizes.case
    weights, rows, tokens = shape.loaded_bytes, setting.positions, setting.tokens
    yield Work(
        stage="base",
        counted="file read from the disk; 3 digests, and one pass for what is not finite",
        elements_s=4 * weights * DIGEST_S,
        host_bytes=4 * weights,
        disk_bytes=weights,
    )
    deltas, measured_s = merged_by_elements(sizes)
    yield Work(
        stage="merged",
        counted="delta and 2 merges of each layer; delta and merged weight against float64",
        elements_s=deltas * DELTA_S + 2 * sizes.adapted * SUM_S + measured_s,
        host_bytes=MERGE_BYTES * sizes.adapted,
    )
    blocks, head = sizes.through_blocks(rows, tokens), sizes.through_head(rows)
    passes = sizes.gradient_passes
    yield Work(
        stage="gradient",
        counted="float64: forward, blocks forward again, backward",
        float64=3 * blocks + 2 * head,
        host_bytes=3 * weights,
    )
    yield Work(
        stage="gradient",
        counted=f"{passes} passes with noise, forward and backward",
        bfloat16=passes * 2 * (blocks + head),
        host_bytes=passes * 2 * weights,
        noisy_passes=passes,
    )
    yield Work(
        stage="gradient",
        counted="its own pass, forward and backward",
        bfloat16=2 * (blocks + head),
        host_bytes=2 * weights,
    )
    yield Work(
        stage="gradient",
        counted="spread of the passes, figures of its own",
        elements_s=shape.trained_elements * (passes * GRADIENT_SPREAD_S + GRADIENT_FIGURES_S)
        + sizes.borders * (passes * SPREAD_S + FIGURES_S),
    )
    yield Work(stage="gradient", counted=EXACT, thread_s=shape.trained_elements * STEP_S)
    passes = sizes.forward_passes
    yield Work(
        stage="forward",
        counted="float64: by blocks, and one sequence from end to end with the adapter on and off",
        float64=sizes.forward(setting.sequences) + 2 * sizes.forward(1),
        host_bytes=3 * weights,
    )
    yield Work(
        stage="forward",
        counted=f"{passes} passes with noise",
        bfloat16=passes * sizes.forward(setting.sequences),
        host_bytes=passes * weights,
        noisy_passes=passes,
    )
    yield Work(
        stage="forward",
        counted="its own passes: 3 from end to end, one of which merges each layer, and 1 by blocks",
        bfloat16=4 * sizes.forward(setting.sequences),
        elements_s=sizes.adapted * (DELTA_S + SUM_S),
        host_bytes=4 * weights + MERGE_BYTES * sizes.adapted,
    )
    yield Work(
        stage="forward",
        counted="spread of the passes, figures of its own",
        elements_s=sizes.states * (passes * SPREAD_S + FIGURES_S),
    )
    if setting.long_tokens:
        yield from of_long_text(sizes, passes)
    yield Work(
        stage="memory",
        counted=f"{PEAK_MERGES} merges of the largest layer",
        elements_s=PEAK_MERGES * shape.largest_layer_elements * (DELTA_S + SUM_S),
        host_bytes=PEAK_MERGES * MERGE_BYTES * shape.largest_layer_elements,
    )
    yield operators(sizes, case)


def of_long_text(sizes: Sizes, passes: int) -> Iterator[Work]:
    """Yield the long text on the CPU: all tokens in the tested dtype, and sampled rows in float64 and with noise."""
    tokens, count = sizes.setting.long_tokens, min(3, sizes.shape.blocks)
    rows = len(rows_to_judge(tokens))
    whole = sizes.through_blocks(tokens, tokens, count) + sizes.through_head(tokens)
    keys = float(count * 2 * tokens * sizes.to_keys)
    sampled = keys + sizes.through_blocks(rows, tokens, count) + sizes.through_head(rows)
    weights = 2 * (count * sizes.block + sizes.head)
    yield Work(
        stage="forward",
        counted=f"{LONG}, {tokens} tokens of {count} blocks: float64 in {rows} rows",
        float64=sampled,
        host_bytes=2 * weights,
    )
    yield Work(
        stage="forward",
        counted=f"{LONG}: one pass of all rows, which gives what enters blocks, and {passes} with noise",
        bfloat16=whole + passes * sampled,
        host_bytes=(1 + 2 * passes) * weights,
        noisy_passes=passes,
    )
    yield Work(stage="forward", counted=f"{LONG}: its own pass", bfloat16=whole, host_bytes=weights)


def of_gpu(sizes: Sizes) -> Iterator[Work]:
    """Yield what the worker of each GPU does in each wave."""
    shape, setting, case = sizes.shape, sizes.setting, sizes.case
    weights = shape.loaded_bytes
    streamed = weights if sizes.offloads else 0
    loads = "streamed for each of 2 digests" if sizes.offloads else "to the GPU once, 2 digests there"
    yield Work(
        stage="base",
        counted=f"{loads}; digest of the file on the host",
        hbm_bytes=2 * weights,
        link_bytes=2 * weights if sizes.offloads else weights,
        elements_s=weights * DIGEST_S,
        host_bytes=2 * weights + streamed,
    )
    times = 1 + int(case.reloads) + len(case.plan.sides)
    yield Work(
        stage="adapter",
        counted=f"loaded {times} times, digests",
        link_bytes=times * shape.adapter_bytes,
        elements_s=times * shape.adapter_bytes * DIGEST_S,
        host_bytes=3 * times * shape.adapter_bytes,
    )
    deltas, measured_s = merged_by_elements(sizes)
    yield Work(
        stage="merged",
        counted="delta and 2 merges on the GPU; delta (float32) and merged weight to the host, against float64 there",
        float32=deltas * 2 * RANK,
        hbm_bytes=MERGE_BYTES * sizes.adapted,
        link_bytes=SENT_BYTES * sizes.adapted + streamed,
        elements_s=measured_s,
        host_bytes=(2 * SENT_BYTES + shape.width) * sizes.adapted + streamed,
    )
    one = sizes.forward(setting.sequences)
    yield Work(
        stage="gradient",
        counted="forward and backward by blocks; figures on the host",
        bfloat16=2 * one,
        hbm_bytes=2 * weights,
        link_bytes=streamed + 4 * shape.trained_elements + 4 * sizes.borders,
        elements_s=shape.trained_elements * GRADIENT_FIGURES_S + sizes.borders * FIGURES_S,
        host_bytes=streamed + 12 * shape.trained_elements,
        waits=True,
    )
    yield Work(stage="gradient", counted=EXACT, thread_s=shape.trained_elements * STEP_S, waits=True)
    long = min(3, shape.blocks) if setting.long_tokens else 0
    of_long = sizes.through_blocks(setting.long_tokens, setting.long_tokens, long) + (
        sizes.through_head(setting.long_tokens) if long else 0
    )
    yield Work(
        stage="forward",
        counted=f"3 passes from end to end, 1 by blocks, {LONG}; figures on the host",
        bfloat16=4 * one + of_long,
        hbm_bytes=5 * weights + MERGE_BYTES * sizes.adapted,
        link_bytes=4 * streamed + shape.width * sizes.states,
        elements_s=sizes.states * FIGURES_S,
        host_bytes=4 * streamed + 10 * sizes.states,
        waits=True,
    )
    yield Work(
        stage="memory",
        counted=f"{PEAK_MERGES} merges of the largest layer",
        float32=PEAK_MERGES * 2 * RANK * shape.largest_layer_elements,
        hbm_bytes=PEAK_MERGES * MERGE_BYTES * shape.largest_layer_elements,
        waits=True,
    )
    yield operators(sizes, case)
    copies = sum(SIZES[case.level])
    yield Work(
        stage="transfer",
        counted=f"direct copies of {GPUS + 2} pairs",
        link_bytes=(GPUS + 2) * copies,
        elements_s=2 * (GPUS + 2) * copies * DIGEST_S,
    )


def merged_by_elements(sizes: Sizes) -> tuple[int, float]:
    """Return the elements of all deltas that are computed, and the seconds of a core in which all layers are measured.

    A merge takes the delta that is there where the tensors of a layer are held together. A safe merge with the bits of
    the plain one is not measured again.
    """
    deltas, measured_s = 0, 0.0
    for layer in sizes.shape.layers:
        is_together = 4 * layer.elements <= _TOGETHER_BYTES
        measured_s += layer.elements * (BOTH_MEASURED_S if is_together else DELTA_MEASURED_S + MERGED_MEASURED_S)
        deltas += layer.elements * (1 if is_together else 3)
    return deltas, measured_s


def operators(sizes: Sizes, case: Case) -> Work:
    """Return the exact products at the model's shapes, and those of their bounds, which NumPy makes on one thread."""
    rows = sum(len(_compared(count)) for count in ROWS[case.level])
    elements = sum(count for count in sizes.kinds if count <= LARGEST_MATRIX)
    return Work(
        stage="operators",
        counted="exact products at the model's shapes",
        thread_s=2 * 2 * rows * elements / XEON.float64,
        host_bytes=8 * elements,
    )
