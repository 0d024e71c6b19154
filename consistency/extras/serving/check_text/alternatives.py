"""What could explain a text that is wrong: mistakes with the adapter, other adapters, other prompts, other positions.

Some are of a part of the model or of the text alone: layers or tokens by another adapter, keys that were not seen.

Each is a float64 pass of the model with the mistake in it, and is computed when it is asked for. It explains a text if
all of it is then what the model gives: the log probabilities where they came with the text, else each token the most
likely one, within what rounding may do.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from consistency.capture.explanation import Explanation
from consistency.extras.serving.causes import Cause
from consistency.extras.serving.check_text.computed_in_parts import (
    BASE_ALONE,
    active,
    can_disable,
    layers_by,
    layers_by_token,
    tokens_by,
)
from consistency.extras.serving.check_text.judged_text import JudgedText, TokenFigures, inputs_of
from consistency.extras.serving.check_text.penalties import USUAL_PENALTIES
from consistency.extras.serving.check_text.prompts import other_prompts
from consistency.extras.serving.check_text.seen_tokens import other_positions, otherwise_seen, seeing
from consistency.extras.serving.check_text.text_causes import TextCause
from consistency.extras.serving.check_text.texts import Text, Tokens
from consistency.extras.serving.engine_outputs.explanations import MOST_WORK, merges, mistakes, no_merges
from consistency.extras.serving.engine_outputs.layer_search import by_block, by_kind, named, search
from consistency.extras.serving.engine_outputs.passes import Change, Passes
from consistency.extras.serving.engine_outputs.rotary_positions import other_rotary_positions, rounded_frequencies
from consistency.worker.model.merging import MergeRefusedError, adapted_layers
from consistency.worker.model.running import Activations, base_of, is_of_the_model, matrix_elements

_CACHE_BLOCK = 16
"""Tokens of a block of keys and values, as vLLM keeps them by default."""

_LEAST_TELLING = 8
_TELLING = 16.0
"""Tokens, and median of what their log probabilities are off by over what rounding explains, from which on the search
ends with what explains the text. Both are chosen, not derived.
Without log probabilities the first is of tokens that are not the most likely ones."""

_LEAST_SINGLE = 2
"""Single tokens of a text that are taken for more than an accident."""

_MOST_SINGLE = 0.25
"""Part of a text that single tokens make up, at most."""

_FAR_OUTSIDE = 4.0
"""Ratio of a token that something else wrote: one of the model's, with a small mistake, is beside the bound."""


class Extent(enum.Enum):
    """How much of a text a mistake explains."""

    TOKENS = enum.auto()
    """Every token is then the most likely one, with its log probability where it has one."""
    LOGPROBS = enum.auto()
    """The log probabilities are then the model's; the tokens were sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """How a mistake explains a text.

    Attributes
    ----------
    about : tuple of str
        Subjects of the mistake that explain the text, such as sizes of a penalty: the likeliest first.
    """

    extent: Extent
    about: tuple[str, ...] = ("",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A mistake that may explain a text.

    Attributes
    ----------
    try_it : callable
        Compute the text with the mistake, and return how that explains it; None where it does not.
    """

    cause: Explanation
    try_it: Callable[[], Explained | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSet:
    """Some adapted layers, and what they are called together."""

    name: str
    layers: tuple[Any, ...]


NO_LAYERS = LayerSet(name="", layers=())
"""Stands for a search that found nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedText:
    """A text that is to be explained.

    Attributes
    ----------
    text : Text
        The text as it was given, from which other prompts are made.
    others : sequence of str
        Names under which other adapters are loaded into the model.
    layer_sets : dict
        What was found of layers by the base alone or by another adapter, for all texts together.
    """

    text: Text
    judged: JudgedText
    tokenizer: Any
    others: Sequence[str] = ()
    layer_sets: dict[str, LayerSet] = field(default_factory=dict)

    def tells_apart(self) -> bool:
        """Report whether a second mistake would hardly explain the text too: it is commonly far from the model's.

        That one would have to come within rounding of the same log probabilities at every token, or to make the same
        tokens the most likely ones. Mistakes that come to the same are tried together, so none of these is lost.
        """
        ratios = self.judged.logprob_ratios
        if ratios is None:
            return int((self.judged.exact.gaps > self.judged.allowed_gaps).sum()) >= _LEAST_TELLING
        return len(ratios) >= _LEAST_TELLING and float(ratios.median()) >= _TELLING

    def with_adapters(self) -> Iterator[Alternative]:
        """Yield mistakes with the adapter, or with others."""
        judged, model = self.judged, self.judged.passes.model
        base_alone = None
        if can_disable(model):
            base_alone = functools.partial(judged.passes.of, "without the adapter", model.disable_adapter)
        for name in self.others:
            of_other = functools.partial(active, model, name)
            yield self._by_change(TextCause.OTHER_ADAPTER, name, f"adapter {name}", of_other)
        for cause, about, compute in mistakes(judged.passes, base_alone):
            yield self._by_logits(cause, about, compute)
        if base_alone is not None:
            yield Alternative(cause=TextCause.OFF_FROM, try_it=self._off_from_a_token)
        yield from self._prompts_by_others()

    def with_prompts(self) -> Iterator[Alternative]:
        """Yield other prompts."""
        judged = self.judged
        for cause, about, prompt in other_prompts(self.text, judged.tokens, self.tokenizer, judged.passes.model):
            yield Alternative(cause=cause, try_it=functools.partial(self._fits_after, prompt, about))

    def with_positions(self) -> Iterator[Alternative]:
        """Yield other positions, and other tokens that each token sees."""
        judged, model = self.judged, self.judged.passes.model
        for about, change in other_rotary_positions(base_of(model)):
            yield self._by_change(Cause.ROTARY, about, about, change)
        for about, change in rounded_frequencies(base_of(model)):
            yield self._by_change(Cause.FREQUENCIES, about, f"rotary frequencies in {about}", change)
        if "decoder_input_ids" not in judged.passes.inputs:
            yield Alternative(cause=TextCause.WINDOW, try_it=self._seeing_others)
            for about, inputs in other_positions(model, judged.tokens, judged.passes.inputs):
                with_these = functools.partial(self._fits_with, inputs, about)
                yield Alternative(cause=TextCause.POSITIONS, try_it=with_these)

    def _writers(self) -> Iterator[tuple[str, str | None]]:
        """Yield what may have computed a part, in words and by its name: the base alone, and other adapters."""
        if can_disable(self.judged.passes.model):
            yield "as the base alone", BASE_ALONE
        for name in self.others:
            yield f"by the adapter {name}", name

    def _prompts_by_others(self) -> Iterator[Alternative]:
        """Yield prompts whose keys and values are of another request: all of them, or all but what is computed anew."""
        passes, prompt = self.judged.passes, len(self.judged.tokens.prompt)
        layers = layers_by_token(passes.model)
        # at least the last token is computed anew, for its logits, and some engines keep whole blocks alone
        in_blocks = (prompt - 1) // _CACHE_BLOCK * _CACHE_BLOCK
        ends = [end for end in dict.fromkeys([prompt - 1, prompt, in_blocks]) if end > 0]
        for (by, writer), end in itertools.product(self._writers() if layers else (), ends):
            change = functools.partial(tokens_by, layers, slice(0, end), writer)
            about = "of the base alone" if writer is BASE_ALONE else f"of the adapter {writer}"
            yield self._by_change(TextCause.PREFIX, about, f"{end} tokens of the prompt {by}", change)

    def parts(self) -> Iterator[Alternative]:
        """Yield some layers by the base alone or by another adapter: a search takes many passes."""
        for about, writer in self._writers():
            cause = Cause.LAYERS if writer is BASE_ALONE else TextCause.PARTLY
            yield Alternative(cause=cause, try_it=functools.partial(self._some_layers, about, writer))

    def single_tokens(self) -> Iterator[Alternative]:
        """Yield single tokens that are wrong, where all others are right."""
        yield Alternative(cause=TextCause.SINGLE, try_it=self._all_but_single_tokens)

    def merges(self) -> Iterator[Alternative]:
        """Yield merges in narrower dtypes, which are tried where nothing else explains the text."""
        for cause, ways in merges(self.judged.passes.model).items():
            computes = [functools.partial(self.judged.passes.merged, way) for way in ways]
            yield Alternative(cause=cause, try_it=functools.partial(self._any_merge_fits, computes))

    def penalties(self) -> Iterator[Alternative]:
        """Yield penalties of a sampler, which are tried last: a small one turns few tokens, as rounding does."""
        yield Alternative(cause=TextCause.PENALTY, try_it=self._penalized)

    def _penalized(self) -> Explained | None:
        """Return which usual penalties explain the text; several do, as a few tokens do not tell their size."""
        if self.judged.tokens.penalties.penalizes:
            return None
        fitting, extents = list[str](), set[Extent]()
        for penalties, logits in self.judged.logits_by_penalties(USUAL_PENALTIES):
            explained = self.fits(self.judged.figures_of(logits))
            if explained is not None:
                fitting.append(str(penalties))
                extents.add(explained.extent)
        # log probabilities of the model as it is say nothing of penalties: the tokens have to be explained
        return Explained(extent=Extent.TOKENS, about=tuple(fitting)) if extents == {Extent.TOKENS} else None

    def _by_change(self, cause: Explanation, about: str, name: str, change: Callable[[], Change]) -> Alternative:
        """Return a mistake that a change of the model makes; `name` tells its pass apart."""

        def try_it() -> Explained | None:
            figures = self.judged.figures(self.judged.passes.of(name, change))
            return self.fits(figures, about, lambda: self.judged.under(change))

        return Alternative(cause=cause, try_it=try_it)

    def _by_logits(self, cause: Explanation, about: str, compute: Callable[[], torch.Tensor]) -> Alternative:
        return Alternative(cause=cause, try_it=lambda: self.fits(self.judged.figures(compute()), about))

    def fits(
        self, figures: TokenFigures, about: str = "", again: Callable[[], JudgedText] | None = None
    ) -> Explained | None:
        """Return how a model with these exact figures explains the text; None where it does not.

        Parameters
        ----------
        again : callable, optional
            Judge the text by what rounding does in that model: asked where the text is near to its figures.
        """
        judged = self.judged
        if not judged.is_nearer(figures):
            return None
        are_greedy = bool(judged.fit_greedily(figures).all())
        if not bool(judged.fit_logprobs(figures).all()):
            if again is None or not judged.is_near(figures):
                return None
            by_itself = again()
            ratios = by_itself.logprob_ratios
            if ratios is None or not bool((ratios <= 1).all()):
                return None
            are_greedy = by_itself.is_greedy
        if are_greedy:
            return Explained(extent=Extent.TOKENS, about=(about,))
        has_logprobs = judged.tokens.judged_logprobs is not None
        return Explained(extent=Extent.LOGPROBS, about=(about,)) if has_logprobs else None

    def _any_merge_fits(self, computes: Sequence[Callable[[], torch.Tensor]]) -> Explained | None:
        with suppress(MergeRefusedError):
            for compute in computes:
                explained = self.fits(self.judged.figures(compute()))
                if explained is not None:
                    return explained
        return None

    def _fits_after(self, prompt: Sequence[int], about: str) -> Explained | None:
        """Return how another prompt explains the text."""
        tokens = replace(self.judged.tokens, prompt=list(prompt))
        return self._fits_with(inputs_of(self.judged.passes.model, tokens), about, tokens)

    def _fits_with(self, inputs: Activations, about: str, tokens: Tokens | None = None) -> Explained | None:
        """Return how other inputs explain the text; None where the model takes no such inputs.

        Some models have no positions beyond the text, and some no mask of two dimensions.
        """
        passes = self.judged.passes
        with_inputs = Passes(model=passes.model, inputs=inputs, watch=lambda: None, step=passes.step)
        try:
            logits = with_inputs.of("other inputs", nullcontext)
        except Exception as error:  # model code of any kind may raise anything
            if not is_of_the_model(error, passes.model):
                raise
            return None
        figures = self.judged.figures(logits, tokens)
        return self.fits(figures, about, lambda: self.judged.under(nullcontext, inputs, tokens))

    def _seeing_others(self) -> Explained | None:
        """Return what tokens may have seen that explains the text: several may, where few tokens show it."""
        judged, model = self.judged, self.judged.passes.model
        wrong = [judged.places[number] for number in (~self._fit_each(judged.exact)).nonzero()[:, 0].tolist()]
        fitting, extents = list[str](), list[Extent]()
        for seen in otherwise_seen(model, judged.tokens, wrong):
            explained = self._fits_with(seeing(judged.passes.inputs, seen, _dtype_of(model)), seen.about)
            if explained is not None:
                fitting.append(seen.about)
                extents.append(explained.extent)
        if not fitting:
            return None
        extent = Extent.TOKENS if Extent.TOKENS in extents else Extent.LOGPROBS
        return Explained(extent=extent, about=tuple(fitting))

    def _some_layers(self, by: str, writer: str | None) -> Explained | None:
        """Return the layers that explain the text if another adapter, or the base alone, computed them."""
        passes = self.judged.passes
        known = self.layer_sets.get(by)
        if known is not None:  # of a text before this one: what explains both has to be the same layers
            return None if known is NO_LAYERS else self._fits_by_layers(known, by, writer)
        self.layer_sets[by] = NO_LAYERS
        for groups in _groups_of_layers(passes.model):
            if _is_too_much(groups, passes.model):
                continue
            found = self._searched(groups, by, writer)
            if found is not None:
                self.layer_sets[by] = found
                return self._fits_by_layers(found, by, writer)
        return None

    def _searched(self, groups: Mapping[str, Sequence[Any]], by: str, writer: str | None) -> LayerSet | None:
        """Return the groups that explain the text, by its log probabilities, or else one group by its tokens."""
        wanted = self.judged.tokens.judged_logprobs

        def set_of(names: Collection[str]) -> LayerSet:
            in_order = [name for name in groups if name in names]
            layers = itertools.chain.from_iterable(groups[name] for name in in_order)
            return LayerSet(name=named(in_order), layers=tuple(layers))

        if wanted is None:
            alone = (set_of([name]) for name in groups)
            return next((each for each in alone if self._fits_by_layers(each, by, writer) is not None), None)
        is_given = wanted.isfinite()
        if int(is_given.sum()) < len(groups):
            return None  # fewer equations than there are groups

        def outputs(names: frozenset[str]) -> torch.Tensor:
            return self.judged.figures(self._logits_by_layers(set_of(names), by, writer)).logprobs[is_given]

        def fits(_: object, names: frozenset[str]) -> bool:
            return self._fits_by_layers(set_of(names), by, writer) is not None

        names = search(wanted[is_given], groups, outputs, fits)
        return None if names is None or len(names) == len(groups) else set_of(names)

    def _logits_by_layers(self, layer_set: LayerSet, by: str, writer: str | None) -> torch.Tensor:
        change = functools.partial(layers_by, layer_set.layers, writer)
        return self.judged.passes.of(f"{layer_set.name or 'no layer'} {by}", change)

    def _fits_by_layers(self, layer_set: LayerSet, by: str, writer: str | None) -> Explained | None:
        # the cause of layers without adapter names the layers alone
        about = layer_set.name if writer is BASE_ALONE else f"{layer_set.name} {by}"
        return self.fits(self.judged.figures(self._logits_by_layers(layer_set, by, writer)), about)

    def _all_but_single_tokens(self) -> Explained | None:
        """Return whether single tokens are far outside, none beside another, and all others are right."""
        judged = self.judged
        ratios = judged.logprob_ratios
        if ratios is None:
            ratios = judged.exact.gaps / judged.allowed_gaps
        is_wrong = ~(ratios <= 1)
        are_far = bool((ratios[is_wrong] > _FAR_OUTSIDE).all())
        are_single = not bool((is_wrong[1:] & is_wrong[:-1]).any())
        are_few = _LEAST_SINGLE <= int(is_wrong.sum()) <= _MOST_SINGLE * len(is_wrong)
        if not are_far or not are_single or not are_few:
            return None
        others_are_greedy = bool((judged.exact.gaps <= judged.allowed_gaps)[~is_wrong].all())
        return Explained(extent=Extent.TOKENS if others_are_greedy else Extent.LOGPROBS)

    def _off_from_a_token(self) -> Explained | None:
        """Return the first token that was computed without the adapter, where all from there on explain the text.

        Keys and values of the tokens before it are those with the adapter, as an engine keeps them in its cache.
        """
        judged = self.judged
        layers = layers_by_token(judged.passes.model)
        wrong = (~self._fit_each(judged.exact)).nonzero()[:, 0].tolist()
        if not layers or not wrong or wrong[0] == 0:
            return None
        first_wrong = judged.places[wrong[0]]
        # a few tokens without the adapter may be right by chance before the first that is wrong; 1: the prompt alone
        candidates = [first_wrong - step for step in (0, 1, 2, 3, 5, 8, 13, 21, 34) if first_wrong > step]
        for first_off in dict.fromkeys([*candidates, 1]):
            place = len(judged.tokens.prompt) + first_off - 1
            change = functools.partial(tokens_by, layers, slice(place, None), BASE_ALONE)
            logits = judged.passes.of(f"without the adapter from token {first_off + 1} on", change)
            explained = self.fits(judged.figures(logits), f"token {first_off + 1}")
            if explained is not None:
                return explained
        return None

    def _fit_each(self, figures: TokenFigures) -> torch.Tensor:
        """Report for each token whether it is right by these figures, `(tokens,)`."""
        if self.judged.tokens.judged_logprobs is not None:
            return self.judged.fit_logprobs(figures)
        return self.judged.fit_greedily(figures)


def _groups_of_layers(model: Any) -> list[dict[str, list[Any]]]:
    """Return the adapted layers by their kind and by their block; nothing where all are of one."""
    layers = list(adapted_layers(model))
    return [groups for groups in (by_kind(layers), by_block(layers)) if len(groups) > 1]


def _is_too_much(groups: Mapping[str, Sequence[Any]], model: Any) -> bool:
    """Report whether a search would take too many passes of a large model."""
    return len(groups) * matrix_elements(model) > MOST_WORK


def not_tried(model: Any) -> tuple[str, ...]:
    """Return what is left out for a model of this size, in words."""
    left_out = []
    if any(_is_too_much(groups, model) for groups in _groups_of_layers(model)):
        left_out.append("some layers without the adapter, or with another one")
    merges_left_out = no_merges(model)
    return (*left_out, *([merges_left_out] if merges_left_out else []))


def _dtype_of(model: Any) -> torch.dtype:
    floating = (parameter for parameter in model.parameters() if parameter.is_floating_point())
    parameter: torch.Tensor = next(floating)
    return parameter.dtype


def figures_without_adapter(judged: JudgedText) -> TokenFigures:
    """Return the exact figures of the base alone."""
    return judged.figures(judged.passes.of("without the adapter", judged.passes.model.disable_adapter))
