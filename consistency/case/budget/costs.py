"""What each stage takes, by formulas in the sizes of the model; every constant that was measured is here.

Bytes are peaks above what the worker holds already; `Work` is what a stage does, in units whose speed `speed` measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from consistency.case.budget.shape import Shape
from consistency.case.budget.speed import Speed
from consistency.case.case import Case
from consistency.case.stages import Level, Stage

MIB = 2**20

WINDOW_BYTES = 64 * MIB
"""Of a file that is read beside the model (`MAPPED_BYTES` of the worker's `weight_files`)."""

KEPT_FLOAT64_BYTES = 1 << 30
PART_FLOAT64_BYTES = 1 << 28
"""Weights widened to float64 that are kept for one block, and the part of a larger one (`KEEP_BYTES` and `PART_BYTES`
of `numerics.wide_weights`)."""

DIGEST_BYTES = 3 * 16 * MIB
"""Scratch of a digest on a device: three arrays of `_GPU_CHUNK_ROWS` rows of `numerics.digest`."""

GRADIENT_PASSES = 4
"""Parts of the batch, each with a backward pass of its own (`PASSES` of the stage `gradient`)."""

# Measured on a two-core virtual machine (Sapphire Rapids, torch 2.9 built for the CPU); `benchmarks/budget.py` prints
# estimate and measurement side by side.
PROCESS_BYTES = 285 * 10**6
LIBRARY_BYTES = 110 * 10**6
"""Python with torch, transformers and PEFT imported: private memory, and libraries mapped from their files."""

ACCELERATOR_PROCESS_BYTES = 2 * 10**9
"""The same with a device's driver and libraries: the limit that a worker keeps, not a measurement of any device."""

START_S = 4.8
LOAD_S = 0.2
STAGE_S = 0.2
"""Imports, building a model from its config, and a stage that checks no model."""

PER_TENSOR_S = 0.002
"""Of Python for one record: a digest, its comparison, a line of JSON."""

FLOP_SHARE = 0.85
"""Of NumPy's product of cached matrices, reached by torch's product of 128 rows with a weight in memory."""

DIGEST_SHARE = 0.2
"""Of the speed of a sum: a digest multiplies each word besides adding it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a stage does: seconds that no processor shortens, bytes, and floating-point operations by dtype."""

    fixed_s: float = 0.0
    digested_bytes: float = 0.0
    fresh_bytes: float = 0.0
    native_flop: float = 0.0
    float64_flop: float = 0.0

    def seconds(self, speed: Speed, *, dtype: str, threads: int) -> float:
        """Return the time on this host's processor, all of whose threads share every part but the fixed one."""
        half = dtype in ("bfloat16", "float16")
        native = speed.half_flop if half and speed.half_flop is not None else speed.float32_flop
        parallel = (
            self.digested_bytes / (DIGEST_SHARE * speed.read_bytes)
            + self.native_flop / (FLOP_SHARE * native)
            + self.float64_flop / (FLOP_SHARE * speed.float64_flop)
        )
        # clearing pages scales with threads only where several of them touch new memory
        return self.fixed_s + self.fresh_bytes / speed.fresh_bytes + parallel / max(1, threads)


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
    """

    host_bytes: int = 0
    device_bytes: int = 0
    window_bytes: int = 0
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

    def at_a_time(self, parts: int = 1) -> int:
        """Return the positions that go through the model at a time, where a stage takes the batch in parts."""
        rows = math.ceil(self.sequences / min(parts, self.sequences))
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
        work=Work(fixed_s=LOAD_S, fresh_bytes=read),
    )


def base(s: Setting) -> Cost:
    """Digest every tensor in place, and its bytes in the file: twice the model is read."""
    largest = s.shape.largest_elements * s.shape.width
    return Cost(
        host_bytes=largest if s.shape.converted_bytes else 0,
        device_bytes=DIGEST_BYTES,
        window_bytes=min(s.shape.mapped_bytes, WINDOW_BYTES + largest),
        work=Work(fixed_s=PER_TENSOR_S * s.shape.tensors, digested_bytes=2 * s.shape.loaded_bytes),
    )


def load_adapter(s: Setting) -> Cost:
    """Initialize the adapter, read its file, and load one into the other."""
    return Cost(
        host_bytes=s.shape.adapter_bytes,
        device_bytes=s.shape.adapter_bytes,
        work=Work(fixed_s=LOAD_S + PER_TENSOR_S * s.shape.adapter_tensors, fresh_bytes=3 * s.shape.adapter_bytes),
    )


def after_adapter(s: Setting) -> Cost:
    """Digest the base again."""
    return Cost(device_bytes=DIGEST_BYTES, work=Work(digested_bytes=s.shape.loaded_bytes))


def adapter(s: Setting) -> Cost:
    """Load the adapter once more over poison, and once by each further load path."""
    loads = s.paths + (1 if s.case.reloads else 0)
    return Cost(
        host_bytes=3 * s.shape.adapter_bytes,
        device_bytes=2 * s.shape.adapter_bytes,
        work=Work(
            fixed_s=(1 + loads) * PER_TENSOR_S * s.shape.adapter_tensors,
            fresh_bytes=4 * (1 + loads) * s.shape.adapter_bytes,
            digested_bytes=2 * (1 + loads) * s.shape.adapter_bytes,
        ),
    )


def merged(s: Setting) -> Cost:
    """Make delta, merged and safely merged weight of each adapted layer, and their low-rank product in float64.

    The product of an element takes 2 r operations. A layer's weight exists four times in its dtype (before, merged, its
    copy, the file's) and its delta twice in float32, the adapter's dtype.
    """
    elements = s.shape.adapted_elements
    product = sum(2.0 * (layer.rank or 0) * layer.elements for layer in s.shape.layers)
    copies = 3 if s.case.plan.safe_merge else 2
    of_layer = s.shape.largest_layer_elements * (4 * s.shape.width + 2 * 4)
    return Cost(
        host_bytes=of_layer,
        device_bytes=of_layer,
        window_bytes=min(s.shape.mapped_bytes, WINDOW_BYTES + s.shape.largest_layer_elements * s.shape.width),
        work=Work(
            fixed_s=copies * PER_TENSOR_S * len(s.shape.layers),
            fresh_bytes=copies * elements * (s.shape.width + 8),
            digested_bytes=copies * elements * s.shape.width,
            native_flop=product,
            float64_flop=product,
        ),
    )


def forward(s: Setting) -> Cost:
    """Run the model with the adapter on, off and merged in its dtype; on and off in float64 too.

    A token costs two operations for each element of the matrices, and with each of the earlier positions of its
    sequence 4 hidden in attention. All hidden states are kept until they are compared, in the model's dtype by mode, in
    float64 by two modes. In float64 the weights of one block are widened at a time.
    """
    if not s.shape.runs_on_inputs:
        return Cost(work=Work(fixed_s=STAGE_S))
    modes = (1 if s.case.adapter is None else 3 if s.shape.layers else 2) * s.case.repeat
    wide = min(2, modes) if s.makes_reference else 0
    rows = s.sequences * s.tokens
    flop = _flop(s, rows)
    states = rows * ((s.shape.blocks + 1) * (s.shape.hidden or 0) + (s.shape.vocabulary or 0))
    on_cpu = wide * states * 8 + _float64_bytes(s, s.at_a_time()) if wide else 0
    merging = s.shape.largest_layer_elements * 2 * 4
    native = states * s.shape.width + s.at_a_time() * _of_one_token(s) * s.shape.width
    return Cost(
        host_bytes=modes * states * s.shape.width + on_cpu + (0 if s.on_device else merging),
        device_bytes=native + merging,
        work=Work(
            fixed_s=PER_TENSOR_S * modes * (s.shape.blocks + 2) + LOAD_S,
            fresh_bytes=wide * s.shape.matrix_elements * 8 + modes * states * 8,
            native_flop=modes * flop,
            float64_flop=wide * flop,
        ),
    )


def gradient(s: Setting) -> Cost:
    """Make gradients of what the adapter trains, part by part of the batch, in the dtype and in float64.

    A backward pass through frozen weights costs as many operations as the forward pass, and each block is computed
    twice forwards: three forward passes. Only the states between blocks are kept, and what one block keeps.
    """
    if not s.shape.runs_on_inputs:
        return Cost(work=Work(fixed_s=STAGE_S))
    rows, at_a_time = s.sequences * s.tokens, s.at_a_time(GRADIENT_PASSES)
    passes = math.ceil(rows / max(1, at_a_time))
    flop = 3 * _flop(s, rows)
    states = at_a_time * ((s.shape.blocks + 1) * (s.shape.hidden or 0) + 3 * (s.shape.vocabulary or 0))
    one_block = at_a_time * _of_one_token(s)
    trained = s.shape.trained_elements
    wide = states * 8 + one_block * 8 + _float64_bytes(s, at_a_time) + 8 * trained if s.makes_reference else 0
    native = (states + one_block) * s.shape.width + 4 * trained
    return Cost(
        host_bytes=wide + (4 * trained if s.on_device else native),
        device_bytes=native,
        work=Work(
            fixed_s=2 * PER_TENSOR_S * s.shape.adapter_tensors,
            fresh_bytes=(3 * passes * s.shape.matrix_elements * 8 if s.makes_reference else 0) + 8 * trained,
            native_flop=flop * s.case.repeat,
            float64_flop=flop if s.makes_reference else 0,
        ),
    )


def memory(s: Setting) -> Cost:
    """Merge the largest adapted layer some ten times, under torch's profiler; at the level `thorough` every layer."""
    of_layer = s.shape.largest_layer_elements * (2 * 4 + s.shape.width)
    layers = s.shape.adapted_elements if s.case.level is Level.THOROUGH else s.shape.largest_layer_elements
    return Cost(
        host_bytes=0 if s.on_device else of_layer,
        device_bytes=of_layer,
        work=Work(fixed_s=STAGE_S, fresh_bytes=10 * layers * (2 * 4 + s.shape.width)),
    )


def sharding(s: Setting) -> Cost:
    """Load the base twice more, one copy at a time, spread over devices and the host.

    The stage looks for room itself, and is skipped where there is none, so its copies are not counted.
    """
    return Cost(
        work=Work(fixed_s=2 * LOAD_S, fresh_bytes=2 * s.shape.loaded_bytes, native_flop=3 * _flop(s, s.at_a_time())),
    )


def without_model(s: Setting) -> Cost:
    """Copy or compute on fixed small data."""
    return Cost(host_bytes=64 * MIB, work=Work(fixed_s=STAGE_S if s.case.level is not Level.THOROUGH else 60.0))


def wrapping(s: Setting) -> Cost:
    """Wrap the base and run it forwards and backwards a few times."""
    return Cost(work=Work(fixed_s=STAGE_S, native_flop=6 * _flop(s, s.at_a_time())))


STAGE_COSTS: dict[Stage, StageCost] = {
    Stage.TRANSFER: without_model,
    Stage.OPERATORS: without_model,
    Stage.BASE: base,
    Stage.ADAPTER: adapter,
    Stage.MERGED: merged,
    Stage.FORWARD: forward,
    Stage.GRADIENT: gradient,
    Stage.MEMORY: memory,
    Stage.SHARDING: sharding,
    Stage.WRAPPING: wrapping,
}


def _flop(s: Setting, rows: int) -> float:
    attention = 4.0 * s.shape.blocks * (s.shape.hidden or 0) * s.tokens
    return rows * (2.0 * s.shape.matrix_elements + attention)


def _of_one_token(s: Setting) -> int:
    """Return the elements that one block keeps of a token: inputs and outputs of its matrices, and its attention."""
    return s.shape.block_features + 2 * (s.shape.heads or 0) * s.tokens


def _float64_bytes(s: Setting, rows: int) -> int:
    """Return the widened weights of one block, with a part of a larger weight and its product."""
    block = min(s.shape.block_elements * 8, KEPT_FLOAT64_BYTES)
    part = min(s.shape.largest_elements * 8, PART_FLOAT64_BYTES)
    return block + part + rows * (s.shape.vocabulary or 0) * 8


def slower(speed: Speed, variant: str | None) -> Speed:
    """Return the speed of a kernel variant: AVX2 has vectors of half the width; SSE of a quarter, without FMA."""
    factor = {None: 1.0, "avx2": 0.5, "baseline": 0.125}.get(variant, 1.0)
    if factor == 1.0:
        return speed
    narrower = {name: factor * getattr(speed, name) for name in ("float64_flop", "float32_flop")}
    return replace(speed, **narrower, half_flop=None)
