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


def run(context: Context) -> None:
    """Record the gradients by blocks, and every tensor of the adapter after one step of the optimizer."""
    inputs, reason = fixed_inputs(context.job.case, context.base.model)
    names = trained(context.model, context.expected)
    if not reason and not names:
        reason = "the adapter has no floating-point tensor to train"
    if inputs is None or reason:
        raise Skip(reason)
    answer: Reference | str
    if context.job.makes_reference:
        on_cpu = context.device.type == CPU
        with nullcontext() if on_cpu else context.events.on_cpu():
            twin = context.model if on_cpu else load_model(context.job.case, CPU)
            answer = _make(context, backward_of(twin, names, inputs, began=context.events.block))
    else:
        answer = wait_for(context.scratch, context.events, GRADIENT_FILE)
    if isinstance(answer, str):
        raise Skip(answer, status="blocked")
    _judge(context, backward_of(context.model, names, inputs, began=context.events.block), answer)


def _judge(context: Context, of: Backward, answer: Reference) -> None:
    """Compute the gradients, and record them and the step."""
    kernels = half_kernels.replacement(of.model, tokens_of(of.inputs))
    replay = Replay(decisions_file(context), context.model, cpu_error.products_on(context.model, context.device))
    digests: dict[str, list[TensorDigest]] = {}
    found: Gradients = {}
    attention = AttentionKernels()
    repeats = context.job.case.repeat
    for repeat in range(repeats):
        follows = replay if not repeat else Replay(decisions_file(context), context.model, "")
        refuses = model_code(of.model, says=functools.partial(_refusal, context, of))
        with (
            context.events.passes(passes.DEVICE),
            half_kernels.computing(kernels),
            attention.following(of.model),
            refuses,
        ):
            context.events.step(passes.DEVICE, repeat, repeats)
            again = gradients_of(of, answer, follows)
        found = found or again
        for name, gradient in again.items():
            digests.setdefault(name, []).append(digest(gradient))
    if not answer.tables.failures and context.record.wants("gradient", WHOLE_MODEL):
        record_given(context, "gradient", GRADIENT, answer)
    reason = answer.tables.failures.get(ADAPTER_ON, "" if replay.is_complete() else NOT_REPLAYED)
    if why := attention.never_called():
        context.record.fact("gradient", WHOLE_MODEL, ATTENTION, status="skipped", reason=why)

    def once_more(saw: Saw) -> None:
        follows = Replay(decisions_file(context), context.model, "")
        on_what_is_given(of, answer, follows, lambda name, gradient: saw(name, computed(name, gradient)))

    made = {row_of(context, name): name for name in found if "::output" not in name}
    with context.record.tracing(computed_again(context, made, once_more, lambda: half_kernels.computing(kernels))):
        for name, gradient in found.items():
            layer, tensor = row_of(context, name)
            if not context.record.wants("gradient", layer) or 0 in gradient.shape:
                continue
            if name not in of.wanted and (answer.tables.failures or answer.read(name) is None):
                continue
            if why := attention.missed(layer):
                record_missed(context, "gradient", (layer, tensor), gradient.dtype, why)
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
            record_block(context, row, gradient, digests=digests[name], reference=answer, name=name)
    record_flips(context, "gradient", replay.flips)
    for done, name in enumerate(of.wanted):
        layer, tensor = adapter_place(context.expected[name][0])
        if not context.record.wants("gradient", layer):
            continue
        with context.events.passes(passes.STEPS):
            context.events.step(layer, done, len(of.wanted))
        if name in found and 0 not in found[name].shape:
            record_step(context, name, layer, f"{tensor}.{UPDATED}", found[name])
            continue
        reason = "it is empty: its layer has rank 0" if name in found else NO_OUTPUT
        context.record.skipped("gradient", reason, f"{tensor}.{GRADIENT}", f"{tensor}.{UPDATED}", layer=layer)


def computed(name: str, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - for a planted fault to choose by
    """Return a gradient as this device computed it."""
    return gradient


def gradients_of(of: Backward, answer: Reference, replay: Replay) -> Gradients:
    """Return the gradients on the device that is checked; from end to end where nothing is given."""
    if answer.tables.failures:
        return from_end_to_end(of, computed)
    return on_what_is_given(of, answer, replay, computed)


def _make(context: Context, of: Backward) -> Reference:
    """Compute what all workers are judged by on the CPU, with and without noise, and publish it."""
    track, failure, exact, drawn = Track(decisions_file(context)), "", ExactGradients(), {}
    try:
        with model_code(of.model, says=functools.partial(_refusal, context, of)):  # code may insist on its own dtype
            with context.events.passes(passes.EXACT):
                context.events.step(passes.EXACT, 0, 1)
                exact = in_float64(of, track)
            with context.events.passes(passes.NOISE):
                drawn = with_noise(context, of, exact, track)
    except Skip as refused:
        failure, exact = str(refused), ExactGradients()
    track.publish()
    tensors, tables = exact.tensors_with(drawn, of.wanted)
    if failure:
        tables = msgspec.structs.replace(tables, failures={ADAPTER_ON: failure})
    if context.job.others_wait or context.job.case.soak_s is not None:
        publish(context.scratch, tensors, tables, GRADIENT_FILE)
    return Reference(path=context.scratch / GRADIENT_FILE, tables=tables, made=tensors)


def _refusal(context: Context, of: Backward, error: Exception) -> str:
    """Distinguish a model that does not run on the inputs from one without a backward pass."""
    try:
        with model_code(of.model, says=functools.partial(refusal, context.job.case)):
            activations(of.model, of.inputs)
    except Skip as refused:
        return str(refused)
    return f"the backward pass of this model fails: {first_line(error)}"


def decisions_file(context: Context) -> Path:
    """Return the file of the track."""
    return context.scratch / DECISIONS_FILE.format("gradient")
