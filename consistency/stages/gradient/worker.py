"""Stage `gradient`: a backward pass through the adapted model, block by block, then one step of the optimizer.

As in the stage `forward`, each block computes on values that are the same for every device: what enters it, and the
gradient that comes in from above, both of a float64 pass on the CPU and rounded to the tested dtype
(`worker/model/block_backward.py`). The gradients of what enters each block, and of every tensor of the adapter, are
judged by the `block` rule. The optimizer's step is compared with the same step in float64 from the gradient's bytes on
this device, by a derived bound: see `optimizer_step`. The model is left unchanged.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from consistency.capture.names import (
    ADAPTER_ON,
    ATTENTION,
    GRADIENT,
    NO_OUTPUT,
    UPDATED,
    WHOLE_MODEL,
    adapter_place,
)
from consistency.capture.records import TensorRecord
from consistency.devices.backends import CPU
from consistency.errors import first_line
from consistency.numerics.digest import TensorDigest, digest
from consistency.numerics.rounded_products import RoundedProducts
from consistency.numerics.rules import Rule
from consistency.stages.gradient import passes
from consistency.stages.gradient.optimizer_step import record_step
from consistency.worker import cpu_error
from consistency.worker.attention_kernels import AttentionKernels
from consistency.worker.context import Context
from consistency.worker.decisions.replay import Replay
from consistency.worker.decisions.track import Track
from consistency.worker.judging.block_rule import (
    NOT_REPLAYED,
    computed_again,
    record_block,
    record_flips,
    record_given,
    record_missed,
)
from consistency.worker.judging.gradients import (
    ExactGradients,
    Gradients,
    backward_of,
    from_end_to_end,
    in_float64,
    on_what_is_given,
    row_of,
    with_noise,
)
from consistency.worker.model import half_kernels
from consistency.worker.model.block_backward import Backward
from consistency.worker.model.call_trace import Saw
from consistency.worker.model.float64_reference import Reference, publish, wait_for
from consistency.worker.model.inputs import fixed_inputs
from consistency.worker.model.loading import load_model
from consistency.worker.model.running import activations, model_code, refusal, tokens_of
from consistency.worker.protocol import DECISIONS_FILE, GRADIENT_FILE
from consistency.worker.recorder import Skip
from consistency.worker.training.backward import trained


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeviceGradients:
    """The gradients that this device computed, and how it computed them."""

    gradients: Gradients
    """Gradients of the first run, by name."""
    digests: dict[str, list[TensorDigest]]
    """Digests of each gradient, one per run."""
    replay: Replay
    """The decisions of the exact pass, as the first run followed them."""
    attention: AttentionKernels
    kernels: RoundedProducts | None
    """What multiplied in place of slow kernels; None where the device's own did."""


def run(context: Context) -> None:
    """Record the gradients by blocks, and every tensor of the adapter after one step of the optimizer."""
    inputs, reason = fixed_inputs(context.job.case, context.base.model)
    names = trained(context.model, context.expected)
    if not reason and not names:
        reason = "the adapter has no floating-point tensor to train"
    if inputs is None or reason:
        raise Skip(reason)
    reference: Reference | str
    if context.job.makes_reference:
        on_cpu = context.device.type == CPU
        with nullcontext() if on_cpu else context.events.on_cpu():
            twin = context.model
            if not on_cpu:
                twin = load_model(context.job.case, CPU)
            reference = _make_reference(context, backward_of(twin, names, inputs, began=context.events.block))
    else:
        reference = wait_for(context.scratch, context.events, GRADIENT_FILE)
    if isinstance(reference, str):
        raise Skip(reference, status="blocked")
    _judge(context, backward_of(context.model, names, inputs, began=context.events.block), reference)


def _judge(context: Context, backward: Backward, reference: Reference) -> None:
    """Compute the gradients on this device, and record them and the parameters after one step of the optimizer."""
    computation = _compute(context, backward, reference)
    if not reference.tables.failures and context.record.wants("gradient", WHOLE_MODEL):
        record_given(context, "gradient", GRADIENT, reference)
    if not_called := computation.attention.never_called():
        context.record.fact("gradient", WHOLE_MODEL, ATTENTION, status="skipped", reason=not_called)
    _record_gradients(context, backward, reference, computation)
    record_flips(context, "gradient", computation.replay.flips)
    _record_steps(context, backward, computation.gradients)


def _compute(context: Context, backward: Backward, reference: Reference) -> _DeviceGradients:
    """Run the backward pass on this device as often as the case asks; keep the gradients of the first run."""
    kernels = half_kernels.replacement(backward.model, tokens_of(backward.inputs))
    replay = Replay(decisions_file(context), context.model, cpu_error.products_on(context.model, context.device))
    digests: dict[str, list[TensorDigest]] = {}
    first_run: Gradients = {}
    attention = AttentionKernels()
    repeats = context.job.case.repeat
    for repeat in range(repeats):
        # flips of the first run alone are recorded: later runs only have to repeat its bits
        followed = replay if repeat == 0 else _unrecorded_replay(context)
        with (
            context.events.passes(passes.DEVICE),
            half_kernels.computing(kernels),
            attention.following(backward.model),
            model_code(backward.model, says=functools.partial(_refusal, context, backward)),
        ):
            context.events.step(passes.DEVICE, repeat, repeats)
            gradients = gradients_of(backward, reference, followed)
        # later runs only have to repeat its bits: their gradients are not kept
        first_run = first_run or gradients
        for name, gradient in gradients.items():
            digests.setdefault(name, []).append(digest(gradient))
    return _DeviceGradients(gradients=first_run, digests=digests, replay=replay, attention=attention, kernels=kernels)


def _record_gradients(
    context: Context, backward: Backward, reference: Reference, computation: _DeviceGradients
) -> None:
    """Record every gradient by the `block` rule, and trace one that is outside to an operation of its block."""
    kernels, attention = computation.kernels, computation.attention
    not_replayed = "" if computation.replay.is_complete() else NOT_REPLAYED
    reason = reference.tables.failures.get(ADAPTER_ON, not_replayed)

    def compute_again(saw: Saw) -> None:
        on_what_is_given(
            backward,
            reference,
            _unrecorded_replay(context),
            lambda name, gradient: saw(name, computed(name, gradient)),
        )

    # the gradient of what left a block is made by what is outside of it: no block traces it
    names_by_row = {row_of(context, name): name for name in computation.gradients if "::output" not in name}
    tracing = computed_again(context, names_by_row, compute_again, lambda: half_kernels.computing(kernels))
    with context.record.tracing(tracing):
        for name, gradient in computation.gradients.items():
            layer, tensor = row_of(context, name)
            if not context.record.wants("gradient", layer) or 0 in gradient.shape:
                continue
            # a gradient without an exact value is left to the comparison of workers, if it is one of the adapter
            if name not in backward.parameters and not _has_exact_value(reference, name):
                continue
            if missed := attention.missed(layer):
                record_missed(context, "gradient", (layer, tensor), gradient.dtype, missed)
                continue
            row = TensorRecord(
                "gradient",
                layer,
                tensor,
                rule=Rule.BLOCK,
                status="measured",
                reason=reason or None,
                evidence={**half_kernels.evidence(kernels), **attention.evidence(layer)},
            )
            record_block(context, row, gradient, digests=computation.digests[name], reference=reference, name=name)


def _has_exact_value(reference: Reference, name: str) -> bool:
    return not reference.tables.failures and reference.read(name) is not None


def _record_steps(context: Context, backward: Backward, gradients: Gradients) -> None:
    """Record each parameter of the adapter after one step of the optimizer, or why it has none."""
    for done, name in enumerate(backward.parameters):
        layer, tensor = adapter_place(context.expected[name][0])
        if not context.record.wants("gradient", layer):
            continue
        with context.events.passes(passes.STEPS):
            context.events.step(layer, done, len(backward.parameters))
        if name not in gradients:
            reason = NO_OUTPUT
        elif 0 in gradients[name].shape:
            reason = "it is empty: its layer has rank 0"
        else:
            record_step(context, name, layer, f"{tensor}.{UPDATED}", gradients[name])
            continue
        context.record.skipped("gradient", reason, f"{tensor}.{GRADIENT}", f"{tensor}.{UPDATED}", layer=layer)


def _unrecorded_replay(context: Context) -> Replay:
    """Return the decisions of the exact pass, for a run whose flips are not recorded."""
    return Replay(decisions_file(context), context.model, "")


def computed(name: str, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - for a planted fault to choose by
    """Return a gradient as this device computed it: planted faults replace this function."""
    return gradient


def gradients_of(backward: Backward, reference: Reference, replay: Replay) -> Gradients:
    """Return the gradients on this device: by blocks, or from end to end where the reference gives no block inputs."""
    if reference.tables.failures:
        return from_end_to_end(backward, computed)
    return on_what_is_given(backward, reference, replay, computed)


def _make_reference(context: Context, backward: Backward) -> Reference:
    """Compute the reference of all workers on the CPU, exactly and with noise; publish it where others read it.

    Where the model does not run in float64 or with noise, the reference has no gradients, and its tables say why.
    """
    track = Track(decisions_file(context))
    exact, drawn = ExactGradients(), {}
    failure = ""
    try:
        # the model's code may insist on its own dtype, and refuse float64
        with model_code(backward.model, says=functools.partial(_refusal, context, backward)):
            with context.events.passes(passes.EXACT):
                context.events.step(passes.EXACT, 0, 1)
                exact = in_float64(backward, track)
            with context.events.passes(passes.NOISE):
                drawn = with_noise(context, backward, exact, track)
    except Skip as refused:
        failure, exact = str(refused), ExactGradients()
    track.publish()
    tensors, tables = exact.tensors_with(drawn, backward.parameters)
    if failure:
        tables = msgspec.structs.replace(tables, failures={ADAPTER_ON: failure})
    # a soak reads it from the file again; where nobody does, none is written
    if context.job.others_wait or context.job.case.soak_s is not None:
        publish(context.scratch, tensors, tables, GRADIENT_FILE)
    return Reference(path=context.scratch / GRADIENT_FILE, tables=tables, in_memory=tensors)


def _refusal(context: Context, backward: Backward, error: Exception) -> str:
    """Return why a backward pass failed: the model does not run on the inputs, or it has no backward pass."""
    try:
        with model_code(backward.model, says=lambda cause: refusal(context.job.case, cause, backward.model)):
            activations(backward.model, backward.inputs)
    except Skip as refused:
        return str(refused)
    return f"the backward pass of this model fails: {first_line(error)}"


def decisions_file(context: Context) -> Path:
    """Return the path of the file with the decisions of the exact pass."""
    return context.scratch / DECISIONS_FILE.format("gradient")
