"""Formulas for the memory that each stage takes, in the sizes of the model: peaks above what the worker holds."""

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
"""Bytes of scratch of a digest on a device: three arrays of rows of 8 KiB."""

GRADIENT_BYTES = 10 * 8
"""Bytes per element of a gradient: arrays of float64 in which its errors and the optimizer's step are measured."""

TRAINING_PARTS = 4
"""Number of parts that the batch is split into, one for each step of a training."""

SCORE_BYTES = 4
"""Bytes of a router's score of one expert, in float32."""

INDEX_BYTES = 8
"""Bytes of the index of an expert that a router chose; at most as many are chosen as there are experts."""

PROCESS_BYTES = 285 * 10**6
"""Private memory of Python with torch, transformers and PEFT imported."""

LIBRARY_BYTES = 110 * 10**6
"""Libraries of the same process that are mapped from their files."""

ACCELERATOR_PROCESS_BYTES = 2 * 10**9
"""Private memory of the same process with a device's driver and libraries: the limit that a worker keeps, not a
measurement of any device."""

RESULTS_OF_BLOCK = 5
"""Results that are kept of each block: its output, and the outputs of its attention, MLP and two norms."""

LONG_ROWS = 64
"""Rows of the long text that are compared, at most: of a text of 4,099 tokens some 50."""

LEAST_PASSES, MOST_PASSES = 3, 8
"""Noisy passes of each mode, at least and at most. Three show how one row of one pass varies; more are for tensors of a
few rows, one less is enough for large models, whose rows are wide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The peak memory of one stage."""

    host_bytes: int = 0
    """Private memory above what the worker holds."""
    device_bytes: int = 0
    """Memory of the device above what the worker holds on it."""
    window_bytes: int = 0
    """Bytes of files that are mapped beside the model."""
    scratch_bytes: int = 0
    """Bytes of files in the scratch folder that are removed when the stage ends."""
    kept_bytes: int = 0
    """Bytes of files in the scratch folder that are kept for the workers of the case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The work of one worker: the model's sizes, the case, and the worker's part in it."""

    shape: Shape
    case: Case
    on_device: bool
    """Whether the model is on an accelerator."""
    makes_reference: bool
    """Whether the worker computes the float64 reference."""

    @property
    def sequences(self) -> int:
        """Return the number of sequences that the model is given."""
        return self.shape.sequences or self.case.sequences(self.shape.matrix_elements)

    @property
    def tokens(self) -> int:
        """Return the positions of one sequence."""
        longest = self.shape.positions
        tokens = self.shape.tokens or self.case.tokens
        # Inputs from a file are run as they are; inputs that are made stay within the model's positions.
        comes_from_file = self.shape.tokens is not None
        if longest is None or comes_from_file:
            return tokens
        return min(tokens, longest)

    @property
    def positions(self) -> int:
        """Return the positions of all sequences."""
        return self.sequences * self.tokens

    @property
    def long_tokens(self) -> int:
        """Return the positions of the long text; 0 where none is computed."""
        longest = self.shape.positions or self.case.long_tokens
        tokens = min(self.case.long_tokens, longest)
        return tokens if tokens > self.case.tokens else 0

    @property
    def of_a_step(self) -> int:
        """Return the positions of one step of a training."""
        return math.ceil(self.sequences / min(TRAINING_PARTS, self.sequences)) * self.tokens


def load_base(setting: Setting) -> Cost:
    """Estimate the loading of the base, which maps its files.

    Only what is converted to another dtype, or goes to a device, is read. While a tensor goes to a device, it and its
    file's bytes are on the host.
    """
    largest_bytes = setting.shape.largest_elements * setting.shape.width
    if setting.on_device:
        return Cost(host_bytes=2 * largest_bytes, window_bytes=WINDOW_BYTES)
    if setting.shape.converted_bytes:
        return Cost(host_bytes=largest_bytes)
    return Cost()


def load_adapter(setting: Setting) -> Cost:
    """Estimate the loading of the adapter: it is initialized, its file is read, and one is loaded into the other."""
    return Cost(host_bytes=setting.shape.adapter_bytes, device_bytes=setting.shape.adapter_bytes)


def after_adapter(_: Setting) -> Cost:
    """Estimate the second digest of the base, once the adapter is loaded."""
    return Cost(device_bytes=DIGEST_BYTES)


def forward(setting: Setting) -> Cost:
    """Estimate passes with the adapter on, off and merged: whole, and block by block where the model is not large.

    Results of blocks are kept until they are compared, in the model's dtype for one mode and for the noisy passes, in
    float64 for two modes. Of each router's choice, the scores and their float64 values are in a scratch file.
    """
    shape = setting.shape
    rows = setting.positions
    modes = 3 if shape.layers else 2
    if setting.case.adapter is None:
        modes = 1
    # Of a larger model, only the blocks of one mode are compared.
    compares_all_modes = shape.matrix_elements <= setting.case.plan.float64_merges
    compared_modes = modes if compares_all_modes else 1
    float64_modes = min(2, compared_modes) if setting.makes_reference else 0
    noisy_passes = LEAST_PASSES if setting.makes_reference else 0

    logits = rows * (shape.vocabulary or 0)
    states = rows * (RESULTS_OF_BLOCK * shape.blocks + 1) * (shape.hidden or 0) + logits
    float64_result_bytes = 0
    if float64_modes:
        float64_result_bytes = float64_modes * (states + logits) * 8 + float64_bytes(setting, rows)
    # Two float32 arrays of the largest layer are held in a merge, three of float64 where it is run in float64.
    merge_bytes = shape.largest_layer_elements * 2 * 4
    host_merge_bytes = 0 if setting.on_device else merge_bytes
    if _merges_in_float64(setting):
        host_merge_bytes = max(host_merge_bytes, shape.largest_layer_elements * 3 * 8)
    pass_bytes = states * shape.width + rows * of_one_token(setting) * shape.width
    scores = float64_modes * rows * shape.blocks * shape.experts
    host_bytes = (1 + noisy_passes) * states * shape.width + float64_result_bytes + host_merge_bytes
    long = long_text(setting)
    return Cost(
        # the long text follows the passes over the short ones, whose results are still there
        host_bytes=host_bytes + long.host_bytes,
        device_bytes=max(pass_bytes, long.device_bytes) + merge_bytes,
        scratch_bytes=scores * SCORE_BYTES,
        kept_bytes=float64_modes * states * 8 + scores * (8 + INDEX_BYTES) + long.kept_bytes,
    )


def long_text(setting: Setting) -> Cost:
    """Estimate the long text: some blocks on all of its tokens, and in some rows in float64 and with noise.

    What enters the first block and leaves six, as of two kinds, is kept for the other workers. In memory is one block
    at a time, with the scores of the sampled rows where attention is by its formula; a device has all logits.
    """
    tokens, shape = setting.long_tokens, setting.shape
    if not tokens:
        return Cost()
    hidden, heads = shape.hidden or 0, shape.heads or 0
    mask_bytes = tokens * tokens
    pass_bytes = tokens * (shape.block_features + (shape.vocabulary or 0)) * shape.width + mask_bytes
    given_bytes = tokens * 7 * hidden * shape.width
    reference_bytes = 0
    if setting.makes_reference:
        sampled = LONG_ROWS * (shape.block_features + 2 * heads * tokens + (shape.vocabulary or 0))
        reference_bytes = tokens * shape.block_features * 8 + sampled * 8 + float64_bytes(setting, LONG_ROWS)
    host_pass_bytes = 0 if setting.on_device and not setting.makes_reference else pass_bytes
    return Cost(
        host_bytes=given_bytes + max(reference_bytes, host_pass_bytes),
        device_bytes=pass_bytes,
        kept_bytes=given_bytes if setting.makes_reference else 0,
    )


def _merges_in_float64(setting: Setting) -> bool:
    """Return whether merges are run in float64, to tell what rounding alone must do."""
    shape = setting.shape
    fits = 0 < shape.largest_layer_elements <= MOST_MERGED
    return setting.makes_reference and fits and shape.matrix_elements <= setting.case.plan.float64_merges


def noisy_gradients(case: Case, matrix_elements: int) -> int:
    """Return how many noisy passes with gradients are made: many, because one token may make the error of all rows.

    A large model gets half as many, but at level thorough.
    """
    return MOST_PASSES // 2 if case.plan.is_large(matrix_elements) else MOST_PASSES


def gradient(setting: Setting) -> Cost:
    """Estimate forward and backward passes by blocks: in the dtype, and for the reference with noise and in float64.

    In memory are the activations of one block; the states between blocks and the gradients that arrive there; and the
    gradients of what is trained, of all passes. The result of the optimizer's step has a file, one tensor at a time.

    Of each decision in a forward pass, the reference's operand is in a scratch file until the stage ends; its margin in
    float32, and a bit for what was decided, stay.
    """
    shape = setting.shape
    rows, trained = setting.positions, shape.trained_elements
    states = rows * (shape.blocks + 1) * (shape.hidden or 0)
    block_elements = rows * (of_one_token(setting) + 3 * (shape.vocabulary or 0))
    pass_bytes = (2 * states + block_elements + trained) * shape.width
    host_pass_bytes = 0 if setting.on_device else pass_bytes
    # `result_bytes`: what the reference leaves for the other workers; `float64_pass_bytes`: while it is computed
    noisy_passes = result_bytes = float64_pass_bytes = kinks = scores = 0
    if setting.makes_reference:
        noisy_passes = noisy_gradients(setting.case, shape.matrix_elements)
        result_bytes = 2 * states * shape.width + (states + trained) * 8
        float64_pass_bytes = 12 * states + block_elements * 8 + result_bytes + float64_bytes(setting, rows)
        kinks = rows * shape.blocks * shape.kinked_units
        scores = rows * shape.blocks * shape.experts
    noisy_pass_bytes = result_bytes + noisy_passes * (states + trained) * shape.width + host_pass_bytes
    judging_bytes = min(shape.largest_trained_elements, PART) * GRADIENT_BYTES
    return Cost(
        # The float64 pass and the noisy passes are not in memory together.
        host_bytes=max(float64_pass_bytes, noisy_pass_bytes) + judging_bytes,
        device_bytes=pass_bytes,
        scratch_bytes=4 * shape.largest_trained_elements + kinks * shape.width + scores * SCORE_BYTES,
        kept_bytes=result_bytes + kinks * 4 + kinks // 8 + scores * (8 + INDEX_BYTES),
    )


def nothing(_: Setting) -> Cost:
    """Estimate a stage that takes nothing that counts.

    `sharding` loads the base twice more, and looks for room itself: it is skipped where there is none. `wrapping` wraps
    the base and runs it a few times.
    """
    return Cost()


def without_model(_: Setting) -> Cost:
    """Estimate a stage that copies or computes on fixed small data."""
    return Cost(host_bytes=64 * MIB)


def cost_of(stage: Stage, setting: Setting) -> Cost:
    """Return the estimate of a stage, by the function that its declaration names."""
    cost: Cost = pkgutil.resolve_name(SPECS[stage].cost)(setting)
    return cost


def of_one_token(setting: Setting) -> int:
    """Return how many elements one block keeps per token: inputs and outputs of its matrices, and its attention."""
    return setting.shape.block_features + 2 * (setting.shape.heads or 0) * setting.tokens


def float64_bytes(setting: Setting, rows: int) -> int:
    """Return the bytes, in float64, of a part of a weight and of the logits of so many rows."""
    return min(setting.shape.largest_elements * 8, PART_BYTES) + rows * (setting.shape.vocabulary or 0) * 8
