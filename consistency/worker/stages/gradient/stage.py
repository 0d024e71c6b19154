"""Stage `gradient`: backward passes through the adapted model, then one step of the optimizer.

The loss is a sum of the model's outputs, each element with a fixed sign and one power of two as its weight. Such a loss
exists for any model; it is linear, so the gradient that enters the model is exact and the same everywhere, and only the
backward pass can be wrong, not the loss. (A mean of squares would feed the forward pass's own errors in; a
cross-entropy needs targets, and a confident model has near-zero gradients.)

A gradient is compared with the same backward pass in float64, relative to the CPU's own error, as in the stage
`forward`. The optimizer's step is compared with the same step in float64 from the gradient's bytes on this device, by a
derived bound: see `adamw`.

The model is left unchanged: gradients are returned without being stored, and the optimizer works on copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from consistency.capture.names import ADAPTER_ON, GRADIENT, UPDATED, WHOLE_MODEL, adapter_place
from consistency.capture.records import RecordStatus
from consistency.errors import first_line
from consistency.numerics.digest import TensorDigest, digest
from consistency.numerics.dtype import UNIT_ROUNDOFF
from consistency.numerics.exact import Float64Mode
from consistency.numerics.independent_errors import independent_lines
from consistency.numerics.rules import Rule
from consistency.numerics.running_error import Arithmetic
from consistency.worker import yardstick
from consistency.worker.model.float64_reference import Reference, wait_for
from consistency.worker.model.inputs import SEED, fixed_inputs
from consistency.worker.model.loading import load_model
from consistency.worker.model.running import activations, is_of_the_model, outputs, refusal, unbounded
from consistency.worker.protocol import GRADIENT_FILE
from consistency.worker.stages import adamw
from consistency.worker.stages.bound_rule import record_bounded
from consistency.worker.stages.context import Context
from consistency.worker.stages.relative_rule import publish_errors, record_relative

Tensors = dict[str, torch.Tensor]

PASSES = 4
"""Backward passes over as many parts of the batch.

The gradient of a LoRA factor of rank r has at most r independent errors, often one or two that carry all, and the
largest of so few varies widely: `rules.error_factor` allows 24 times the CPU's error for 8 samples and 32 thousand
times for 2. Passes over other sequences have independent errors. Each costs memory of the adapter's size: 8 bytes per
element where the float64 gradients are made.
"""


@dataclass(slots=True, kw_only=True)
class Backward:
    """The results of the backward passes of one model.

    Attributes
    ----------
    gradients : dict
        By parameter, on the CPU, from the first run.
    digests : dict
        One per run.
    refused : str
        Why there are none.
    exact : dict
        Float64 gradients, where they were asked for.
    failure : str
        Why there are no float64 gradients.
    others : dict
        The CPU's gradients with other products, where they were asked for too.
    """

    gradients: Tensors = field(default_factory=dict)
    digests: dict[str, list[TensorDigest]] = field(default_factory=dict)
    refused: str = ""
    exact: Tensors = field(default_factory=dict)
    failure: str = ""
    others: dict[str, Tensors] = field(default_factory=dict)


def run(context: Context) -> None:
    """Record the gradient of every tensor of the adapter, and the tensor after one step of the optimizer."""
    inputs, reason = fixed_inputs(context.job.case, context.base.model)
    reason = reason or unbounded(context.base.model)
    names = _trained(context.model, context.expected)
    if not reason and not names:
        reason = "the adapter has no floating-point tensor to train"
    if inputs is None or reason:
        _not_run(context, "skipped", reason)
        return
    on_cpu = context.device.type == "cpu"
    found = _backward(context, context.model, names, inputs, exact=context.job.makes_reference and on_cpu)
    answer: Reference | str
    if not context.job.makes_reference:
        answer = wait_for(context.scratch, context.events, GRADIENT_FILE)
    elif on_cpu:
        answer = _publish(context, found)
    else:
        answer = _publish(context, _backward(context, load_model(context.job.case, "cpu"), names, inputs, exact=True))
    if found.refused:
        _not_run(context, "skipped", found.refused)
        return
    if isinstance(answer, str):
        _not_run(context, "blocked", answer)
        return
    for name in names:
        layer, tensor = adapter_place(context.expected[name][0])
        if context.record.wants("gradient", layer):
            _judge(context, name, layer, tensor, found, answer)


def gradients(model: torch.nn.Module, names: list[str], inputs: Tensors) -> Tensors:
    """Return the gradients of a model's parameters on their device, `(passes, *shape)` each.

    A parameter that no output depends on has none.
    """
    passes = [_one_pass(model, names, part) for part in _parts(inputs)]
    return {name: torch.stack([found[name] for found in passes]) for name in passes[0]}


def _parts(inputs: Tensors) -> list[Tensors]:
    """Distribute the sequences over passes; inputs that are no batch are one."""
    sizes = {tensor.shape[:1] for tensor in inputs.values()}
    count = min(PASSES, next(iter(sizes))[0]) if len(sizes) == 1 and () not in sizes else 1
    split = {name: torch.tensor_split(tensor, count) if count > 1 else [tensor] for name, tensor in inputs.items()}
    return [{name: parts[i] for name, parts in split.items()} for i in range(count)]


def _one_pass(model: torch.nn.Module, names: list[str], inputs: Tensors) -> Tensors:
    parameters = dict(model.named_parameters())
    wanted = [parameters[name] for name in names]
    with _trainable(model, wanted), torch.enable_grad():
        _, ends = outputs(model, inputs)
        ends = {name: tensor for name, tensor in ends.items() if tensor.requires_grad}
        if not ends:
            raise ValueError("no output of the model depends on the adapter")
        found = torch.autograd.grad(
            list(ends.values()), wanted, [_weights(tensor) for tensor in ends.values()], allow_unused=True
        )
    return {name: tensor.detach() for name, tensor in zip(names, found, strict=True) if tensor is not None}


def stepped(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a parameter after the first step of the optimizer, on its device."""
    return adamw.step(parameter, gradient)


def _trained(model: torch.nn.Module, expected: dict[str, tuple[str, torch.Tensor]]) -> list[str]:
    return [name for name, p in model.named_parameters() if name in expected and p.is_floating_point()]


@contextmanager
def _trainable(model: torch.nn.Module, wanted: list[torch.nn.Parameter]) -> Iterator[None]:
    """Let gradients flow to these parameters alone, and restore that at the end."""
    kept = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in kept:
            if parameter.is_floating_point():  # torch refuses to set it on integers, which have no gradient
                parameter.requires_grad_(False)
        for parameter in wanted:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter, needed in kept:
            parameter.requires_grad_(needed)


@contextmanager
def _widened(parameters: list[torch.nn.Parameter]) -> Iterator[None]:
    """Hold parameters in float64: autograd wants a gradient of the dtype that it noted for a tensor."""
    kept = [(parameter, parameter.data) for parameter in parameters]
    try:
        for parameter, data in kept:
            parameter.data = data.to(torch.float64)
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data


def _weights(output: torch.Tensor) -> torch.Tensor:
    """Return the loss's weights of one output: random signs times the power of two nearest to 1/sqrt(elements).

    Powers of two are exact in every dtype; with these the loss is about as large as one element of the output.
    """
    generator = np.random.Generator(np.random.PCG64(SEED))
    signs = generator.integers(0, 2, size=tuple(output.shape)) * 2 - 1
    size = 2.0 ** -round(np.log2(max(1, output.numel())) / 2)
    return torch.from_numpy(signs * size).to(output.device, output.dtype)


def _backward(context: Context, model: torch.nn.Module, names: list[str], inputs: Tensors, *, exact: bool) -> Backward:
    found = Backward()
    # rounded once, before parameters are held in float64: the model casts its inputs to their dtype
    dtype = next(model.parameters()).dtype
    inputs = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}
    context.events.step("backward", 0, 2)
    try:
        for _ in range(context.job.case.repeat):
            here = gradients(model, names, inputs)
            for name, tensor in here.items():
                found.digests.setdefault(name, []).append(digest(tensor))
            found.gradients = found.gradients or {name: tensor.to("cpu") for name, tensor in here.items()}
    except Exception as error:  # model code of any kind may raise anything
        if not is_of_the_model(error, model):
            raise
        found.refused = _refusal(context, model, inputs, error)
        return found
    if exact:
        for title, products in yardstick.others_of_run(context.job, model).items():
            context.events.step(f"backward, {title}", 1, 2)
            with yardstick.computing_with(products):
                found_with = gradients(model, names, inputs)
            found.others[title] = {name: tensor.to("cpu") for name, tensor in found_with.items()}
        context.events.step("backward, float64", 1, 2)
        try:
            with _widened([model.get_parameter(name) for name in names]), Float64Mode():
                truth = gradients(model, names, inputs)
            found.exact = {name: tensor.to(torch.float64) for name, tensor in truth.items()}
        except Exception as error:  # code that insists on its own dtype
            if not is_of_the_model(error, model):
                raise
            found.failure = first_line(error)
    return found


def _refusal(context: Context, model: torch.nn.Module, inputs: Tensors, error: Exception) -> str:
    """Distinguish a model that does not run on the inputs from one without a backward pass."""
    try:
        activations(model, inputs)
    except Exception as failure:  # model code of any kind may raise anything
        if not is_of_the_model(failure, model):
            raise
        return refusal(context.job.case, failure)
    return f"the backward pass of this model fails: {first_line(error)}"


def _publish(context: Context, found: Backward) -> Reference:
    failure = found.refused or found.failure
    return publish_errors(
        context, found.gradients, found.exact, samples=independent_lines,
        failures={ADAPTER_ON: failure} if failure else {}, others=found.others, file=GRADIENT_FILE,
    )  # fmt: skip


def _judge(context: Context, name: str, layer: str, tensor: str, found: Backward, reference: Reference) -> None:
    gradient = found.gradients.get(name)
    if gradient is None:
        for what in (GRADIENT, UPDATED):
            context.record.absent(
                "gradient", layer, f"{tensor}.{what}", status="skipped", rule=Rule.RELATIVE,
                reason="no output of the model depends on it",
            )  # fmt: skip
        return
    record_relative(
        context, "gradient", layer, f"{tensor}.{GRADIENT}", actual=gradient, digests=found.digests[name],
        reference=reference, name=name, exact_name=name, mode=ADAPTER_ON,
    )  # fmt: skip
    _step(context, name, layer, f"{tensor}.{UPDATED}", gradient)


def _step(context: Context, name: str, layer: str, tensor: str, gradient: torch.Tensor) -> None:
    """Record a parameter after the optimizer's step, given the gradient that this device computed."""
    parameter = context.model.get_parameter(name)
    if parameter.dtype not in UNIT_ROUNDOFF or not bool(torch.isfinite(gradient).all()):
        context.record.absent(
            "gradient", layer, tensor, status="skipped", rule=Rule.BOUND,
            reason=f"no bound for the step of a {parameter.dtype} parameter, or by a gradient that is not finite",
        )  # fmt: skip
        return
    gradient = gradient.sum(0)  # of the whole batch
    on_device = gradient.to(parameter.device)
    results = [stepped(parameter, on_device) for _ in range(context.job.case.repeat)]
    actual, before = results[0].to("cpu"), parameter.detach().to("cpu")
    by = Arithmetic.of(parameter.dtype)
    exact = adamw.exact_step(*(by.known(t.to(torch.float64).numpy()) for t in (before, gradient)))
    record_bounded(
        context.record, "gradient", layer, tensor, actual=actual, exact=exact, base=before,
        digests=[digest(result) for result in results],
    )  # fmt: skip


def _not_run(context: Context, status: RecordStatus, reason: str) -> None:
    context.record.absent("gradient", WHOLE_MODEL, ADAPTER_ON, status=status, reason=reason, rule=Rule.RELATIVE)
