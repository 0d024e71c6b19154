"""Gradients by blocks, of all stages that go back: in float64, with noise, and on the device that is checked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from consistency.capture.names import ADAPTER_ON, GRADIENT, adapter_place
from consistency.case.budget.costs import MOST_PASSES
from consistency.devices.backends import CPU
from consistency.numerics.dtype import UNIT_ROUNDOFF
from consistency.numerics.exact import Float64Mode
from consistency.worker.context import Context
from consistency.worker.decisions.replay import Replay, deciding
from consistency.worker.decisions.track import Track
from consistency.worker.judging.block_rule import draw, limits_of, named_factors, passes_for_sums, spreads
from consistency.worker.model import half_kernels
from consistency.worker.model.block_backward import Backward, Crossing, Sections, backward_by_blocks
from consistency.worker.model.block_pass import BlockBegan, ResultPlace, no_listener, rounded
from consistency.worker.model.float64_reference import Reference, Tables, given_name
from consistency.worker.model.running import tokens_of
from consistency.worker.quantized.exact import exact_layers
from consistency.worker.training.backward import Tensors, as_model_takes, of_outputs, trainable

Gradients = dict[str, torch.Tensor]
"""Gradients on the CPU: of parameters by name, of tensors that enter or leave blocks by the names of the places."""

Parameters = Mapping[str, torch.nn.Parameter]


def backward_of(
    model: torch.nn.Module, names: list[str], inputs: Tensors, *, began: BlockBegan = no_listener
) -> Backward:
    """Return the backward pass over all inputs, which are rounded once: the model casts them to its own dtype."""
    parameters = {name: model.get_parameter(name) for name in names}
    return Backward(
        model=model, parameters=parameters, inputs=as_model_takes(model, inputs), loss=of_outputs, began=began
    )


def row_of(context: Context, name: str) -> tuple[str, str]:
    """Return layer and tensor of a gradient."""
    if "::" in name:
        place = ResultPlace.of(name)
        return place.layer, place.part
    layer, tensor = adapter_place(context.expected[name][0])
    return layer, f"{tensor}.{GRADIENT}"


@dataclass(slots=True, kw_only=True)
class ExactGradients:
    """The results of a float64 backward pass.

    Attributes
    ----------
    gradients : dict of str to torch.Tensor
        Its exact gradients.
    given : dict of str to torch.Tensor
        Values and gradients at the borders of blocks, rounded to the tested dtype, on which other passes compute.
    """

    gradients: Gradients = field(default_factory=dict)
    given: Tensors = field(default_factory=dict)

    def tensors_with(self, drawn: Mapping[str, list[Gradients]], parameters: Parameters) -> tuple[Tensors, Tables]:
        """Return the tensors and tables to publish: these, and the spread of rounding errors in noisy passes."""
        reads = {title: [gradients.get for gradients in passes] for title, passes in drawn.items()}
        found = spreads(reads, self.gradients, sums=parameters)
        tensors = {**self.gradients, **self.given, **named_factors(found)}
        return tensors, Tables(failures={}, names=tuple(tensors), limits=limits_of(found))


def in_float64(backward: Backward, track: Track) -> ExactGradients:
    """Compute the exact gradients, on values and gradients that the pass rounds itself."""
    dtypes = (parameter.dtype for parameter in backward.model.parameters())
    dtype = next(dtype for dtype in dtypes if dtype in UNIT_ROUNDOFF)
    exact, sections = ExactGradients(), Sections(track.exact)

    def round_and_keep(mode: str, name: str, value: torch.Tensor) -> torch.Tensor:
        given = exact.given[given_name(mode, name)] = rounded(value, dtype).to(CPU)
        return given.to(value.dtype)

    def take(name: str, gradient: torch.Tensor) -> None:
        exact.gradients[name] = gradient.detach().to(CPU, torch.float64).contiguous()

    with (
        trainable(backward.model, backward.parameters.values()),
        computing_exactly(backward),
        deciding(sections, gradient=True),
    ):
        crossing = Crossing(
            given=functools.partial(round_and_keep, ADAPTER_ON),
            come_in=functools.partial(round_and_keep, GRADIENT),
        )
        backward_by_blocks(backward, crossing, take, sections)
    return exact


def with_noise(
    context: Context, backward: Backward, exact: ExactGradients, track: Track, *, most: int = MOST_PASSES
) -> dict[str, list[Gradients]]:
    """Compute the gradients of noisy passes, on the exact pass's values, gradients and decisions, by title."""
    kernels = half_kernels.replacement(backward.model, tokens_of(backward.inputs))
    reference = Reference.of_this_process(exact.given)

    def compute(title: str) -> Gradients:
        sections = Sections(functools.partial(track.other, title=title))
        with half_kernels.computing(kernels), deciding(sections if track.decides else None, gradient=True):
            return _gradients(backward, as_it_is, reference, sections)

    return draw(context, backward.model, compute, noise_passes(context, backward, most=most))


def noise_passes(context: Context, backward: Backward, *, most: int = MOST_PASSES) -> int:
    """Return the number of noisy passes to compute for the products of each worker."""
    return min(most, passes_for_sums(context, backward.model))


Computed = Callable[[str, torch.Tensor], torch.Tensor]
"""Called with the name of a gradient and its value as the device computed it; a planted fault returns another one."""


def crossing_by(reference: Reference) -> Crossing:
    """Return the values and gradients of a reference for passes by blocks."""
    return Crossing(
        given=functools.partial(reference.given_value, ADAPTER_ON),
        incoming=functools.partial(reference.incoming, GRADIENT),
    )


def on_what_is_given(backward: Backward, reference: Reference, replay: Replay, computed: Computed) -> Gradients:
    """Return the gradients by blocks on a reference's values and gradients, with its decisions."""
    sections = Sections(replay.watch_if_any)
    with deciding(sections if replay.decides else None, gradient=True, places=replay.places):
        return _gradients(backward, computed, reference, sections)


def from_end_to_end(
    backward: Backward, computed: Computed, *, exact: bool = False, watch: Callable[[str], None] | None = None
) -> Gradients:
    """Return the gradients of the parameters on the model's own values, in its dtype or in float64.

    `watch` gets the name of each operation that decides.
    """
    watched = None if watch is None else lambda decision: watch(decision.name)
    computing = computing_exactly(backward) if exact else nullcontext()
    with computing, deciding(watched, gradient=True):
        gradients = _gradients(backward, computed)
    return {name: gradient for name, gradient in gradients.items() if name in backward.parameters}


@contextmanager
def computing_exactly(backward: Backward) -> Iterator[None]:
    """Compute in float64, gradients of parameters too."""
    mode = Float64Mode()
    with exact_layers(backward.model), mode.with_gradients(backward.parameters.values()), mode:
        yield


def as_it_is(_: str, value: torch.Tensor) -> torch.Tensor:
    """Return a gradient unchanged."""
    return value


def _gradients(
    backward: Backward, computed: Computed, reference: Reference | None = None, sections: Sections | None = None
) -> Gradients:
    """Run a backward pass, on the values of a reference if one is given; return all its gradients on the CPU."""
    gradients: Gradients = {}

    def take(name: str, gradient: torch.Tensor) -> None:
        gradients[name] = computed(name, gradient).detach().to(CPU).contiguous()

    crossing = Crossing() if reference is None else crossing_by(reference)
    with trainable(backward.model, backward.parameters.values()):
        backward_by_blocks(backward, crossing, take, sections)
    return gradients
