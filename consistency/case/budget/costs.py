"""The memory that each stage takes, by formulas in the sizes of the model: peaks above what the worker holds."""

from __future__ import annotations

import math
import pkgutil
from dataclasses import dataclass

from consistency.case.budget.shape import Shape
from consistency.case.case import Case
from consistency.case.stage import Level, Stage
from consistency.case.stages import MOST_MERGED, SPECS

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

TRAINING_PARTS = 4
"""Parts of the batch, one for each step of a training (`PASSES` of `worker.training.backward`)."""

SCORE_BYTES, INDEX_BYTES = 4, 8
"""Of a router's choice: a score in float32, and the index of an expert; as many are chosen as there are, at most."""

LOAD_BYTES = 3 * 256 * 64 * 64 * 4
LOAD_SIDE, LOAD_SHARE = 8192, 32
"""The products of `--load`: on the CPU `_CPU_BATCH` of `_CPU_SIDE`; on a device `_LARGEST_SIDE` at most,
and one part in `_SHARE` of its memory (`worker.soak.load`)."""

PROCESS_BYTES = 285 * 10**6
LIBRARY_BYTES = 110 * 10**6
"""Python with torch, transformers and PEFT imported: private memory, and libraries mapped from their files."""

ACCELERATOR_PROCESS_BYTES = 2 * 10**9
"""The same with a device's driver and libraries: the limit that a worker keeps, not a measurement of any device."""

TRAINING_STEPS = 3
"""Of the stages that train by a group of ranks."""

TRAJECTORY_STEPS = 20
"""Of the stage `trajectory`."""

RESULTS_OF_BLOCK = 5
"""Of each block: its output, and those of its attention, MLP and two norms."""

NOISY_PASSES = 3
"""Passes with noise of each mode (`LEAST_PASSES` of `block_rule`)."""

NOISY_GRADIENTS, NOISY_LARGE_GRADIENTS = 8, 4
"""The same of gradients, and of a large model (`passes_for_sums` of `block_rule`)."""

CUT_STEPS = 1 << 31
"""Steps of the decompositions of one type of combination but at level thorough: the longer side of a delta squared, as
PEFT asks for full matrices, times the shorter one."""

CUT_ELEMENTS = 1 << 24
"""Elements of the largest delta that is cut: some ten float64 arrays of them are held, 128 MiB each."""


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


def base(s: Setting) -> Cost:
    """Digest every tensor in place, and its bytes in the file: these are mapped already, or in the page cache."""
    largest = s.shape.largest_elements * s.shape.width
    return Cost(
        host_bytes=largest if s.shape.converted_bytes else 0,
        device_bytes=DIGEST_BYTES,
        window_bytes=min(s.shape.mapped_bytes, WINDOW_BYTES + largest),
    )


def load_adapter(s: Setting) -> Cost:
    """Initialize the adapter, read its file, and load one into the other."""
    return Cost(host_bytes=s.shape.adapter_bytes, device_bytes=s.shape.adapter_bytes)


def after_adapter(_: Setting) -> Cost:
    """Digest the base again."""
    return Cost(device_bytes=DIGEST_BYTES)


def adapter(s: Setting) -> Cost:
    """Load the adapter once more over poison, and once by each further load path."""
    return Cost(host_bytes=3 * s.shape.adapter_bytes, device_bytes=2 * s.shape.adapter_bytes)


def merged(s: Setting) -> Cost:
    """Make delta, merged and safely merged weight of each adapted layer, and their low-rank product in float64.

    A layer's weight exists four times in its dtype (before, merged, safely merged, the file's) and its delta twice in
    float32, the adapter's dtype.
    """
    of_layer = s.shape.largest_layer_elements * (4 * s.shape.width + 2 * 4)
    return Cost(
        host_bytes=of_layer,
        device_bytes=of_layer,
        window_bytes=min(s.shape.mapped_bytes, WINDOW_BYTES + s.shape.largest_layer_elements * s.shape.width),
    )


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
    in_float64 = wide * (states + ends) * 8 + _float64_bytes(s, rows) if wide else 0
    noisy = NOISY_PASSES if s.makes_reference else 0
    merging = s.shape.largest_layer_elements * 2 * 4
    in_one = s.shape.largest_layer_elements * 3 * 8 if _merges_in_float64(s) else 0
    native = states * s.shape.width + rows * _of_one_token(s) * s.shape.width
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
    one_block = rows * (_of_one_token(s) + 3 * (s.shape.vocabulary or 0))
    noisy = NOISY_LARGE_GRADIENTS if s.case.plan.is_large(s.shape.matrix_elements) else NOISY_GRADIENTS
    noisy = noisy if s.makes_reference else 0
    native = (2 * states + one_block + trained) * s.shape.width
    given = (2 * states * s.shape.width + (states + trained) * 8) if s.makes_reference else 0
    wide = 12 * states + one_block * 8 + given + _float64_bytes(s, rows) if s.makes_reference else 0
    kinks = rows * s.shape.blocks * s.shape.kinked_units if s.makes_reference else 0
    scores = rows * s.shape.blocks * s.shape.experts if s.makes_reference else 0
    return Cost(
        host_bytes=max(wide, given + noisy * (states + trained) * s.shape.width + (0 if s.on_device else native))
        + min(s.shape.largest_trained_elements, GRADIENT_PART) * GRADIENT_BYTES,
        device_bytes=native,
        scratch_bytes=4 * s.shape.largest_trained_elements + kinks * s.shape.width + scores * SCORE_BYTES,
        kept_bytes=given + kinks * 4 + kinks // 8 + scores * (8 + INDEX_BYTES),
    )


def trajectory(s: Setting) -> Cost:
    """Train some steps alone, and compute the gradients of each by blocks; for the reference as further trainings too.

    Gradients and parameters of each step are in files, and all trained tensors at once are in memory: with the
    optimizer's two moments, in float64 and as often as noise is drawn. What each step gives to all is in a file.
    """
    steps, trained = s.case.steps or TRAJECTORY_STEPS, s.shape.trained_elements
    once = gradient(s)
    twin = s.shape.loaded_bytes if s.on_device and s.makes_reference else 0
    return Cost(
        host_bytes=once.host_bytes + twin + trained * (8 + (3 * 8 if s.makes_reference else 0)),
        device_bytes=once.device_bytes + 4 * 4 * trained,
        scratch_bytes=once.scratch_bytes + 2 * 4 * steps * trained,
        kept_bytes=steps * (8 * trained + once.kept_bytes) if s.makes_reference else 0,
    )


def memory(s: Setting) -> Cost:
    """Merge one adapted layer at a time ten times, under torch's profiler."""
    of_layer = s.shape.largest_layer_elements * (2 * 4 + s.shape.width)
    return Cost(host_bytes=0 if s.on_device else of_layer, device_bytes=of_layer)


def adapters(s: Setting) -> Cost:
    """Load every adapter alone and then all of them, run each, combine them, and merge them ten times by layer.

    A further adapter is taken to be as large as the first. The exact value of a merged weight is made piece by piece;
    the drift takes the weight before, after and in float64 by parts. Of five types of combinations the deltas are cut,
    in the first layers but at level thorough: a square matrix of n elements takes n to the power of 1.5 steps, and some
    ten float64 arrays.
    """
    count = len(s.case.adapters)
    rows = s.positions
    states = rows * ((s.shape.blocks + 1) * (s.shape.hidden or 0) + (s.shape.vocabulary or 0))
    of_layer = s.shape.largest_layer_elements * (4 * s.shape.width + (count + 1) * 4)
    cut = [layer.elements for layer in s.shape.layers if layer.rank and layer.elements <= CUT_ELEMENTS]
    if s.case.level is not Level.THOROUGH:
        cut = [elements for elements in cut if elements**1.5 <= CUT_STEPS]
    return Cost(
        host_bytes=max(of_layer, states * s.shape.width, 80 * max(cut, default=0)) + 4 * count * s.shape.adapter_bytes,
        device_bytes=max(of_layer, states * s.shape.width) + 4 * count * s.shape.adapter_bytes,
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


def collectives(s: Setting) -> Cost:
    """Send and add up tensors of up to 256 MiB at the level `thorough`, else of 4 MiB.

    Of the largest there are at once what a rank gives, its copy, and two results, or one and its exact values.
    """
    largest = 256 * MIB if s.case.level is Level.THOROUGH else 4 * MIB
    return Cost(host_bytes=64 * MIB + 8 * largest, device_bytes=4 * largest if s.on_device else 0)


def replicas(s: Setting) -> Cost:
    """Train a few steps: gradients and parameters of each step are in files, one of each rank."""
    states = s.of_a_step * ((s.shape.blocks + 1) * (s.shape.hidden or 0) + 3 * (s.shape.vocabulary or 0))
    native = (states + s.of_a_step * s.shape.blocks * _of_one_token(s)) * s.shape.width
    optimizer = 4 * 4 * s.shape.trained_elements
    return Cost(
        host_bytes=optimizer + (0 if s.on_device else native),
        device_bytes=native + optimizer,
        scratch_bytes=3 * 4 * s.shape.trained_elements * TRAINING_STEPS,
    )


def shards(s: Setting) -> Cost:
    """Load the model once more for each order of adapter and sharding, and train each as `replicas` does."""
    one = replicas(s)
    return Cost(
        host_bytes=one.host_bytes + (0 if s.on_device else s.shape.loaded_bytes),
        device_bytes=one.device_bytes + s.shape.loaded_bytes,
        scratch_bytes=2 * one.scratch_bytes,
    )


def tensor_parallel(s: Setting) -> Cost:
    """Load a part of the model once more, and run it forward and backward over the batch."""
    once, backward = forward(s), gradient(s)
    return Cost(
        host_bytes=max(once.host_bytes, backward.host_bytes) + (0 if s.on_device else s.shape.loaded_bytes),
        device_bytes=max(once.device_bytes, backward.device_bytes) + s.shape.loaded_bytes,
        scratch_bytes=backward.scratch_bytes,
    )


def cost_of(stage: Stage, s: Setting) -> Cost:
    """Return what a stage takes."""
    cost: Cost = pkgutil.resolve_name(SPECS[stage].cost)(s)
    return cost


def _of_one_token(s: Setting) -> int:
    """Return the elements that one block keeps of a token: inputs and outputs of its matrices, and its attention."""
    return s.shape.block_features + 2 * (s.shape.heads or 0) * s.tokens


def _float64_bytes(s: Setting, rows: int) -> int:
    """Return a part of a weight, and the logits."""
    return min(s.shape.largest_elements * 8, PART_BYTES) + rows * (s.shape.vocabulary or 0) * 8
