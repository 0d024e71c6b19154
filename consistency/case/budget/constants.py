"""The constants of the estimates: sizes that the worker's code fixes, and measured ones of a process."""

from __future__ import annotations

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

NOISY_GRADIENTS, NOISY_LARGE_GRADIENTS, LARGE_GRADIENTS = 8, 4, 1 << 28
"""The same of gradients, and of a model with more matrix elements (`passes_for_sums` of `block_rule`)."""

CUT_STEPS = 1 << 31
"""Steps of the decompositions of one type of combination but at level thorough: the longer side of a delta squared, as
PEFT asks for full matrices, times the shorter one."""

CUT_ELEMENTS = 1 << 24
"""Elements of the largest delta that is cut: some ten float64 arrays of them are held, 128 MiB each."""
