"""What could explain a text that is wrong: mistakes with the adapter, other adapters, other prompts, other positions.

Each is a float64 pass of the model with the mistake in it, and is computed when it is asked for. It explains a text if
all of it is then what the model gives: the log probabilities where they came with the text, else each token the most
likely one, within what rounding may do.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from consistency.capture.explanation import Explanation
from consistency.extras.serving.check_text.judged_text import JudgedText, TokenFigures, inputs_of
from consistency.extras.serving.check_text.penalties import USUAL_PENALTIES
from consistency.extras.serving.check_text.prompts import other_prompts
from consistency.extras.serving.check_text.text_causes import TextCause
from consistency.extras.serving.check_text.texts import Text
from consistency.extras.serving.engine_outputs.explanations import merges, mistakes
from consistency.extras.serving.engine_outputs.passes import Change, Passes
from consistency.worker.model.merging import MergeRefusedError, adapted_layers
from consistency.worker.model.running import base_of

_ROTARY_BASES = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0)
"""Bases of rotary positions that models commonly have."""


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
class AskedText:
    """A text that is to be explained.

    Attributes
    ----------
    text : Text
        The text as it was given, from which other prompts are made.
    others : sequence of str
        Names under which other adapters are loaded into the model.
    """

    text: Text
    judged: JudgedText
    tokenizer: Any
    others: Sequence[str] = ()

    def alternatives(self) -> Iterator[Alternative]:
        """Yield what may explain the text, mistakes of one pass first."""
        judged, model = self.judged, self.judged.passes.model
        base_alone = None
        if can_disable(model):
            base_alone = functools.partial(judged.passes.of, "without the adapter", model.disable_adapter)
        for name in self.others:
            of_other = functools.partial(judged.passes.of, f"adapter {name}", functools.partial(active, model, name))
            yield self._by_logits(TextCause.OTHER_ADAPTER, name, of_other)
        for cause, about, compute in mistakes(judged.passes, base_alone):
            yield self._by_logits(cause, about, compute)
        if base_alone is not None:
            yield Alternative(cause=TextCause.OFF_FROM, try_it=self._off_from_a_token)
        for wrong_prompt, about, prompt in other_prompts(self.text, judged.tokens, self.tokenizer, model):
            yield Alternative(cause=wrong_prompt, try_it=functools.partial(self._fits_after, prompt, about))
        for about, change in _other_positions(base_of(model)):
            yield self._by_logits(TextCause.ROTARY, about, functools.partial(judged.passes.of, about, change))

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

    def _by_logits(self, cause: Explanation, about: str, compute: Callable[[], torch.Tensor]) -> Alternative:
        return Alternative(cause=cause, try_it=lambda: self.fits(self.judged.figures(compute()), about))

    def fits(self, figures: TokenFigures, about: str = "") -> Explained | None:
        """Return how a model with these exact figures explains the text; None where it does not."""
        if not bool(self.judged.fit_logprobs(figures).all()):
            return None
        if bool(self.judged.fit_greedily(figures).all()):
            return Explained(extent=Extent.TOKENS, about=(about,))
        has_logprobs = self.judged.tokens.judged_logprobs is not None
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
        judged = self.judged
        tokens = replace(judged.tokens, prompt=list(prompt))
        passes = Passes(
            model=judged.passes.model,
            inputs=inputs_of(judged.passes.model, tokens),
            watch=lambda: None,
            step=judged.passes.step,
        )
        return self.fits(judged.figures(passes.of("another prompt", _unchanged), tokens), about)

    def _off_from_a_token(self) -> Explained | None:
        """Return the first token that was computed without the adapter, where all from there on explain the text.

        Keys and values of the tokens before it are those with the adapter, as an engine keeps them in its cache.
        """
        judged = self.judged
        layers = _layers_by_token(judged.passes.model)
        wrong = (~self._fit_each(judged.exact)).nonzero()[:, 0].tolist()
        if not layers or not wrong or wrong[0] == 0:
            return None
        first_wrong = judged.places[wrong[0]]
        # a few tokens without the adapter may be right by chance before the first that is wrong; 1: the prompt alone
        candidates = [first_wrong - step for step in (0, 1, 2, 3, 5, 8, 13, 21, 34) if first_wrong > step]
        for first_off in dict.fromkeys([*candidates, 1]):
            place = len(judged.tokens.prompt) + first_off - 1
            change = functools.partial(_off_from, layers, place)
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


def _layers_by_token(model: Any) -> list[Any]:
    """Return the adapted layers; none where some compute otherwise than token by token, or the model has an encoder."""
    config = getattr(base_of(model), "config", None)
    layers = [layer for _, layer in adapted_layers(model)]
    if getattr(config, "is_encoder_decoder", False) or any(hasattr(layer, "get_param") for layer in layers):
        return []
    return layers


@contextmanager
def _off_from(layers: Sequence[Any], place: int) -> Iterator[None]:
    """Let layers compute without the adapter from a place of the sequence on."""

    def mixed(layer: Any, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        without = layer.get_base_layer()(args[0])
        return torch.cat([output[:, :place], without[:, place:]], 1)

    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_hook(mixed).remove)
        yield


def can_disable(model: Any) -> bool:
    """Report whether PEFT can disable the adapter."""
    return hasattr(model, "disable_adapter")


@contextmanager
def active(model: Any, name: str) -> Iterator[None]:
    """Let another adapter be the active one."""
    before = model.active_adapter
    model.set_adapter(name)
    try:
        yield
    finally:
        model.set_adapter(before)


@contextmanager
def _unchanged() -> Iterator[None]:
    yield


def _other_positions(base: Any) -> Iterator[tuple[str, Callable[[], Change]]]:
    """Yield other rotary positions: their name, and what computes with them."""
    rotaries = [module for module in base.modules() if isinstance(getattr(module, "inv_freq", None), torch.Tensor)]
    if not rotaries or any(module.inv_freq.dim() != 1 for module in rotaries):
        return
    tables = [module.inv_freq for module in rotaries]
    own_base = _base_of_positions(tables[0])
    for rotary_base in _ROTARY_BASES:
        others = [_frequencies(table, rotary_base) for table in tables]
        is_own = all(torch.allclose(table, other, rtol=1e-4) for table, other in zip(tables, others, strict=True))
        if not is_own:
            name = f"rotary positions of base {rotary_base:,.0f} (here {own_base:,.0f})"
            yield name, functools.partial(_positions_by, rotaries, others)


def _base_of_positions(table: torch.Tensor) -> float:
    """Return the base that the second frequency of a table is of, as it would be without scaling."""
    if len(table) < 2:
        return 1.0
    return math.pow(float(table[1] / table[0]), -len(table))


def _frequencies(table: torch.Tensor, rotary_base: float) -> torch.Tensor:
    exponents = torch.arange(len(table), dtype=torch.float32) / len(table)
    return (1.0 / rotary_base**exponents).to(table.dtype)


@contextmanager
def _positions_by(rotaries: Sequence[Any], tables: Sequence[torch.Tensor]) -> Iterator[None]:
    with ExitStack() as stack:
        for module, table in zip(rotaries, tables, strict=True):
            stack.enter_context(mock.patch.object(module, "inv_freq", table))
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Causes:
    """What explains texts.

    Attributes
    ----------
    about : dict
        What each cause is about, such as the name of an adapter; empty where it is about nothing.
    extent : Extent
        Whether all texts are explained as they are, or the log probabilities of some alone.
    """

    about: dict[Explanation, str]
    extent: Extent


def causes_of(asked: Sequence[AskedText], *, greedily: bool = False) -> Causes | None:
    """Return what explains each of these texts; None where nothing does.

    Merges are tried where nothing else explains them, and penalties where no merge does either.

    Parameters
    ----------
    greedily : bool
        Whether every token has to be the most likely one.
    """
    kinds = [AskedText.alternatives, AskedText.merges]
    if not greedily:
        kinds.append(AskedText.penalties)
    for alternatives_of in kinds:
        causes = _causes_by(alternatives_of, asked, greedily=greedily)
        if causes is not None:
            return causes
    return None


def _causes_by(
    alternatives_of: Callable[[AskedText], Iterator[Alternative]], asked: Sequence[AskedText], *, greedily: bool
) -> Causes | None:
    common: dict[Explanation, tuple[str, ...]] | None = None
    fits: dict[Explanation, set[Extent]] = {}
    for each in asked:
        found = _explaining_one(alternatives_of(each), common, greedily=greedily)
        about = {cause: explained.about for cause, explained in found.items()}
        common = about if common is None else _common(common, about)
        if not common:
            return None  # a pass takes long, and no cause is left that could explain all texts
        for cause, explained in found.items():
            fits.setdefault(cause, set()).add(explained.extent)
    if not common:
        return None
    are_drawn = any(Extent.LOGPROBS in fits[cause] for cause in common)
    likeliest = {cause: about_what[0] for cause, about_what in common.items()}
    return Causes(about=likeliest, extent=Extent.LOGPROBS if are_drawn else Extent.TOKENS)


def _explaining_one(
    alternatives: Iterator[Alternative], common: Container[Explanation] | None, *, greedily: bool
) -> dict[Explanation, Explained]:
    """Return what explains one text, among what explains the texts before it."""
    found: dict[Explanation, Explained] = {}
    for alternative in alternatives:
        is_ruled_out = common is not None and alternative.cause not in common
        if is_ruled_out or alternative.cause in found:
            continue
        explained = alternative.try_it()
        if explained is None or (greedily and explained.extent is not Extent.TOKENS):
            continue
        found[alternative.cause] = explained
    return found


def _common(
    before: dict[Explanation, tuple[str, ...]], about: dict[Explanation, tuple[str, ...]]
) -> dict[Explanation, tuple[str, ...]]:
    """Return the causes of both, about what both may be about; a token is left open where it differs by text."""
    common: dict[Explanation, tuple[str, ...]] = {}
    for cause, of_others in before.items():
        of_both = tuple(each for each in of_others if each in about.get(cause, ()))
        if of_both:
            common[cause] = of_both
        elif cause in about and cause is TextCause.OFF_FROM:
            common[cause] = (_SOME_TOKEN,)
    return common


_SOME_TOKEN = "a token that differs from text to text"
"""What stands for a token that differs from text to text."""


def figures_without_adapter(judged: JudgedText) -> TokenFigures:
    """Return the exact figures of the base alone."""
    return judged.figures(judged.passes.of("without the adapter", judged.passes.model.disable_adapter))
