"""Stage `gradient`: backward passes through the adapted model, then one step of the optimizer.

A gradient is compared with the same backward pass in float64, relative to the CPU's own error, as in the stage
`forward`. The optimizer's step is compared with the same step in float64 from the gradient's bytes on this device, by a
derived bound: see `optimizer_step`.

No more than one gradient exists at a time: each is digested where it was computed and written to a scratch file, and
compared from there, tensor by tensor. The model is left unchanged.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from consistency.capture.names import ADAPTER_ON, GRADIENT, UPDATED, WHOLE_MODEL, adapter_place
from consistency.capture.records import RecordStatus
from consistency.errors import first_line
from consistency.numerics.digest import TensorDigest, block_digests, combine
from consistency.numerics.dtype import name_of
from consistency.numerics.independent_errors import independent_lines
from consistency.numerics.rounded_products import RoundedProducts
from consistency.numerics.rules import Rule
from consistency.worker import yardstick
from consistency.worker.model import half_kernels
from consistency.worker.model.blocks import RecomputationError
from consistency.worker.model.float64_reference import Reference, publish_file, wait_for
from consistency.worker.model.inputs import fixed_inputs
from consistency.worker.model.loading import load_model
from consistency.worker.model.running import activations, is_of_the_model, refusal, tokens_of, unbounded
from consistency.worker.model.tensor_file import TensorFile
from consistency.worker.protocol import GRADIENT_FILE
from consistency.worker.stages.context import Context
from consistency.worker.stages.gradient.backward import ONE_PASS, Tensors, backward, parts_of, trained
from consistency.worker.stages.gradient.optimizer_step import record_step
from consistency.worker.stages.relative_rule import own_errors, record_relative

Blocks = dict[str, tuple[int, ...]]


@dataclass(slots=True, kw_only=True)
class Backward:
    """The results of the backward passes of one model.

    Attributes
    ----------
    gradients : TensorFile
        `(passes, *shape)` by parameter, from the first run; see `ONE_PASS`.
    digests : list of dict
        By parameter, one for each run.
    refused : str
        Why there are none.
    exact : TensorFile or None
        Float64 gradients, where they were asked for.
    failure : str
        Why there are no float64 gradients.
    others : dict
        The CPU's gradients with other products, where they were asked for too.
    computed_by : str
        How the gradients were computed, where not by the device's own kernels.
    """

    gradients: TensorFile
    digests: list[dict[str, TensorDigest]] = field(default_factory=list)
    refused: str = ""
    exact: TensorFile | None = None
    failure: str = ""
    others: dict[str, TensorFile] = field(default_factory=dict)
    computed_by: str = ""


def run(context: Context) -> None:
    """Record the gradient of every tensor of the adapter, and the tensor after one step of the optimizer."""
    inputs, reason = fixed_inputs(context.job.case, context.base.model)
    reason = reason or unbounded(context.base.model)
    names = trained(context.model, context.expected)
    if not reason and not names:
        reason = "the adapter has no floating-point tensor to train"
    if inputs is None or reason:
        _not_run(context, "skipped", reason)
        return
    on_cpu, makes = context.device.type == "cpu", context.job.makes_reference
    with _backward(context, context.model, names, inputs, exact=makes and on_cpu) as found:
        answer: Reference | str
        if not makes:
            answer = wait_for(context.scratch, context.events, GRADIENT_FILE)
        elif on_cpu:
            answer = _publish(context, found, names)
        else:
            with (
                context.events.on_cpu(),
                _backward(context, load_model(context.job.case, "cpu"), names, inputs, exact=True) as reference,
            ):
                answer = _publish(context, reference, names)
        if found.refused:
            _not_run(context, "skipped", found.refused)
        elif isinstance(answer, str):
            _not_run(context, "blocked", answer)
        else:
            for done, name in enumerate(names):
                layer, tensor = adapter_place(context.expected[name][0])
                if context.record.wants("gradient", layer):
                    context.events.step(layer, done, len(names))
                    _judge(context, name, layer, tensor, found, answer)


def computed(name: str, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - for a planted fault to choose by
    """Return a gradient as this device computed it."""
    return gradient


@contextmanager
def _backward(
    context: Context, model: torch.nn.Module, names: list[str], inputs: Tensors, *, exact: bool
) -> Iterator[Backward]:
    """Yield the gradients of a model; their files are removed at the end, but a published one."""
    # rounded once, before float64: the model casts its inputs to its own dtype
    inputs = as_model_takes(model, inputs)
    runs = Runs(context, model, names, inputs)
    layout = {name: (p.dtype, (runs.counts[name], *p.shape)) for name, p in runs.parameters.items()}
    stem = context.scratch / f"gradients-{os.getpid()}-{id(model)}"  # the folder is all workers'
    own = TensorFile(stem.with_suffix(".safetensors"), layout)
    kernels = half_kernels.replacement(model, tokens_of(inputs))
    found = Backward(gradients=own, computed_by=half_kernels.described(kernels))
    try:
        try:
            for _ in range(context.job.case.repeat):
                found.digests.append(runs.in_dtype(kernels, None if found.digests else own))
        except Exception as error:  # model code of any kind may raise anything
            if not is_of_the_model(error, model):
                raise
            found.refused = _refusal(context, model, inputs, error)
        if exact and not found.refused:
            for number, (title, products) in enumerate(yardstick.others_of_run(context.job, model).items()):
                found.others[title] = TensorFile(stem.with_suffix(f".{number}.safetensors"), layout)
                with yardstick.computing_with(products):
                    runs.in_dtype(None, found.others[title], title)
            wide = {name: (torch.float64, shape) for name, (_, shape) in layout.items()}
            found.exact = TensorFile(context.scratch / f"{GRADIENT_FILE}.tmp", wide)
            try:
                runs.in_float64(found.exact)
            except Exception as error:  # code that insists on its own dtype
                if not is_of_the_model(error, model):
                    raise
                found.failure = first_line(error)
        yield found
    finally:
        for file in (own, *found.others.values()):
            file.close(remove=True)
        if found.exact is not None:
            found.exact.close()


def as_model_takes(model: torch.nn.Module, inputs: Tensors) -> Tensors:
    """Return the inputs with floating-point ones in the model's dtype."""
    dtype = next(model.parameters()).dtype
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}


class Into(Protocol):
    """Takes the gradients of each pass, on the CPU."""

    def write(self, name: str, index: int, tensor: torch.Tensor) -> None: ...


class Runs:
    """Backward passes of one model over the parts of a batch.

    Attributes
    ----------
    parameters : dict
        By name.
    counts : dict
        Number of passes that give a parameter's gradient, by name.
    """

    def __init__(
        self, context: Context, model: torch.nn.Module, names: list[str], inputs: Tensors, *, tells: bool = True
    ) -> None:
        self._events = context.events if tells else None
        self._model = model
        self._passes = parts_of(inputs, rows=context.job.case.fit.micro_batch)
        self._recompute = True
        self.parameters = {name: model.get_parameter(name) for name in names}
        self.counts = {n: 1 if p.numel() >= ONE_PASS else len(self._passes) for n, p in self.parameters.items()}

    def in_dtype(
        self, kernels: RoundedProducts | None, into: Into | None, products: str = ""
    ) -> dict[str, TensorDigest]:
        """Compute the gradients in the model's dtype, write them into a file where one is given, and digest them."""
        blocks: list[Blocks] = [{} for _ in self._passes]
        kinds: dict[str, tuple[torch.dtype, torch.Size]] = {}

        def take(index: int, name: str, gradient: torch.Tensor) -> None:
            gradient = computed(name, gradient)
            kinds[name] = gradient.dtype, gradient.shape
            blocks[index][name] = block_digests(gradient)
            if into is not None:
                into.write(name, index, gradient.to("cpu").contiguous())

        with half_kernels.computing(kernels):
            self._run(f"backward, {products}" if products else "backward", take)
        return {
            name: combine(
                name_of(dtype), (self.counts[name], *shape), tuple(b for part in blocks for b in part.get(name, ()))
            )
            for name, (dtype, shape) in kinds.items()
        }

    def in_float64(self, into: TensorFile) -> None:
        """Compute the exact gradients, and write them into a file."""

        def take(index: int, name: str, gradient: torch.Tensor) -> None:
            into.write(name, index, gradient.to(torch.float64).contiguous())

        self._run("backward, float64", take, exact=True)

    def _run(self, label: str, take: Callable[[int, str, torch.Tensor], None], *, exact: bool = False) -> None:
        for index, part in enumerate(self._passes):
            if self._events is not None:
                self._events.step(label, index, len(self._passes))
            hand_over = functools.partial(take, index)
            names = [name for name, count in self.counts.items() if index < count]
            if not names:
                break
            try:
                backward(self._model, names, part, hand_over, recompute=self._recompute, exact=exact)
            except RecomputationError:
                self._recompute = False
                backward(self._model, names, part, hand_over, recompute=False, exact=exact)


def _refusal(context: Context, model: torch.nn.Module, inputs: Tensors, error: Exception) -> str:
    """Distinguish a model that does not run on the inputs from one without a backward pass."""
    try:
        activations(model, inputs)
    except Exception as failure:  # model code of any kind may raise anything
        if not is_of_the_model(failure, model):
            raise
        return refusal(context.job.case, failure)
    return f"the backward pass of this model fails: {first_line(error)}"


def _publish(context: Context, found: Backward, names: list[str]) -> Reference:
    failure, exact = found.refused or found.failure, found.exact
    if exact is None:  # every worker waits for a file
        exact = TensorFile(context.scratch / f"{GRADIENT_FILE}.tmp", {})
        exact.close()
    tables = own_errors(
        names, found.gradients.read, exact.read, samples=independent_lines,
        failures={ADAPTER_ON: failure} if failure else {}, known=() if failure else exact.written,
        others={title: file.read for title, file in found.others.items()}, computed_by=found.computed_by,
    )  # fmt: skip
    return publish_file(exact.path, context.scratch / GRADIENT_FILE, tables)


def _judge(context: Context, name: str, layer: str, tensor: str, found: Backward, reference: Reference) -> None:
    gradient = found.gradients.read(name)
    if gradient is None:
        for what in (GRADIENT, UPDATED):
            context.record.absent(
                "gradient", layer, f"{tensor}.{what}", status="skipped", rule=Rule.RELATIVE,
                reason="no output of the model depends on it",
            )  # fmt: skip
        return
    record_relative(
        context, "gradient", layer, f"{tensor}.{GRADIENT}", actual=gradient,
        digests=[run[name] for run in found.digests], reference=reference, name=name, exact_name=name, mode=ADAPTER_ON,
        computed_by=found.computed_by,
    )  # fmt: skip
    record_step(context, name, layer, f"{tensor}.{UPDATED}", gradient)


def _not_run(context: Context, status: RecordStatus, reason: str) -> None:
    context.record.absent("gradient", WHOLE_MODEL, ADAPTER_ON, status=status, reason=reason, rule=Rule.RELATIVE)
