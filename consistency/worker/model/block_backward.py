"""A backward pass in which every block computes on given values and given gradients: the same for every device.

As in `block_pass`, a float64 pass rounds what enters and leaves each block to the tested dtype; going back, it rounds
the gradient that comes in from above, and keeps both. Another pass computes each block on these, forward and backward
at once, so that the activations of one block are all that it keeps. The float64 pass knows the gradient that comes in
only after all blocks above have gone back: it runs forward without keeping activations, and each block once more when
its turn comes.

What is outside of the blocks goes back from the loss, and from what enters a block. Results are the gradient of what
entered each block, by the blocks; of what left it, by what is outside; and of parameters, whose contributions by
several calls of a block are added up.

The float64 pass (`_BackwardFromTheLoss`), for a block `layers.1`; ``->`` is forward, ``<-`` backward::

    forward   outside or layers.0 -> input, given() rounds and keeps it -> block, without activations
                                  -> output, given() rounds and keeps it -> layers.2
              kept until the block goes back: its arguments as given, and its own first output in float32
    loss      outside <- loss                 gradients of what left the last blocks: a result, and a part of the sum
    backward  from the last block to the first:
              layers.1 runs again on the kept arguments, with activations
              block <- come_in() rounds and keeps the sum of the gradients that have come in for its output
              results: the gradient of each input by this block, and the block's part of the parameters' gradients
              where an input was made outside (embeddings):  outside <- come_in(the sum of gradients of that input)
              the block's arguments and activations are dropped

A device's pass (`_BackwardOnGivenGradients`), for the same block::

    forward   outside or layers.0 -> input, replaced by the value that the float64 pass kept -> block, with activations
              block <- incoming(): the gradient that the float64 pass kept for its output, at once
              results: as above
                                  -> output, replaced by the value that the float64 pass kept -> layers.2
              kept: no activations
    loss      outside <- loss
    backward  only outside <- incoming() for each input that was made outside

A block that gives another result when it runs again keeps its activations in the float64 pass instead. A pass from end
to end is one from the loss too, in which `given` and `come_in` return what they get.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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
"""Called with the outputs of a pass, returns the tensors that go backward, each with the gradient that comes to it."""

Incoming = Callable[[str, torch.Tensor], torch.Tensor | None]
"""Called with the name of a place and a tensor there, returns the gradient that comes in; None where none does."""

TakeGradient = Callable[[str, torch.Tensor], None]
"""Called with the name of a place, or of a parameter, and its gradient."""

OUTSIDE, OUTSIDE_BACKWARD = "outside", "outside, backward"
"""Sections of a pass: see `Sections`."""


_COPY_OF = "_consistency_copy_of"
"""Attribute of a copy of a given tensor: its `_Boundary`."""

_SAME = 1e-6
"""Largest error of an equal result, as a fraction of the values: in float64 a thousand sums in another order are far
below it, another function is not."""


class Sections:
    """Watch the decisions of each section of a pass by itself: of each call of a block, and of the outside.

    In which order blocks run backward differs between passes; within a section it does not.
    """

    def __init__(self, watch_of: Callable[[str], Watch | None]) -> None:
        self._watch_of = watch_of
        self._watches: dict[str, Watch | None] = {}
        self._current: Watch | None = None

    def begin(self) -> None:
        """Begin the pass anew."""
        self._watches.clear()

    def __call__(self, decision: Decision) -> torch.Tensor | None:
        return None if self._current is None else self._current(decision)

    @contextmanager
    def within(self, section: str | None) -> Iterator[None]:
        """Watch the decisions in a section, which may be left and entered again; watch none where it is None."""
        before = self._current
        if section is None:
            self._current = None
        else:
            if section not in self._watches:
                self._watches[section] = self._watch_of(section)
            self._current = self._watches[section]
        try:
            yield
        finally:
            self._current = before


_SHARE_OF_FORWARD = 0.25
"""Fraction of a pass whose blocks go back one after the other that is done when its forward part ends: each block runs
forward, later forward again, and back, which takes as long as two of these."""


class NoGradientError(Exception):
    """No output of the model depends on the parameters."""


class _NotAgainError(Skip):
    """A block gives another result when it runs again, or none: a method may set up its layers for one pass only."""


@dataclass(eq=False, slots=True)
class _Boundary:
    """A tensor that enters or leaves blocks."""

    place: ResultPlace
    given: torch.Tensor
    """The value that everything goes on with; a leaf of autograd."""
    own: torch.Tensor | None = None
    """The tensor that the outside has made in this place, to go back from; None for a block's output."""
    gradient: torch.Tensor | None = None
    """The sum of the gradients that have come in from above; None in a pass on given gradients."""
    outside: torch.Tensor | None = None
    """The sum of the gradients that came from outside of the blocks."""

    def add(self, gradient: torch.Tensor) -> None:
        self.gradient = _sum(self.gradient, gradient)


@dataclass(eq=False, slots=True)
class _Call:
    """One call of a block."""

    place: ResultPlace
    """Place of its first output."""
    block: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    """`args`, `kwargs`: its arguments with given values; dropped when the block has gone back."""
    inputs: list[tuple[str, _Boundary]] = field(default_factory=list)
    """The tensors that entered it, each once, with the names of their parts."""
    outputs: list[_Boundary | None] = field(default_factory=list)
    """The tensors that left it, in order; None for an output that it only passed on."""
    first: list[_Boundary] = field(default_factory=list)
    """The tensors made outside that entered a block here for the first time."""
    results: list[torch.Tensor] | None = None
    """Its own outputs with their graph, where it does not run again."""
    answer: torch.Tensor | None = None
    """Its own first output in float32, without a graph, to compare with where it runs again."""
    contexts: ExitStack = field(default_factory=ExitStack)
    """Contexts that are entered when the call begins, and closed when it ends."""


@dataclass(slots=True, kw_only=True)
class Backward:
    """A model, inputs and a loss to go backward from."""

    model: torch.nn.Module
    parameters: Mapping[str, torch.nn.Parameter]
    """The only parameters that require a gradient, by name."""
    inputs: Activations
    loss: Loss
    began: BlockBegan = no_listener


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """The values and gradients that cross the borders of blocks."""

    given: Given = lambda _, value: value
    """Gives the values that blocks go on with."""
    incoming: Incoming | None = None
    """Gives the gradient that comes in at a place, with the tensor that it is of: blocks go back as soon as they have
    run. None where these gradients are not known yet: blocks go back from the last to the first."""
    come_in: Given = lambda _, gradient: gradient
    """Without `incoming`: called with the sum of the gradients that have come in, returns the one that goes on."""


def backward_by_blocks(
    backward: Backward, crossing: Crossing, take: TakeGradient, sections: Sections | None = None
) -> None:
    """Run a model forward and backward, each block by itself, and hand over gradients, on their device.

    A block that does not run again as it did keeps its activations.

    Raises
    ------
    NoGradientError
    """
    sections = sections or Sections(lambda _: None)
    if crossing.incoming is not None:
        _BackwardOnGivenGradients(backward, crossing.given, crossing.incoming, take, sections).run()
        return
    try:
        _BackwardFromTheLoss(backward, crossing, take, sections, runs_again=True).run()
    except _NotAgainError:
        sections.begin()
        _BackwardFromTheLoss(backward, crossing, take, sections, runs_again=False).run()


class _BackwardPass(BlockPass, ABC):
    """The common part of both passes: what crosses the borders, and the way back outside of the blocks.

    A tensor at a border is cut from its graph: `_Boundary.given` is a leaf, from which the block goes on, and back to
    which autograd is asked for gradients, of one block or of the outside at a time.
    """

    def __init__(self, backward: Backward, given: Given, take: TakeGradient, sections: Sections) -> None:
        super().__init__(given, lambda *_: None, began=backward.began)
        self._backward = backward
        self._parameters = backward.parameters
        self._take_gradient = take
        self._sections = sections
        self._calls_made: list[_Call] = []
        self._boundaries: dict[int, tuple[torch.Tensor, _Boundary]] = {}
        """Boundaries of the tensors that the outside makes, and of given tensors, by the tensors' identity."""
        self._block_outputs: list[_Boundary] = []
        self._parameter_gradients: dict[str, torch.Tensor] = {}
        self._entering: _Call | None = None
        """The call whose arguments are being replaced."""

    @abstractmethod
    def _keeps_activations(self, call: _Call) -> bool:
        """Report whether a call builds a graph in the forward part."""

    @abstractmethod
    def _block_ran(self, call: _Call, results: list[torch.Tensor]) -> None:
        """Go on with a block's own outputs, when it has run and its boundaries are known."""

    @abstractmethod
    def _block_turn(self, call: _Call, done: int, count: int) -> None:
        """Go back through a block if it has not gone back yet, when `done` of `count` calls have."""

    @abstractmethod
    def _note_incoming(self, boundary: _Boundary, gradient: torch.Tensor) -> None:
        """Keep a gradient that has come in at a boundary, where the pass goes on with the sum of these."""

    @abstractmethod
    def _incoming_gradient(self, boundary: _Boundary, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient that comes in at a boundary for a tensor there, None where none does."""

    def run(self) -> None:
        """Run forward, go back from the loss, and hand over the gradients that are known at the end."""
        model = self._backward.model
        with parameters_kept(model), as_loaded(model), torch.enable_grad(), self.following(model):
            with self._sections.within(OUTSIDE):
                terms = self._backward.loss(outputs(model, self._backward.inputs))
            if not terms:
                raise NoGradientError("no output of the model depends on the adapter")
            self._go_back_from(terms)

    # The forward part: hooks of blocks.

    def _follow_children(self, name: str, block: torch.nn.Module, hooks: ExitStack) -> None:
        """Leave the modules in a block alone: their outputs are results of the forward pass."""

    def _begin(
        self, name: str, block: torch.nn.Module, args: list[tuple[str, Any]], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._entering = _Call(place=ResultPlace(name), block=block)
        self._entering.args, self._entering.kwargs = super()._begin(name, block, args, kwargs)
        call, self._entering = self._entering, None
        call.place = self._place(name, name, "")
        self._calls_made.append(call)
        keeps_activations = self._keeps_activations(call)
        # decisions are watched where the block goes back: one that runs again decides again then
        call.contexts.enter_context(self._sections.within(str(call.place) if keeps_activations else None))
        call.contexts.enter_context(nullcontext() if keeps_activations else torch.no_grad())
        return self._copies(call.args), self._copies(call.kwargs)

    def _end(self, name: str, output: Any) -> Any:
        call = self._calls_made[-1]
        call.contexts.close()
        results = [leaf for leaf in _pytree.tree_leaves(output) if is_real(leaf)]
        passed_through = [self._boundary_of(leaf) for leaf in results]
        given_output = super()._end(name, output)
        self._note_outputs(call, results, given_output, passed_through)
        self._block_ran(call, results)
        return self._copies(given_output)

    def _note_outputs(
        self,
        call: _Call,
        results: Sequence[torch.Tensor],
        given_output: Any,
        passed_through: Sequence[_Boundary | None],
    ) -> None:
        """Make boundaries of a block's outputs, and let those require a gradient that depend on anything that does.

        Parameters
        ----------
        given_output
            The block's output with given values in place of its own.
        passed_through
            The boundary of each output that was one before the block ended: an input that the block returns as it is.
        """
        given_leaves = [leaf for leaf in _pytree.tree_leaves(given_output) if is_real(leaf)]
        boundaries = [self._boundaries[id(leaf)][1] for leaf in given_leaves]
        keeps_activations = self._keeps_activations(call)
        # without a graph, the result does not tell whether it depends on anything that requires a gradient
        may_depend = any(boundary.given.requires_grad for _, boundary in call.inputs)
        may_depend = may_depend or any(parameter.requires_grad for parameter in call.block.parameters())
        for result, boundary, earlier in zip(results, boundaries, passed_through, strict=True):
            is_new = earlier is None and id(result) in self._boundaries  # a block may return a result twice
            call.outputs.append(boundary if is_new else None)
            if is_new:
                boundary.given.requires_grad_(result.requires_grad if keeps_activations else may_depend)
                self._block_outputs.append(boundary)
                del self._boundaries[id(result)]  # which holds all that it was computed from

    def _passed_on(self, block: str, part: str, value: torch.Tensor) -> torch.Tensor:
        """Replace a tensor at a border by the given one, a leaf whose gradient autograd can return by itself."""
        if not is_real(value):
            return value
        call = self._entering
        boundary = self._boundary_of(value)
        if boundary is None:
            place = self._place(block, block, part)
            boundary = _Boundary(place=place, given=self._given(str(place), value).detach())
            for tensor in (value, boundary.given):
                self._boundaries[id(tensor)] = tensor, boundary
            if call is not None:
                boundary.given.requires_grad_(value.requires_grad)
                boundary.own = value
                call.first.append(boundary)
        if call is not None and all(boundary is not other for _, other in call.inputs):
            call.inputs.append((part, boundary))
        return boundary.given

    def _boundary_of(self, value: torch.Tensor) -> _Boundary | None:
        """Return the boundary that a tensor, or the tensor that it is a copy of, belongs to; None for others."""
        _, boundary = self._boundaries.get(id(value), (value, None))
        return boundary or getattr(value, _COPY_OF, None)

    def _copies(self, values: Any) -> Any:
        """Return copies that a module may write into: a leaf that requires a gradient refuses that."""
        leaves, structure = _pytree.tree_flatten(values)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and id(leaf) in self._boundaries:
                leaves[i] = leaf.clone()
                # the copy is known by this attribute, not held by identity: it is as large as the original
                setattr(leaves[i], _COPY_OF, self._boundaries[id(leaf)][1])
        return _pytree.tree_unflatten(leaves, structure)

    # The backward part.

    def _go_back_from(self, terms: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Go back from the terms of the loss to the first block, and hand over what sums up over the whole pass."""
        self._go_back_outside(terms)
        count = len(self._calls_made)
        for done, call in enumerate(reversed(self._calls_made)):
            self._block_turn(call, done, count)
            for boundary in reversed(call.first):
                assert boundary.own is not None
                gradient = self._incoming_gradient(boundary, boundary.own)
                if gradient is not None and boundary.own.requires_grad:
                    self._go_back_outside([(boundary.own, gradient)])
            call.args, call.kwargs, call.results = (), {}, None
        for boundary in self._block_outputs:
            if boundary.outside is not None:
                self._take_gradient(_gradient_name(boundary.place), boundary.outside)
        for name in self._parameters:
            if name in self._parameter_gradients:
                self._take_gradient(name, self._parameter_gradients[name])

    def _go_back_outside(self, terms: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Go back from tensors that the outside has made to the blocks' outputs that it has used."""
        leaves = [boundary for boundary in self._block_outputs if boundary.given.requires_grad]
        with self._sections.within(OUTSIDE_BACKWARD):
            for boundary, gradient in zip(leaves, self._gradients(terms, leaves), strict=True):
                if gradient is not None:
                    self._note_incoming(boundary, gradient)
                    boundary.outside = _sum(boundary.outside, gradient)

    def _go_back_through(
        self, call: _Call, results: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Go back from a block's own outputs, with a gradient for each, and hand over the gradients of its inputs."""
        inputs = [(part, boundary) for part, boundary in call.inputs if boundary.given.requires_grad]
        terms = []
        for result, gradient in zip(results, gradients, strict=True):
            if gradient is not None and result.requires_grad:
                terms.append((result, gradient))
        input_gradients = self._gradients(terms, [boundary for _, boundary in inputs])
        for (part, boundary), gradient in zip(inputs, input_gradients, strict=True):
            if gradient is not None:
                self._note_incoming(boundary, gradient)
                place = ResultPlace(call.place.layer, f"{part}{call.place.part}")  # with the number of the call
                self._take_gradient(_gradient_name(place), gradient)

    def _gradients(
        self, terms: Sequence[tuple[torch.Tensor, torch.Tensor]], boundaries: Sequence[_Boundary]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of given tensors, and add up those of parameters.

        Parameters
        ----------
        terms
            Tensors to go back from, each with the gradient that comes in there.
        boundaries
            Boundaries whose given tensors get a gradient each; None for one that the terms do not depend on.
        """
        leaves = [*(boundary.given for boundary in boundaries), *self._parameters.values()]
        if not terms or not leaves:
            return [None] * len(boundaries)
        # the graph is kept: others go back through what a block reaches outside of it, such as a prefix, as well
        gradients = torch.autograd.grad(
            [tensor for tensor, _ in terms],
            leaves,
            [gradient for _, gradient in terms],
            retain_graph=True,
            allow_unused=True,
        )
        for name, gradient in zip(self._parameters, gradients[len(boundaries) :], strict=True):
            if gradient is not None:
                self._parameter_gradients[name] = _sum(self._parameter_gradients.get(name), gradient)
        return [None if gradient is None else gradient.detach() for gradient in gradients[: len(boundaries)]]


class _BackwardOnGivenGradients(_BackwardPass):
    """A pass whose incoming gradients are known: each block goes back as soon as it has run forward."""

    def __init__(
        self, backward: Backward, given: Given, incoming: Incoming, take: TakeGradient, sections: Sections
    ) -> None:
        super().__init__(backward, given, take, sections)
        self._incoming = incoming

    def _keeps_activations(self, call: _Call) -> bool:  # noqa: ARG002 - every call goes back at once
        return True

    def _block_ran(self, call: _Call, results: list[torch.Tensor]) -> None:
        gradients: list[torch.Tensor | None] = []
        for result, boundary in zip(results, call.outputs, strict=True):
            gradients.append(None if boundary is None else self._incoming(str(boundary.place), result))
        with self._sections.within(str(call.place)):
            self._go_back_through(call, results, gradients)

    def _block_turn(self, call: _Call, done: int, count: int) -> None:
        """Do nothing: the block has gone back already."""

    def _note_incoming(self, boundary: _Boundary, gradient: torch.Tensor) -> None:
        """Do nothing: the gradients that come in are given, and a sum would stay in memory to the end of the pass."""

    def _incoming_gradient(self, boundary: _Boundary, tensor: torch.Tensor) -> torch.Tensor | None:
        return self._incoming(str(boundary.place), tensor)


class _BackwardFromTheLoss(_BackwardPass):
    """A pass that sums up its incoming gradients: blocks go back from the last to the first.

    Parameters
    ----------
    runs_again : bool
        Run blocks forward without activations, and again when their turn to go back comes; else all activations are
        kept.
    """

    share_of_forward = _SHARE_OF_FORWARD

    def __init__(
        self, backward: Backward, crossing: Crossing, take: TakeGradient, sections: Sections, *, runs_again: bool
    ) -> None:
        super().__init__(backward, crossing.given, take, sections)
        self._come_in = crossing.come_in
        self._runs_again = runs_again
        self._is_running_again = False

    def _begin(
        self, name: str, block: torch.nn.Module, args: list[tuple[str, Any]], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._is_running_again:  # its arguments are given values already
            return tuple(value for _, value in args), kwargs
        return super()._begin(name, block, args, kwargs)

    def _end(self, name: str, output: Any) -> Any:
        if self._is_running_again:
            return output
        return super()._end(name, output)

    def _keeps_activations(self, call: _Call) -> bool:
        """Report whether a call does not run again: with a cache, as of a prefix, a second one would see both."""
        from transformers import Cache

        return not self._runs_again or any(isinstance(value, Cache) for value in (*call.args, *call.kwargs.values()))

    def _block_ran(self, call: _Call, results: list[torch.Tensor]) -> None:
        if self._keeps_activations(call):
            call.results = results
        elif results:
            call.answer = results[0].to(torch.float32)

    def _block_turn(self, call: _Call, done: int, count: int) -> None:
        fraction = self.share_of_forward + (1 - self.share_of_forward) * done / count
        self._began(count - done, count, fraction)
        gradients = []
        for boundary in call.outputs:
            gradients.append(None if boundary is None else self._incoming_gradient(boundary, boundary.given))
        if all(gradient is None for gradient in gradients):
            return
        with self._sections.within(str(call.place)):
            results = self._run_again(call) if call.results is None else call.results
            self._go_back_through(call, results, gradients)

    def _note_incoming(self, boundary: _Boundary, gradient: torch.Tensor) -> None:
        boundary.add(gradient)

    def _incoming_gradient(self, boundary: _Boundary, tensor: torch.Tensor) -> torch.Tensor | None:  # noqa: ARG002
        if boundary.gradient is None:
            return None
        return self._come_in(str(boundary.place), boundary.gradient)

    def _run_again(self, call: _Call) -> list[torch.Tensor]:
        """Run a block again on its arguments; return its own outputs, with their graph.

        Raises
        ------
        _NotAgainError
            The block fails now, or its first output is another one.
        """
        kind = type(call.block).__name__
        self._is_running_again = True
        try:
            with model_code(self._backward.model, f"{kind} does not run again: ", raises=_NotAgainError):
                output = call.block(*self._copies(call.args), **self._copies(call.kwargs))
        finally:
            self._is_running_again = False
        results = [leaf for leaf in _pytree.tree_leaves(output) if is_real(leaf)]
        if len(results) != len(call.outputs) or not self._repeats_answer(call, results):
            raise _NotAgainError(f"{kind} gives another result when it runs again")
        return results

    def _repeats_answer(self, call: _Call, results: Sequence[torch.Tensor]) -> bool:
        """Report whether the first output is as in the forward part; true where that had none to compare with."""
        return call.answer is None or _is_same(results[0].detach(), call.answer)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Report whether two results are the same but for rounding: torch sums in another order where weights have none.

    A result that is not in float64 is compared by its shape alone.
    """
    if one.dtype != torch.float64 or one.shape != other.shape:
        return one.shape == other.shape
    with _disable_current_modes():
        finite = other.isfinite()
        error = torch.where(finite, one - other, 0.0)
        return float(error.abs().sum()) <= _SAME * float(torch.where(finite, other, 0.0).abs().sum())


def _sum(one: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if one is None else one + other


def _gradient_name(place: ResultPlace) -> str:
    """Return the name of the gradient of a tensor that enters or leaves a block."""
    part, at, call = place.part.partition("@")
    return str(ResultPlace(place.layer, f"{part or 'output'}.{GRADIENT}{at}{call}"))
