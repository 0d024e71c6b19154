"""The memory that each stage takes, by formulas in the sizes of the model: peaks above what the worker holds."""

from __future__ import annotations

import math
import pkgutil
from dataclasses import dataclass

from consistency.case.budget.shape import Shape
from consistency.case.case import Case
from consistency.case.stage import Stage
from consistency.case.stages import MOST_MERGED, SPECS
from consistency.numerics.sizes import GPU_CHUNK_ROWS, PART, PART_BYTES

MIB = 2**20

WINDOW_BYTES = 64 * MIB
"""Bytes read through one mapping before another takes its place.

A page that was read stays resident while it is mapped, so a single mapping would hold a second copy of the model in
memory. Small compared with a model; large compared with the cost of opening a file, which parses its header.
"""

DIGEST_BYTES = 3 * GPU_CHUNK_ROWS * 8 * 2**10
"""Scratch of a digest on a device: three arrays of rows of 8 KiB."""

GRADIENT_BYTES = 10 * 8
"""Per element of a gradient: arrays of float64 in which its errors and the optimizer's step are measured."""

TRAINING_PARTS = 4
"""Parts of the batch, one for each step of a training."""

SCORE_BYTES, INDEX_BYTES = 4, 8
"""Of a router's choice: a score in float32, and the index of an expert; as many are chosen as there are, at most."""

PROCESS_BYTES = 285 * 10**6
LIBRARY_BYTES = 110 * 10**6
"""Python with torch, transformers and PEFT imported: private memory, and libraries mapped from their files."""

ACCELERATOR_PROCESS_BYTES = 2 * 10**9
"""The same with a device's driver and libraries: the limit that a worker keeps, not a measurement of any device."""

RESULTS_OF_BLOCK = 5
"""Of each block: its output, and those of its attention, MLP and two norms."""

LEAST_PASSES, MOST_PASSES = 3, 8
"""With noise, of each mode. Three show how one row of one pass varies; more are for tensors of a few rows, one less is
enough for large models, whose rows are wide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one stage takes."""

    host_bytes: int = 0
    """Private memory above what the worker holds."""
    device_bytes: int = 0
    """Memory of the device above what the worker holds on it."""
    window_bytes: int = 0
    """Of files that are mapped beside the model."""
    scratch_bytes: int = 0
    kept_bytes: int = 0
    """`scratch_bytes`, `kept_bytes`: of files in the scratch folder: removed when the stage ends, and kept for the
    workers of the case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a worker is to do."""

    shape: Shape
    case: Case
    on_device: bool
    """Whether the model is on an accelerator."""
    makes_reference: bool
    """Whether it computes the float64 reference."""

    @property
    def sequences(self) -> int:
        return self.shape.sequences or self.case.sequences(self.shape.matrix_elements)

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
    def of_a_step(self) -> int:
        """Return the positions of one step of a training."""
        return math.ceil(self.sequences / min(TRAINING_PARTS, self.sequences)) * self.tokens


def load_base(s: Setting) -> Cost:
    """Map the files; only what is converted to another dtype, or goes to a device, is read.

    While a tensor goes to a device, it and its file's bytes are on the host.
    """
    largest = s.shape.largest_elements * s.shape.width
    return Cost(
        host_bytes=2 * largest if s.on_device else largest if s.shape.converted_bytes else 0,
        window_bytes=WINDOW_BYTES if s.on_device else 0,
    )


def load_adapter(s: Setting) -> Cost:
    """Initialize the adapter, read its file, and load one into the other."""
    return Cost(host_bytes=s.shape.adapter_bytes, device_bytes=s.shape.adapter_bytes)


def after_adapter(_: Setting) -> Cost:
    """Digest the base again."""
    return Cost(device_bytes=DIGEST_BYTES)


def forward(s: Setting) -> Cost:
    """Run the model with the adapter on, off and merged, from end to end and, where it is not large, block by block.

    Results of blocks are kept until they are compared, in the model's dtype of one mode and of the passes with noise,
    in float64 of two. Of each router's choice, the scores and their float64 values are in a scratch file.
    """
    modes = 1 if s.case.adapter is None else 3 if s.shape.layers else 2
    compared = modes if s.shape.matrix_elements <= s.case.plan.float64_merges else 1
    wide = min(2, compared) if s.makes_reference else 0
    rows = s.positions
    ends = rows * (s.shape.vocabulary or 0)
    states = rows * (RESULTS_OF_BLOCK * s.shape.blocks + 1) * (s.shape.hidden or 0) + ends
    in_float64 = wide * (states + ends) * 8 + float64_bytes(s, rows) if wide else 0
    noisy = LEAST_PASSES if s.makes_reference else 0
    merging = s.shape.largest_layer_elements * 2 * 4
    in_one = s.shape.largest_layer_elements * 3 * 8 if _merges_in_float64(s) else 0
    native = states * s.shape.width + rows * of_one_token(s) * s.shape.width
    scores = wide * rows * s.shape.blocks * s.shape.experts
    return Cost(
        host_bytes=(1 + noisy) * states * s.shape.width + in_float64 + max(0 if s.on_device else merging, in_one),
        device_bytes=native + merging,
        scratch_bytes=scores * SCORE_BYTES,
        kept_bytes=wide * states * 8 + scores * (8 + INDEX_BYTES),
    )


def _merges_in_float64(s: Setting) -> bool:
    """Return whether merges are run in float64, to tell what rounding alone must do."""
    fits = 0 < s.shape.largest_layer_elements <= MOST_MERGED
    return s.makes_reference and fits and s.shape.matrix_elements <= s.case.plan.float64_merges


def noisy_gradients(case: Case, matrix_elements: int) -> int:
    """Return how many passes with noise are made of gradients, where one token may make the error of all rows.

    Of a large model they are fewer, but at level thorough.
    """
    return MOST_PASSES // 2 if case.plan.is_large(matrix_elements) else MOST_PASSES


def gradient(s: Setting) -> Cost:
    """Run forward and backward by blocks: in the dtype, and for the reference with noise and in float64.

    In memory are the activations of one block; what enters and leaves the blocks, and the gradients that come in there;
    and the gradients of what is trained, of all passes. The result of the optimizer's step has a file, one tensor at a
    time.

    Of each decision in a forward pass, the reference's operand is in a scratch file until the stage ends; its margin in
    float32, and a bit for what was decided, stay.
    """
    rows, trained = s.positions, s.shape.trained_elements
    states = rows * (s.shape.blocks + 1) * (s.shape.hidden or 0)
    one_block = rows * (of_one_token(s) + 3 * (s.shape.vocabulary or 0))
    noisy = noisy_gradients(s.case, s.shape.matrix_elements) if s.makes_reference else 0
    native = (2 * states + one_block + trained) * s.shape.width
    given = (2 * states * s.shape.width + (states + trained) * 8) if s.makes_reference else 0
    wide = 12 * states + one_block * 8 + given + float64_bytes(s, rows) if s.makes_reference else 0
    kinks = rows * s.shape.blocks * s.shape.kinked_units if s.makes_reference else 0
    scores = rows * s.shape.blocks * s.shape.experts if s.makes_reference else 0
    return Cost(
        host_bytes=max(wide, given + noisy * (states + trained) * s.shape.width + (0 if s.on_device else native))
        + min(s.shape.largest_trained_elements, PART) * GRADIENT_BYTES,
        device_bytes=native,
        scratch_bytes=4 * s.shape.largest_trained_elements + kinks * s.shape.width + scores * SCORE_BYTES,
        kept_bytes=given + kinks * 4 + kinks // 8 + scores * (8 + INDEX_BYTES),
    )


def nothing(_: Setting) -> Cost:
    """Take nothing that counts.

    `sharding` loads the base twice more, and looks for room itself: it is skipped where there is none. `wrapping` wraps
    the base and runs it a few times.
    """
    return Cost()


def without_model(_: Setting) -> Cost:
    """Copy or compute on fixed small data."""
    return Cost(host_bytes=64 * MIB)


def cost_of(stage: Stage, s: Setting) -> Cost:
    """Return what a stage takes."""
    cost: Cost = pkgutil.resolve_name(SPECS[stage].cost)(s)
    return cost


def of_one_token(s: Setting) -> int:
    """Return the elements that one block keeps of a token: inputs and outputs of its matrices, and its attention."""
    return s.shape.block_features + 2 * (s.shape.heads or 0) * s.tokens


def float64_bytes(s: Setting, rows: int) -> int:
    """Return a part of a weight, and the logits."""
    return min(s.shape.largest_elements * 8, PART_BYTES) + rows * (s.shape.vocabulary or 0) * 8
