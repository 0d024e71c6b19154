"""Stage `gradient`: backward passes through the adapted model, then one step of the optimizer.

A gradient is compared with the same backward pass in float64, relative to the error that rounding makes, as in the
stage `forward`. The optimizer's step is compared with the same step in float64 from the gradient's bytes on this
device, by a derived bound: see `optimizer_step`.

No more than one gradient exists at a time: each is digested where it was computed and written to a scratch file, and
compared from there, tensor by tensor. The model is left unchanged.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from consistency.capture.names import ADAPTER_ON, GRADIENT, UPDATED, WHOLE_MODEL, adapter_place
from consistency.capture.records import RecordStatus
from consistency.devices.backends import CPU
from consistency.errors import first_line
from consistency.numerics.digest import TensorDigest
from consistency.numerics.file_tensor import Readable, mapped
from consistency.numerics.independent_errors import independent_lines
from consistency.numerics.rounded_products import RoundedProducts
from consistency.numerics.rules import Rule
from consistency.worker import cpu_error
from consistency.worker.decisions.places import Places
from consistency.worker.decisions.replay import Made
from consistency.worker.decisions.track import Track
from consistency.worker.model import half_kernels
from consistency.worker.model.float64_reference import Reference, Tables, publish_file, wait_for
from consistency.worker.model.inputs import fixed_inputs
from consistency.worker.model.loading import load_model
from consistency.worker.model.running import activations, is_of_the_model, refusal, tokens_of
from consistency.worker.model.tensor_file import TensorFile
from consistency.worker.protocol import GRADIENT_FILE
from consistency.worker.stages.context import Context
from consistency.worker.stages.decision_flips import record_flips
from consistency.worker.stages.gradient.on_track import Again, Judged, decisions_file, judged
from consistency.worker.stages.gradient.optimizer_step import record_step
from consistency.worker.stages.gradient.runs import Runs, Watches
from consistency.worker.stages.relative_rule import record_relative, rounding_errors
from consistency.worker.training.backward import Tensors, as_model_takes, trained

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]


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
    drawn : dict
        Gradients of passes with noise on the CPU, by the name of the products, where they were asked for too.
    computed_by : str
        How the gradients were computed, where not by the device's own kernels.
    made : Made
        The decisions in them.
    track : Track or None
        Those that all workers are compared on, where these are the reference's passes.
    again : callable
        Compute the gradients once more.
    on_track : TensorFile or None
        These.
    """

    gradients: TensorFile
    digests: list[dict[str, TensorDigest]] = field(default_factory=list)
    refused: str = ""
    exact: TensorFile | None = None
    failure: str = ""
    drawn: dict[str, list[TensorFile]] = field(default_factory=dict)
    computed_by: str = ""
    made: Made = field(default_factory=Made)
    track: Track | None = None
    again: Again | None = None
    on_track: TensorFile | None = None


def run(context: Context) -> None:
    """Record the gradient of every tensor of the adapter, and the tensor after one step of the optimizer."""
    inputs, reason = fixed_inputs(context.job.case, context.base.model)
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
            what = Judged(gradients=found.gradients)
            if found.track is not None:
                record_flips(context, "gradient", found.track.flips)
            elif found.again is not None and not answer.tables.failures:
                what = judged(context, found.gradients, found.made, found.again)
            for done, name in enumerate(names):
                layer, tensor = adapter_place(context.expected[name][0])
                if context.record.wants("gradient", layer):
                    context.events.step(layer, done, len(names))
                    _judge(context, name, layer, tensor, found, what, answer)


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
    if exact:
        found.track = Track(decisions_file(context), model, cpu_error.products_on(model, CPU))

    def again(watches: Watches, places: Places) -> TensorFile:
        found.on_track = TensorFile(stem.with_suffix(".track.safetensors"), layout)
        runs.in_dtype(kernels, found.on_track, "backward, on the reference's decisions", watches=watches, places=places)
        return found.on_track

    found.again = again
    try:
        try:
            for _ in range(context.job.case.repeat):
                watches = found.made.watch if found.track is None else found.track.own
                first = not found.digests
                found.digests.append(runs.in_dtype(kernels, own if first else None, watches=watches if first else None))
        except Exception as error:  # model code of any kind may raise anything
            if not is_of_the_model(error, model):
                raise
            found.refused = _refusal(context, model, inputs, error)
        if found.track is not None and not found.refused:
            _draw(context, found, runs, kernels, stem, layout)
            wide = {name: (torch.float64, shape) for name, (_, shape) in layout.items()}
            found.exact = TensorFile(context.scratch / f"{GRADIENT_FILE}.tmp", wide)
            try:
                runs.in_float64(found.exact, found.track)
            except Exception as error:  # code that insists on its own dtype
                if not is_of_the_model(error, model):
                    raise
                found.failure = first_line(error)
        yield found
    finally:
        for file in (
            own,
            *itertools.chain(*found.drawn.values()),
            *([found.on_track] if found.on_track is not None else ()),
        ):
            file.close(remove=True)
        if found.exact is not None:
            found.exact.close()


def _draw(
    context: Context, found: Backward, runs: Runs, kernels: RoundedProducts | None, stem: Path, layout: Layout
) -> None:
    """Compute the gradients with noise, on the track, into files; of a large model over the first part of the batch."""
    numbers, track = itertools.count(), found.track
    assert track is not None
    passes = cpu_error.passes_for(3 * runs.multiplications)  # forward, and backward for inputs and factors
    if cpu_error.is_large(passes):
        runs = runs.first_part()
        layout = {name: (dtype, (1, *shape[1:])) for name, (dtype, shape) in layout.items()}

    def independent(drawn: TensorFile) -> dict[str, int]:
        counts = {}
        for name, (_, shape) in layout.items():
            gradient, own = drawn.read(name), found.gradients.read(name)
            if gradient is not None and own is not None and 0 not in shape:
                counts[name] = independent_lines(gradient, _first(own, shape[0]))
        return counts

    for title, products in cpu_error.products_of_run(context.job, runs.model).items():

        def compute(title: str = title) -> TensorFile:
            file = TensorFile(stem.with_suffix(f".{next(numbers)}.safetensors"), layout)
            found.drawn.setdefault(title, []).append(file)  # for its removal, whatever happens
            runs.with_noise(kernels, file, title, watches=functools.partial(track.other, title=title))
            return file

        cpu_error.draw(products, passes, compute, independent)


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
    if found.track is not None:
        found.track.publish()
    if exact is None:  # every worker waits for a file
        exact = TensorFile(context.scratch / f"{GRADIENT_FILE}.tmp", {})
        exact.close()
    drawn = {title: [file.read for file in files] for title, files in found.drawn.items()}
    parts = {name: _parts_drawn(found, name) for name in names}

    def truth(name: str) -> Readable | None:
        gradient = exact.read(name)
        return None if gradient is None else _first(gradient, parts[name])

    errors = rounding_errors(names, drawn, truth, independent_lines)
    for of_products in errors.values():
        for name, error in of_products.items():  # a device makes those of all parts
            gradient = exact.read(name)
            passes = parts[name] if gradient is None else gradient.shape[0]
            of_products[name] = replace(error, samples=error.samples * passes // parts[name])
    tables = Tables(
        errors=errors,
        failures={ADAPTER_ON: failure} if failure else {}, names=() if failure else tuple(exact.written),
        computed_by=found.computed_by,
    )  # fmt: skip
    return publish_file(exact.path, context.scratch / GRADIENT_FILE, tables)


def _parts_drawn(found: Backward, name: str) -> int:
    """Return over how many parts of the batch the gradients with noise are."""
    gradients = [
        gradient for files in found.drawn.values() for file in files if (gradient := file.read(name)) is not None
    ]
    return gradients[0].shape[0] if gradients else 1


def _first(gradients: Readable, parts: int) -> Readable:
    """Return the gradients over the first parts of the batch."""
    return gradients if gradients.shape[0] == parts else mapped(gradients)[:parts]


def _judge(
    context: Context, name: str, layer: str, tensor: str, found: Backward, what: Judged, reference: Reference
) -> None:
    gradient, compared = found.gradients.read(name), what.gradients.read(name)
    if gradient is None or compared is None or 0 in gradient.shape:
        lacks = gradient is None or compared is None
        reason = "no output of the model depends on it" if lacks else "it is empty: its layer has rank 0"
        for part in (GRADIENT, UPDATED):
            context.record.absent(
                "gradient", layer, f"{tensor}.{part}", status="skipped", rule=Rule.RELATIVE, reason=reason
            )  # fmt: skip
        return
    record_relative(
        context, "gradient", layer, f"{tensor}.{GRADIENT}", actual=compared,
        digests=[run[name] for run in found.digests], reference=reference, name=name, mode=ADAPTER_ON,
        computed_by=found.computed_by, decisions=what.decisions, reason=what.reason,
    )  # fmt: skip
    record_step(context, name, layer, f"{tensor}.{UPDATED}", gradient)


def _not_run(context: Context, status: RecordStatus, reason: str) -> None:
    context.record.absent("gradient", WHOLE_MODEL, ADAPTER_ON, status=status, reason=reason, rule=Rule.RELATIVE)
