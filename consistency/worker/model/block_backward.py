"""A backward pass in which every block computes on given values and given gradients: the same for every device.

As in `block_pass`, a float64 pass rounds what enters and leaves each block to the tested dtype; going back, it rounds
what comes in from above, and keeps both. Another pass computes each block on these, forward and backward at once, so
that the activations of one block are all that it keeps. The float64 pass knows the gradient that comes in only after
all that is above: it runs forward without keeping any, and each block once more when its turn comes.

What is outside of the blocks goes back from the loss, and from what enters a block. Results are the gradient of what
entered each block, by the blocks; of what left it, by what is outside; and of parameters, whose contributions by
several calls of a block are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from consistency.capture.names import GRADIENT
from consistency.numerics.decision import Decision, is_real
from consistency.numerics.decisions import Watch
from consistency.worker.model.block_pass import BlockBegan, BlockPass, Given, ResultPlace, no_listener
from consistency.worker.model.running import Activations, model_code, outputs, parameters_kept
from consistency.worker.quantized.exact import as_loaded
from consistency.worker.recorder import Skip

Loss = Callable[[Activations], Sequence[tuple[torch.Tensor, torch.Tensor]]]
"""Called with the outputs of a pass, returns what goes backward, each tensor with its weights."""

Incoming = Callable[[str, torch.Tensor], torch.Tensor | None]
"""Called with the name of a place and a tensor there, returns the gradient that comes in; None where none does."""

TakeGradient = Callable[[str, torch.Tensor], None]
"""Called with the name of a place, or of a parameter, and its gradient."""

OUTSIDE, OUTSIDE_BACKWARD = "outside", "outside, backward"
"""Sections of a pass: see `Sections`."""


_COPY_OF = "_consistency_copy_of"
"""Attribute of a copy of what is given."""

_SAME = 1e-6
"""Of the values: in float64 a thousand sums in another order are far below it, another function is not."""


class Sections:
    """Watch the decisions of each section of a pass by itself: each call of a block, and what is outside.

    In which order blocks run backward differs between passes; within a section it does not.
    """

    def __init__(self, watch_of: Callable[[str], Watch | None]) -> None:
        self._watch_of = watch_of
        self._watches: dict[str, Watch | None] = {}
        self._now: Watch | None = None

    def begin(self) -> None:
        """Begin the pass anew."""
        self._watches.clear()

    def __call__(self, decision: Decision) -> torch.Tensor | None:
        return None if self._now is None else self._now(decision)

    @contextmanager
    def within(self, section: str | None) -> Iterator[None]:
        """Watch what is decided in a section, which may be left and entered again; nothing without a name."""
        before = self._now
        if section is not None and section not in self._watches:
            self._watches[section] = self._watch_of(section)
        self._now = None if section is None else self._watches[section]
        try:
            yield
        finally:
            self._now = before


_SHARE_OF_FORWARD = 0.25
"""Of a pass whose blocks go back one after the other: each runs forward, later forward again, and back, which takes
two of these."""


class NoGradientError(Exception):
    """No output of the model depends on the parameters."""


class _NotAgainError(Skip):
    """A block gives another result when it runs again, or none: a method may set up its layers for one pass only."""


@dataclass(eq=False, slots=True)
class _Boundary:
    """A tensor that enters or leaves blocks."""

    place: ResultPlace
    given: torch.Tensor
    """What all go on with."""
    own: torch.Tensor | None = None
    """What the outside has made, where it has a gradient to go back by."""
    gradient: torch.Tensor | None = None
    """The sum of what has come in from above."""
    outside: torch.Tensor | None = None
    """Of that, by what is outside."""

    def add(self, gradient: torch.Tensor) -> None:
        self.gradient = _sum(self.gradient, gradient)


@dataclass(eq=False, slots=True)
class _Call:
    """One call of a block."""

    place: ResultPlace
    """Of its first output."""
    block: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    """`args`, `kwargs`: what it got, as given to all."""
    inputs: list[tuple[str, _Boundary]] = field(default_factory=list)
    outputs: list[_Boundary | None] = field(default_factory=list)
    """`inputs`, `outputs`: what entered and left it, in order; None for an output that it only passed on."""
    first: list[_Boundary] = field(default_factory=list)
    """What entered a block here for the first time."""
    results: list[torch.Tensor] | None = None
    """Its own outputs, where it does not run again."""
    answer: torch.Tensor | None = None
    """Its own first output, where it runs again."""
    contexts: ExitStack = field(default_factory=ExitStack)


@dataclass(slots=True, kw_only=True)
class Backward:
    """What a backward pass is of."""

    model: torch.nn.Module
    wanted: Mapping[str, torch.nn.Parameter]
    """By name, the only parameters that require a gradient."""
    inputs: Activations
    loss: Loss
    began: BlockBegan = no_listener


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """What crosses the borders of blocks."""

    given: Given = lambda _, value: value
    """Gives the values that blocks go on with."""
    incoming: Incoming | None = None
    """Gives the gradient that comes in at a place, with the tensor that it is of: all blocks go back at once."""
    come_in: Given = lambda _, gradient: gradient
    """Without that, blocks go back from the last on: called with the sum of what has come in, returns what goes on."""


def backward_by_blocks(of: Backward, crossing: Crossing, take: TakeGradient, sections: Sections | None = None) -> None:
    """Run a model forward and backward, each block by itself, and hand over gradients, on their device.

    A block that does not run again as it did keeps its activations.

    Raises
    ------
    NoGradientError
    """
    sections = sections or Sections(lambda _: None)
    try:
        _BackwardPass(of, crossing, take, sections, again=True).run()
    except _NotAgainError:
        sections.begin()
        _BackwardPass(of, crossing, take, sections, again=False).run()


class _BackwardPass(BlockPass):
    def __init__(
        self, of: Backward, crossing: Crossing, take: TakeGradient, sections: Sections, *, again: bool
    ) -> None:
        super().__init__(crossing.given, lambda *_: None, began=of.began)
        if crossing.incoming is None:
            self.share_of_forward = _SHARE_OF_FORWARD
        self._of = of
        self._wanted = of.wanted
        self._take_gradient = take
        self._incoming = crossing.incoming
        self._come_in = crossing.come_in
        self._sections = sections
        self._again = again
        self._made: list[_Call] = []
        self._boundaries: dict[int, tuple[torch.Tensor, _Boundary]] = {}
        """Of what the outside makes, and of what is given, by identity."""
        self._left: list[_Boundary] = []
        self._of_parameters: dict[str, torch.Tensor] = {}
        self._entered: _Call | None = None
        self._is_second = False

    def _follow_children(self, name: str, block: torch.nn.Module, hooks: ExitStack) -> None:
        """Leave the modules in a block alone: what they make is a result of the forward pass."""

    def _begin(
        self, name: str, block: torch.nn.Module, args: list[tuple[str, Any]], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._is_second:
            return tuple(value for _, value in args), kwargs
        self._entered = _Call(place=ResultPlace(name), block=block)
        self._entered.args, self._entered.kwargs = super()._begin(name, block, args, kwargs)
        call, self._entered = self._entered, None
        call.place = self._place(name, name, "")
        self._made.append(call)
        keeps = self._incoming is not None or self._keeps(call)
        call.contexts.enter_context(self._sections.within(str(call.place) if keeps else None))
        call.contexts.enter_context(nullcontext() if keeps else torch.no_grad())
        return self._copies(call.args), self._copies(call.kwargs)

    def _keeps(self, call: _Call) -> bool:
        """Report whether a call keeps its activations: with a cache, as of a prefix, a second one would see both."""
        from transformers import Cache

        return not self._again or any(isinstance(value, Cache) for value in (*call.args, *call.kwargs.values()))

    def _end(self, name: str, found: Any) -> Any:
        if self._is_second:
            return found
        call = self._made[-1]
        call.contexts.close()
        own = [leaf for leaf in _pytree.tree_leaves(found) if is_real(leaf)]
        passed = [self._boundary_of(leaf) for leaf in own]
        new = super()._end(name, found)
        made = [self._boundaries[id(leaf)][1] for leaf in _pytree.tree_leaves(new) if is_real(leaf)]
        keeps = self._incoming is not None or self._keeps(call)
        needs = any(boundary.given.requires_grad for _, boundary in call.inputs)
        needs = needs or any(parameter.requires_grad for parameter in call.block.parameters())
        for result, boundary, before in zip(own, made, passed, strict=True):
            is_new = before is None and id(result) in self._boundaries  # a block may return a result twice
            call.outputs.append(boundary if is_new else None)
            if is_new:
                boundary.given.requires_grad_(result.requires_grad if keeps else needs)
                self._left.append(boundary)
                del self._boundaries[id(result)]  # which holds all that it was computed from
        if self._incoming is not None:
            gradients = [
                None if boundary is None else self._incoming(str(boundary.place), result)
                for result, boundary in zip(own, call.outputs, strict=True)
            ]
            with self._sections.within(str(call.place)):
                self._back(call, own, gradients)
        elif keeps:
            call.results = own
        elif own:
            call.answer = own[0].to(torch.float32)
        return self._copies(new)

    def _passed_on(self, block: str, part: str, value: torch.Tensor) -> torch.Tensor:
        """Return what a block goes on with, whose gradient is known of the tensor by itself."""
        if not is_real(value):
            return value
        call = self._entered
        boundary = self._boundary_of(value)
        if boundary is None:
            place = self._place(block, block, part)
            boundary = _Boundary(place=place, given=self._given(str(place), value).detach())
            for one in (value, boundary.given):
                self._boundaries[id(one)] = one, boundary
            if call is not None:
                boundary.given.requires_grad_(value.requires_grad)
                boundary.own = value
                call.first.append(boundary)
        if call is not None and all(boundary is not other for _, other in call.inputs):
            call.inputs.append((part, boundary))
        return boundary.given

    def _boundary_of(self, value: torch.Tensor) -> _Boundary | None:
        """Return what a tensor is a copy of, or what it is itself."""
        _, boundary = self._boundaries.get(id(value), (value, None))
        return boundary or getattr(value, _COPY_OF, None)

    def _copies(self, values: Any) -> Any:
        """Return what a module may write into: a leaf that requires a gradient refuses that."""
        leaves, structure = _pytree.tree_flatten(values)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and id(leaf) in self._boundaries:
                leaves[i] = leaf.clone()
                setattr(leaves[i], _COPY_OF, self._boundaries[id(leaf)][1])  # not kept: it is as large as the original
        return _pytree.tree_unflatten(leaves, structure)

    def run(self) -> None:
        """Run forward, go back from the loss, and hand over what is known then."""
        model = self._of.model
        with parameters_kept(model), as_loaded(model), torch.enable_grad(), self.following(model):
            with self._sections.within(OUTSIDE):
                terms = self._of.loss(outputs(model, self._of.inputs))
            if not terms:
                raise NoGradientError("no output of the model depends on the adapter")
            self._go_back_from(terms)

    def _go_back_from(self, terms: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._go_back_outside(terms)
        count = len(self._made)
        for done, call in enumerate(reversed(self._made)):
            if self._incoming is None:
                share = self.share_of_forward + (1 - self.share_of_forward) * done / count
                self._began(count - done, count, share)
                self._go_back(call)
            for boundary in reversed(call.first):
                assert boundary.own is not None
                gradient = self._that_comes_in(boundary, boundary.own)
                if gradient is not None and boundary.own.requires_grad:
                    self._go_back_outside([(boundary.own, gradient)])
            call.args, call.kwargs, call.results = (), {}, None
        for boundary in self._left:
            if boundary.outside is not None:
                self._take_gradient(_of_place(boundary.place), boundary.outside)
        for name in self._wanted:
            if name in self._of_parameters:
                self._take_gradient(name, self._of_parameters[name])

    def _that_comes_in(self, boundary: _Boundary, own: torch.Tensor) -> torch.Tensor | None:
        if self._incoming is not None:
            return self._incoming(str(boundary.place), own)
        return None if boundary.gradient is None else self._come_in(str(boundary.place), boundary.gradient)

    def _go_back_outside(self, terms: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        leaves = [boundary for boundary in self._left if boundary.given.requires_grad]
        with self._sections.within(OUTSIDE_BACKWARD):
            for boundary, gradient in zip(leaves, self._gradients(terms, leaves), strict=True):
                if gradient is not None:
                    boundary.add(gradient)
                    boundary.outside = _sum(boundary.outside, gradient)

    def _go_back(self, call: _Call) -> None:
        """Run a block again, and go back through it."""
        gradients = [None if b is None else self._that_comes_in(b, b.given) for b in call.outputs]
        if all(gradient is None for gradient in gradients):
            return
        with self._sections.within(str(call.place)):
            self._back(call, self._run_again(call) if call.results is None else call.results, gradients)

    def _run_again(self, call: _Call) -> list[torch.Tensor]:
        kind, self._is_second = type(call.block).__name__, True
        try:
            with model_code(self._of.model, f"{kind} does not run again: ", raises=_NotAgainError):
                found = call.block(*self._copies(call.args), **self._copies(call.kwargs))
        finally:
            self._is_second = False
        own = [leaf for leaf in _pytree.tree_leaves(found) if is_real(leaf)]
        if len(own) != len(call.outputs) or not (call.answer is None or _is_same(own[0].detach(), call.answer)):
            raise _NotAgainError(f"{kind} gives another result when it runs again")
        return own

    def _back(self, call: _Call, own: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        inputs = [(part, boundary) for part, boundary in call.inputs if boundary.given.requires_grad]
        terms = [(o, g) for o, g in zip(own, gradients, strict=True) if g is not None and o.requires_grad]
        found = self._gradients(terms, [boundary for _, boundary in inputs])
        for (part, boundary), gradient in zip(inputs, found, strict=True):
            if gradient is not None:
                boundary.add(gradient)
                place = ResultPlace(call.place.layer, f"{part}{call.place.part}")  # with the number of the call
                self._take_gradient(_of_place(place), gradient)

    def _gradients(
        self, terms: Sequence[tuple[torch.Tensor, torch.Tensor]], of: Sequence[_Boundary]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of what is given, and add up those of parameters."""
        leaves = [*(boundary.given for boundary in of), *self._wanted.values()]
        if not terms or not leaves:
            return [None] * len(of)
        # what a block reaches outside of it, as a prefix, others go back through as well
        found = torch.autograd.grad(
            [one for one, _ in terms], leaves, [gradient for _, gradient in terms], retain_graph=True, allow_unused=True
        )
        for name, gradient in zip(self._wanted, found[len(of) :], strict=True):
            if gradient is not None:
                self._of_parameters[name] = _sum(self._of_parameters.get(name), gradient)
        return [None if gradient is None else gradient.detach() for gradient in found[: len(of)]]


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Report whether two results are the same but for rounding: torch sums in another order where weights have none."""
    if one.dtype != torch.float64 or one.shape != other.shape:
        return one.shape == other.shape
    with _disable_current_modes():
        finite = other.isfinite()
        error = torch.where(finite, one - other, 0.0)
        return float(error.abs().sum()) <= _SAME * float(torch.where(finite, other, 0.0).abs().sum())


def _sum(one: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if one is None else one + other


def _of_place(place: ResultPlace) -> str:
    """Return the name of the gradient of what enters or leaves a block."""
    part, at, call = place.part.partition("@")
    return str(ResultPlace(place.layer, f"{part or 'output'}.{GRADIENT}{at}{call}"))
