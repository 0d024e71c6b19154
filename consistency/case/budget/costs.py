"""What each stage takes, by formulas in the sizes of the model; every constant that was measured is here.

Bytes are peaks above what the worker holds already; `Work` is what a stage does, in units whose speed `speed` measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from consistency.case.budget.shape import ONE_PASS, Shape
from consistency.case.budget.work import Products, Work
from consistency.case.case import Case
from consistency.case.stages import MOST_MERGED, Level, Stage

MIB = 2**20

WINDOW_BYTES = 64 * MIB
"""Of a file that is read beside the model (`MAPPED_BYTES` of the worker's `weight_files`)."""

PART_BYTES = 1 << 24
"""Of a weight that is widened to float64 at a time (`PART_BYTES` of `numerics.widening`)."""

DIGEST_BYTES = 3 * 16 * MIB
"""Scratch of a digest on a device: three arrays of `_GPU_CHUNK_ROWS` rows of `numerics.digest`."""

GRADIENT_BYTES = 10 * 8
"""Per element of a gradient: arrays of float64 in which its errors and the optimizer's step are measured."""

GRADIENT_PART = 1 << 20
"""Elements of a gradient that are measured at once (`PART` of `numerics.file_tensor`)."""

GRADIENT_LINES = 1 << 22
"""Elements that are mapped at once to count its independent errors (`numerics.independent_errors`)."""

ROOM_BYTES = 1 << 30
"""Of activations that a backward pass on the CPU keeps (`ROOM_BYTES` of `worker.model.blocks`)."""

ROOM_SHARE = 4
"""Of the largest block in float64, one part in so many of which is kept (`ROOM_SHARE` of `worker.model.blocks`)."""

GRADIENT_PASSES = 4
"""Parts of the batch, each with a backward pass of its own (`PASSES` of the stage `gradient`)."""

SCORE_BYTES, INDEX_BYTES = 4, 8
"""Of a router's choice: a score in float32, and the index of an expert; as many are chosen as there are, at most."""

LOAD_BYTES = 3 * 256 * 64 * 64 * 4
LOAD_SIDE, LOAD_SHARE = 8192, 32
"""The products of `--load`: on the CPU `_CPU_BATCH` of `_CPU_SIDE`; on a device `_LARGEST_SIDE` at most,
and one part in `_SHARE` of its memory (`worker.soak.load`)."""

# Measured on one core of a virtual machine (Sapphire Rapids at 2.1 GHz, torch 2.13 built for the CPU), in processor
# time of a model of 1.1 B parameters in bfloat16; `benchmarks/budget.py` prints estimate and measurement side by side.
# Other models, methods and processors, and more threads than one, are extrapolated. No accelerator was measured.
PROCESS_BYTES = 285 * 10**6
LIBRARY_BYTES = 110 * 10**6
"""Python with torch, transformers and PEFT imported: private memory, and libraries mapped from their files."""

ACCELERATOR_PROCESS_BYTES = 2 * 10**9
"""The same with a device's driver and libraries: the limit that a worker keeps, not a measurement of any device."""

START_S = 4.5
LOAD_S = 0.15
STAGE_S = 0.15
"""Imports, building a model from its config, and a stage that checks no model."""

PER_TENSOR_S = 0.001
"""Of Python for one record: a digest, its comparison, a line of JSON."""

DIGEST_S = 0.22e-9
MAP_S = 0.1e-9
"""Per byte: a digest, and a page of a mapped file that is read for the first time."""

MERGE_S = 7.5e-9
"""Per element of a delta or merged weight: PEFT's merge, digests, its measure against the float64 bound."""

MERGE_ALONE_S = 4.5e-9
"""The same of PEFT's merge alone."""

MERGE_IN_FLOAT64_S = 8e-9
"""The same of a merge for a pass in float64 (`MergeEffect`): 2.7 s of four, of 90 million adapted elements."""

CUT_STEPS = 1 << 31
"""Steps of the decompositions of one type of combination but at level thorough: the longer side of a delta squared, as
PEFT asks for full matrices, times the shorter one."""

CUT_ELEMENTS = 1 << 24
"""Elements of the largest delta that is cut: some ten float64 arrays of them are held, 128 MiB each."""

CUT_S = 1.1e-9
"""Per step, of a square matrix of 1024 or 2048 on two cores."""

MEASURE_S = 0.23e-6
"""Per element that is compared with its float64 value by the `relative` rule: errors of this worker and of the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one stage takes.

    Attributes
    ----------
    host_bytes : int
        Private memory above what the worker holds.
    device_bytes : int
        Memory of the device above what the worker holds on it.
    window_bytes : int
        Of files that are mapped beside the model.
    scratch_bytes, kept_bytes : int
        Of files in the scratch folder: removed when the stage ends, and kept for the workers of the case.
    """

    host_bytes: int = 0
    device_bytes: int = 0
    window_bytes: int = 0
    scratch_bytes: int = 0
    kept_bytes: int = 0
    work: Work = Work()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a worker is to do.

    Attributes
    ----------
    on_device : bool
        Whether the model is on an accelerator.
    makes_reference : bool
        Whether it computes the float64 reference.
    paths : int
        Load paths that it checks besides its own.
    """

    shape: Shape
    case: Case
    on_device: bool
    makes_reference: bool
    paths: int = 0

    @property
    def sequences(self) -> int:
        return self.shape.sequences or self.case.sequences

    @property
    def tokens(self) -> int:
        """Return the positions of one sequence."""
        longest = self.shape.positions
        tokens = self.shape.tokens or self.case.tokens
        return tokens if longest is None or self.shape.tokens is not None else min(tokens, longest)

    @property
    def positions(self) -> int:
        """Return the positions of all sequences."""
        return self.sequences * self.tokens

    @property
    def of_backward(self) -> int:
        """Return the positions of one backward pass."""
        rows = math.ceil(self.sequences / min(GRADIENT_PASSES, self.sequences))
        return min(rows, self.case.fit.micro_batch or rows) * self.tokens


StageCost = Callable[[Setting], Cost]


def load_base(s: Setting) -> Cost:
    """Map the files; only what is converted to another dtype, or goes to a device, is read.

    While a tensor goes to a device, it and its file's bytes are on the host.
    """
    largest = s.shape.largest_elements * s.shape.width
    read = s.shape.loaded_bytes if s.on_device else s.shape.converted_bytes
    return Cost(
        host_bytes=2 * largest if s.on_device else largest if s.shape.converted_bytes else 0,
        window_bytes=WINDOW_BYTES if s.on_device else 0,
        work=Work(fixed_s=LOAD_S, memory_s=(MAP_S + DIGEST_S) * read),
    )


def base(s: Setting) -> Cost:
    """Digest every tensor in place, and its bytes in the file: these are mapped already, or in the page cache."""
    largest = s.shape.largest_elements * s.shape.width
    return Cost(
        host_bytes=largest if s.shape.converted_bytes else 0,
        device_bytes=DIGEST_BYTES,
        window_bytes=min(s.shape.mapped_bytes, WINDOW_BYTES + largest),
        work=Work(fixed_s=PER_TENSOR_S * s.shape.tensors, memory_s=2 * (DIGEST_S + MAP_S) * s.shape.loaded_bytes),
    )


def load_adapter(s: Setting) -> Cost:
    """Initialize the adapter, read its file, and load one into the other."""
    return Cost(
        host_bytes=s.shape.adapter_bytes,
        device_bytes=s.shape.adapter_bytes,
        work=Work(fixed_s=LOAD_S + PER_TENSOR_S * s.shape.adapter_tensors, memory_s=3 * MAP_S * s.shape.adapter_bytes),
    )


def after_adapter(s: Setting) -> Cost:
    """Digest the base again."""
    return Cost(device_bytes=DIGEST_BYTES, work=Work(memory_s=DIGEST_S * s.shape.loaded_bytes))


def adapter(s: Setting) -> Cost:
    """Load the adapter once more over poison, and once by each further load path."""
    loads = s.paths + (1 if s.case.reloads else 0)
    return Cost(
        host_bytes=3 * s.shape.adapter_bytes,
        device_bytes=2 * s.shape.adapter_bytes,
        work=Work(
            fixed_s=2 * PER_TENSOR_S * s.shape.adapter_tensors,
            memory_s=(1 + loads) * 4 * (MAP_S + DIGEST_S) * s.shape.adapter_bytes,
        ),
    )


def merged(s: Setting) -> Cost:
    """Make delta, merged and safely merged weight of each adapted layer, and their low-rank product in float64.

    The product of an element takes 2 r operations: by PEFT for each of the three, in float64 once. A layer's weight
    exists four times in its dtype (before, merged, safely merged, the file's) and its delta twice in float32, the
    adapter's dtype.
    """
    elements = s.shape.adapted_elements
    flop = sum(2.0 * (layer.rank or 0) * layer.elements for layer in s.shape.layers)
    tensors = 3 if s.case.plan.safe_merge else 2
    of_layer = s.shape.largest_layer_elements * (4 * s.shape.width + 2 * 4)
    return Cost(
        host_bytes=of_layer,
        device_bytes=of_layer,
        window_bytes=min(s.shape.mapped_bytes, WINDOW_BYTES + s.shape.largest_layer_elements * s.shape.width),
        work=Work(
            fixed_s=tensors * PER_TENSOR_S * len(s.shape.layers),
            memory_s=tensors * MERGE_S * elements,
            float64=Products(flop=(tensors + 1) * flop),
        ),
    )


def forward(s: Setting) -> Cost:
    """Run the model with the adapter on, off and merged in its dtype; on and off in float64 too, and merged in it.

    A token costs two operations for each element of the matrices, and with each of the earlier positions of its
    sequence 4 hidden in attention. All hidden states are kept until they are compared, in the model's dtype by mode, in
    float64 by two modes. Of each router's choice, the scores and their float64 values are in a scratch file.
    """
    modes = (1 if s.case.adapter is None else 3 if s.shape.layers else 2) * s.case.repeat
    wide = min(2, modes) if s.makes_reference else 0
    rows = s.positions
    products = _products(s, rows, parts=1)
    states = rows * ((s.shape.blocks + 1) * (s.shape.hidden or 0) + (s.shape.vocabulary or 0))
    in_float64 = wide * states * 8 + _float64_bytes(s, rows) if wide else 0
    merging = s.shape.largest_layer_elements * 2 * 4
    merges, of_one = _float64_merges(s), _products(s, s.tokens, parts=1)
    in_one = s.shape.largest_layer_elements * 3 * 8 if merges else 0
    native = states * s.shape.width + rows * _of_one_token(s) * s.shape.width
    scores = wide * rows * s.shape.blocks * s.shape.experts
    return Cost(
        host_bytes=modes * states * s.shape.width + in_float64 + max(0 if s.on_device else merging, in_one),
        device_bytes=native + merging,
        scratch_bytes=scores * SCORE_BYTES,
        kept_bytes=wide * states * 8 + scores * (8 + INDEX_BYTES),
        work=Work(
            fixed_s=LOAD_S + PER_TENSOR_S * modes * (s.shape.blocks + 2),
            memory_s=modes * states * MEASURE_S
            + (MERGE_ALONE_S * s.shape.adapted_elements if modes > 1 else 0)
            + merges * MERGE_IN_FLOAT64_S * s.shape.adapted_elements,
            native=products.times(modes),
            float64=Products(
                weights=wide * products.weights + merges * of_one.weights,
                flop=wide * products.flop + merges * of_one.flop,
            ),
        ),
    )


def _float64_merges(s: Setting) -> int:
    """Return how many merges are run in float64, each on one sequence, to tell what rounding alone must do."""
    fits = 0 < s.shape.largest_layer_elements <= MOST_MERGED
    if not (s.makes_reference and fits and s.shape.matrix_elements <= s.case.plan.float64_merges):
        return 0
    return 4 if s.shape.width < 4 else 3


def gradient(s: Setting) -> Cost:
    """Make gradients of what the adapter trains, part by part of the batch, in the dtype and in float64.

    A backward pass through frozen weights costs as many operations as the forward pass: two products with each weight,
    and a third in the blocks that are computed again. Of these only the states between blocks are kept, and what one
    block keeps.
    The gradients of all parts, of a large tensor those of one, are in scratch files: in float32, and those of the
    reference in float64, which a device's worker makes beside its own. They are mapped from there a part at a time to
    be compared: no more than one gradient is in memory as a whole, while it is made. The result of the optimizer's step
    has a file too, one tensor at a time.

    Of each decision in a forward pass, the reference's operand is in a scratch file until the stage ends; its margin in
    float32, and a bit for what was decided, stay.
    """
    rows, at_a_time = s.positions, s.of_backward
    passes = math.ceil(rows / max(1, at_a_time))
    states = at_a_time * ((s.shape.blocks + 1) * (s.shape.hidden or 0) + 3 * (s.shape.vocabulary or 0))
    one_block = at_a_time * _of_one_token(s)
    compared = passes * (s.shape.trained_elements - s.shape.trained_once_elements) + s.shape.trained_once_elements
    largest = s.shape.largest_trained_elements * (1 if s.shape.largest_trained_elements >= ONE_PASS else passes)
    wide_room, room = (_room(s, one_block, width) for width in (8, s.shape.width))
    wide = (states + one_block) * 8 + wide_room + _float64_bytes(s, at_a_time) if s.makes_reference else 0
    native = (states + one_block) * s.shape.width
    products = _products(s, rows, parts=passes)
    if s.on_device:
        room = 0
    stepped = s.shape.largest_trained_elements
    kinks = rows * s.shape.blocks * s.shape.kinked_units if s.makes_reference else 0
    scores = rows * s.shape.blocks * s.shape.experts if s.makes_reference else 0
    one_gradient = s.shape.largest_trained_elements * (8 if s.makes_reference else 4)
    return Cost(
        host_bytes=max(wide, 0 if s.on_device else native + room)
        + max(one_gradient, min(largest, GRADIENT_PART) * GRADIENT_BYTES),
        device_bytes=native + 4 * s.shape.largest_trained_elements,
        window_bytes=min(compared * (4 + 8), WINDOW_BYTES + min(largest, GRADIENT_LINES) * (4 + 8)),
        scratch_bytes=4 * (compared * (2 if s.on_device and s.makes_reference else 1) + stepped)
        + kinks * s.shape.width
        + scores * SCORE_BYTES,
        kept_bytes=(8 * compared if s.makes_reference else 0) + kinks * 4 + kinks // 8 + scores * (8 + INDEX_BYTES),
        work=Work(
            fixed_s=4 * PER_TENSOR_S * s.shape.adapter_tensors,
            memory_s=compared * MEASURE_S,
            native=products.times(s.case.repeat * _products_per_weight(s, one_block, room, s.shape.width)),
            float64=products.times(_products_per_weight(s, one_block, wide_room, 8) if s.makes_reference else 0),
        ),
    )


def memory(s: Setting) -> Cost:
    """Merge the largest adapted layer ten times, under torch's profiler; at the level `thorough` every layer.

    Ten merges take about as long as those of the three tensors of the stage `merged`, which are measured too.
    """
    of_layer = s.shape.largest_layer_elements * (2 * 4 + s.shape.width)
    layers = s.shape.adapted_elements if s.case.level is Level.THOROUGH else s.shape.largest_layer_elements
    return Cost(
        host_bytes=0 if s.on_device else of_layer,
        device_bytes=of_layer,
        work=Work(fixed_s=2 * STAGE_S, memory_s=3 * MERGE_S * layers),
    )


def adapters(s: Setting) -> Cost:
    """Load every adapter alone and then all of them, run each, combine them, and merge them ten times by layer.

    A further adapter is taken to be as large as the first. The base is digested some eight times. The exact value of a
    merged weight is made piece by piece; the drift takes the weight before, after and in float64 by parts. Of five
    types of combinations the deltas are cut, in the first layers but at level thorough: a square matrix of n elements
    takes n to the power of 1.5 steps, and some ten float64 arrays.
    """
    count = len(s.case.adapters)
    passes = 3 * count + 2
    rows = s.positions
    states = rows * ((s.shape.blocks + 1) * (s.shape.hidden or 0) + (s.shape.vocabulary or 0))
    of_layer = s.shape.largest_layer_elements * (4 * s.shape.width + (count + 1) * 4)
    flop = count * sum(2.0 * (layer.rank or 0) * layer.elements for layer in s.shape.layers)
    cut = [layer.elements for layer in s.shape.layers if layer.rank and layer.elements <= CUT_ELEMENTS]
    steps = sum(elements**1.5 for elements in cut)
    if s.case.level is not Level.THOROUGH:
        steps = min(steps, CUT_STEPS)
        cut = [elements for elements in cut if elements**1.5 <= CUT_STEPS]
    return Cost(
        host_bytes=max(of_layer, states * s.shape.width, 80 * max(cut, default=0)) + 4 * count * s.shape.adapter_bytes,
        device_bytes=max(of_layer, states * s.shape.width) + 4 * count * s.shape.adapter_bytes,
        work=Work(
            fixed_s=count * LOAD_S + 12 * count * PER_TENSOR_S * s.shape.adapter_tensors + 5 * CUT_S * steps,
            memory_s=8 * DIGEST_S * s.shape.loaded_bytes + (1 + count) * MERGE_S * s.shape.adapted_elements,
            native=_products(s, rows, parts=1).times(passes),
            float64=Products(flop=2 * flop),
        ),
    )


def sharding(s: Setting) -> Cost:
    """Load the base twice more, one copy at a time, spread over devices and the host.

    The stage looks for room itself, and is skipped where there is none, so its copies are not counted.
    """
    read_s = 2 * (MAP_S + DIGEST_S) * s.shape.loaded_bytes
    return Cost(
        work=Work(fixed_s=2 * LOAD_S, memory_s=read_s, native=_products(s, s.positions, parts=1).times(3)),
    )


def without_model(s: Setting) -> Cost:
    """Copy or compute on fixed small data."""
    return Cost(host_bytes=64 * MIB, work=Work(fixed_s=STAGE_S if s.case.level is not Level.THOROUGH else 60.0))


def wrapping(s: Setting) -> Cost:
    """Wrap the base and run it forwards and backwards a few times."""
    return Cost(work=Work(fixed_s=STAGE_S, native=_products(s, s.positions, parts=1).times(6)))


STAGE_COSTS: dict[Stage, StageCost] = {
    Stage.TRANSFER: without_model,
    Stage.OPERATORS: without_model,
    Stage.BASE: base,
    Stage.ADAPTER: adapter,
    Stage.MERGED: merged,
    Stage.FORWARD: forward,
    Stage.GRADIENT: gradient,
    Stage.ADAPTERS: adapters,
    Stage.MEMORY: memory,
    Stage.SHARDING: sharding,
    Stage.WRAPPING: wrapping,
}


def _products(s: Setting, rows: int, *, parts: int) -> Products:
    """Return the products of one forward pass of so many positions, which go through the model in parts."""
    attention = 4.0 * s.shape.blocks * (s.shape.hidden or 0) * s.tokens
    return Products(
        weights=float(parts * s.shape.matrix_elements), flop=rows * (2.0 * s.shape.matrix_elements + attention)
    )


def _of_one_token(s: Setting) -> int:
    """Return the elements that one block keeps of a token: inputs and outputs of its matrices, and its attention."""
    return s.shape.block_features + 2 * (s.shape.heads or 0) * s.tokens


def _room(s: Setting, one_block: int, width: int) -> int:
    """Return the bytes of activations that a backward pass on the CPU keeps, where one block has so many elements."""
    room = min(ROOM_BYTES, s.shape.block_elements * 8 // ROOM_SHARE)
    blocks = math.ceil(room / (one_block * width)) if one_block else 0  # the last one is kept whole
    return min(s.shape.blocks, blocks) * one_block * width


def _products_per_weight(s: Setting, one_block: int, kept: int, width: int) -> float:
    """Return two, and a third for the share of the blocks whose activations are not kept."""
    all_blocks = s.shape.blocks * one_block * width
    return 3 - (kept / all_blocks if all_blocks else 0)


def _float64_bytes(s: Setting, rows: int) -> int:
    """Return a part of a weight, and the logits."""
    return min(s.shape.largest_elements * 8, PART_BYTES) + rows * (s.shape.vocabulary or 0) * 8
