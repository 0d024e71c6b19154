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
"""Of parameters by name, and of what enters and leaves blocks by the names of the places; on the CPU."""

Parameters = Mapping[str, torch.nn.Parameter]


def backward_of(
    model: torch.nn.Module, names: list[str], inputs: Tensors, *, began: BlockBegan = no_listener
) -> Backward:
    """Return the pass over all inputs, which are rounded once: the model casts them to its own dtype."""
    wanted = {name: model.get_parameter(name) for name in names}
    return Backward(model=model, wanted=wanted, inputs=as_model_takes(model, inputs), loss=of_outputs, began=began)


def row_of(context: Context, name: str) -> tuple[str, str]:
    """Return layer and tensor of a gradient."""
    if "::" in name:
        place = ResultPlace.of(name)
        return place.layer, place.part
    layer, tensor = adapter_place(context.expected[name][0])
    return layer, f"{tensor}.{GRADIENT}"


@dataclass(slots=True, kw_only=True)
class ExactGradients:
    """A float64 backward pass: its gradients, and what it gives to others, in the tested dtype."""

    gradients: Gradients = field(default_factory=dict)
    given: Tensors = field(default_factory=dict)

    def tensors_with(self, drawn: Mapping[str, list[Gradients]], wanted: Parameters) -> tuple[Tensors, Tables]:
        """Return what is published: these, and what rounding makes by passes with noise."""
        found = spreads(
            {title: [one.get for one in passes] for title, passes in drawn.items()}, self.gradients, sums=wanted
        )
        tensors = {**self.gradients, **self.given, **named_factors(found)}
        return tensors, Tables(failures={}, names=tuple(tensors), limits=limits_of(found))


def in_float64(of: Backward, track: Track) -> ExactGradients:
    """Compute the exact gradients, on values and gradients that the pass rounds itself."""
    dtype = next(p.dtype for p in of.model.parameters() if p.dtype in UNIT_ROUNDOFF)
    exact, sections = ExactGradients(), Sections(track.exact)

    def keep(what: str, name: str, value: torch.Tensor) -> torch.Tensor:
        kept = exact.given[given_name(what, name)] = rounded(value, dtype).to(CPU)
        return kept.to(value.dtype)

    def take(name: str, gradient: torch.Tensor) -> None:
        exact.gradients[name] = gradient.detach().to(CPU, torch.float64).contiguous()

    with trainable(of.model, of.wanted.values()), computing_exactly(of), deciding(sections, gradient=True):
        given, come_in = functools.partial(keep, ADAPTER_ON), functools.partial(keep, GRADIENT)
        backward_by_blocks(of, Crossing(given=given, come_in=come_in), take, sections)
    return exact


def with_noise(
    context: Context, of: Backward, exact: ExactGradients, track: Track, *, most: int = MOST_PASSES
) -> dict[str, list[Gradients]]:
    """Compute the gradients with noise, on the exact pass's values, gradients and decisions."""
    kernels = half_kernels.replacement(of.model, tokens_of(of.inputs))
    reference = Reference.of_this_process(exact.given)

    def compute(title: str) -> Gradients:
        sections = Sections(functools.partial(track.other, title=title))
        with half_kernels.computing(kernels), deciding(sections if track.decides else None, gradient=True):
            return _taken(of, as_it_is, reference, sections)

    return draw(context, of.model, compute, noise_passes(context, of, most=most))


def noise_passes(context: Context, of: Backward, *, most: int = MOST_PASSES) -> int:
    """Return how many passes with noise are computed for the products of each worker."""
    return min(most, passes_for_sums(context, of.model))


Computed = Callable[[str, torch.Tensor], torch.Tensor]
"""Called with the name of a gradient and what the device computed: where a fault is planted."""


def crossing_by(reference: Reference) -> Crossing:
    """Return what crosses the borders of blocks in passes on what a reference gives."""
    return Crossing(
        given=functools.partial(reference.given, ADAPTER_ON), incoming=functools.partial(reference.incoming, GRADIENT)
    )


def on_what_is_given(of: Backward, reference: Reference, replay: Replay, computed: Computed) -> Gradients:
    """Return the gradients by blocks on what a reference gives, with its decisions."""
    sections = Sections(replay.watch_if_any)
    with deciding(sections if replay.decides else None, gradient=True, places=replay.places):
        return _taken(of, computed, reference, sections)


def from_end_to_end(
    of: Backward, computed: Computed, *, exact: bool = False, watch: Callable[[str], None] | None = None
) -> Gradients:
    """Return the gradients of the parameters on the model's own values, in its dtype or in float64.

    `watch` gets the name of each operation that decides.
    """
    watched = None if watch is None else lambda decision: watch(decision.name)
    with computing_exactly(of) if exact else nullcontext(), deciding(watched, gradient=True):
        return {name: gradient for name, gradient in _taken(of, computed).items() if name in of.wanted}


@contextmanager
def computing_exactly(of: Backward) -> Iterator[None]:
    """Compute in float64, gradients of parameters too."""
    mode = Float64Mode()
    with exact_layers(of.model), mode.with_gradients(of.wanted.values()), mode:
        yield


def as_it_is(_: str, value: torch.Tensor) -> torch.Tensor:
    """Return a gradient."""
    return value


def _taken(
    of: Backward, computed: Computed, reference: Reference | None = None, sections: Sections | None = None
) -> Gradients:
    found: Gradients = {}

    def take(name: str, gradient: torch.Tensor) -> None:
        found[name] = computed(name, gradient).detach().to(CPU).contiguous()

    with trainable(of.model, of.wanted.values()):
        backward_by_blocks(of, Crossing() if reference is None else crossing_by(reference), take, sections)
    return found
