"""What explains several wrong texts together: each cause has to explain all of them.

Causes are tried on the first text, and those that explain it on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

from consistency.capture.explanation import Explanation
from consistency.extras.serving.causes import Cause
from consistency.extras.serving.check_text.alternatives import Alternative, AskedText, Explained, Extent
from consistency.extras.serving.check_text.text_causes import TextCause
from consistency.extras.serving.check_text.told_weights import told_weights

Step = tuple[Callable[[AskedText], Iterator[Alternative]], ...]
"""What yields mistakes that are tried together."""


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

    Merges are tried where no mistake of another kind explains them, then weights in few bits, layers and penalties.
    Single tokens come first where log probabilities say that all others are right, and else last.

    Parameters
    ----------
    greedily : bool
        Whether every token has to be the most likely one.
    """
    # a mistake with all of the model moves all log probabilities, but turns a few tokens alone
    have_logprobs = all(each.judged.tokens.judged_logprobs is not None for each in asked)
    before = [(AskedText.single_tokens,)] if have_logprobs and not greedily else []
    causes = _first_causes([*before, _MISTAKES, (AskedText.merges,)], asked, greedily=greedily)
    if causes is not None or greedily:
        return causes
    weights = told_weights(asked)
    if weights is not None:
        return Causes(about={Cause.WEIGHTS: weights.about[0]}, extent=weights.extent)
    after = [] if have_logprobs else [(AskedText.single_tokens,)]
    return _first_causes([(AskedText.parts,), (AskedText.penalties,), *after], asked, greedily=False)


def _first_causes(steps: Sequence[Step], asked: Sequence[AskedText], *, greedily: bool) -> Causes | None:
    """Return what explains the texts in the first step that explains them; None where none does."""
    for step in steps:
        causes = _causes_by(step, asked, greedily=greedily)
        if causes is not None:
            return causes
    return None


_SLIGHT: frozenset[Explanation] = frozenset(
    {TextCause.PREFIX, TextCause.PROMPT_PADDED, TextCause.WINDOW, TextCause.POSITIONS, Cause.FREQUENCIES}
)
"""Mistakes of which many are tried and some change little: by chance one may make the few tokens of a healthy text that
were drawn the most likely ones. So they are named only where something is wrong without them."""

_MISTAKES: Step = (AskedText.with_adapters, AskedText.with_prompts, AskedText.with_positions)


def _causes_by(step: Step, asked: Sequence[AskedText], *, greedily: bool) -> Causes | None:
    common: dict[Explanation, tuple[str, ...]] | None = None
    fits: dict[Explanation, set[Extent]] = {}
    for each in asked:
        found = _explaining_one(each, step, common, greedily=greedily)
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
    asked: AskedText, step: Step, common: Container[Explanation] | None, *, greedily: bool
) -> dict[Explanation, Explained]:
    """Return what explains one text, among what explains the texts before it."""
    found: dict[Explanation, Explained] = {}
    for alternatives_of in step:
        for alternative in alternatives_of(asked):
            is_ruled_out = common is not None and alternative.cause not in common
            is_too_slight = greedily and alternative.cause in _SLIGHT
            if is_ruled_out or is_too_slight or alternative.cause in found:
                continue
            explained = alternative.try_it()
            if explained is None or (greedily and explained.extent is not Extent.TOKENS):
                continue
            found[alternative.cause] = explained
        if found and asked.tells_apart():
            break  # a pass takes long, and no other mistake can explain the text too
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
        elif cause in about and cause in _DIFFERS_BY_TEXT:
            common[cause] = (_DIFFERS_BY_TEXT[cause],)
    return common


_DIFFERS_BY_TEXT: dict[Explanation, str] = {
    TextCause.OFF_FROM: "a token that differs from text to text",
    TextCause.PROMPT_PADDED: "a number of tokens that differs from text to text",
}
"""What stands for the subject of a cause where each text has its own."""
