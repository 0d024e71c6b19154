r"""What texts tell beside their verdict: which adapter wrote each, what they lean to, and how much more would tell.

**Which of two.** With d the distance of a log probability from that of an adapter's pass, in units of the standard
deviation :math:`\sigma` of two healthy passes, :math:`\chi^2 = \sum d^2 / \sigma^2`, and :math:`D^2` the same sum over
the distances of the two adapters' passes from each other: for a text of the second adapter
:math:`\chi_2^2 - \chi_1^2` has the mean :math:`-D^2` and the standard deviation 2 D. So the second is ruled out where
it is more than `_DEVIATIONS` of these above its mean, and the first in the same way. The deviation is taken twice as
large as passes show it: a device may round in other ways (`numerics.rules.LEAST_FACTOR`). The sum over tokens of the
product of both distances, whose deviation that is, has in it what single tokens differ by, where rounding makes more of
these than of most: it is at least that of a sum of these products with signs by chance. An error that all log
probabilities of a text have alike adds to that sum, and may be as large as rounding makes it.

Of tokens that were drawn, the likelihood tells: the chance that a model writes a text to which another one gives c
times its own probability is 1/c at most (Markov), so c is `1 / FALSE_ALARM`.

**Leaning.** The difference d of log probabilities from the exact ones, regressed on what leaving the adapter out would
change: the coefficient is 0 for the right model, 1 for the base alone, and -0.1 where the adapter is applied 1.1 times.
Its standard error is taken between texts, as errors in one text depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from consistency.extras.serving.check_text.judged_text import JudgedText, TokenFigures
from consistency.extras.serving.check_text.screening import PlainText, Screen
from consistency.numerics.error_spread import student
from consistency.numerics.rules import FALSE_ALARM, LEAST_FACTOR

_DEVIATIONS = 6.0
"""Standard deviations that chance does not reach: a normal deviate exceeds them once in 10⁹."""

_MOST_HEALTHY = 4.0
"""Ratio of the screen up to which a difference is taken for one of rounding."""

_LEAST_TEXTS = 4
"""Texts from which on a leaning is looked for: its error is taken between texts."""

_LEAST_LEANING = 0.05
"""Part of the adapter's effect from which on a leaning is said: a merge that is rounded moves it by less."""

_EXPECTED = 3.0
"""Tokens that are expected to tell, where one is seen with 95 percent."""


def written_by(plain_texts: Mapping[str, PlainText], screen: Screen, *, is_sampled: bool, far: float) -> str:
    """Return the name of the adapter that wrote a text; empty where none or several may have written it.

    Parameters
    ----------
    plain_texts : mapping
        The text in one pass with each adapter.
    is_sampled : bool
        Tokens were drawn by chance: so they are not held against the most likely ones.
    far : float
        Ratio of the screen over which an adapter did not write it.
    """
    has_logprobs = any(plain.differences is not None for plain in plain_texts.values())
    if is_sampled and not has_logprobs:
        return _likeliest(plain_texts)
    possible = [name for name, plain in plain_texts.items() if screen.ratio(plain) <= far]
    if has_logprobs:
        possible = [
            name
            for name in possible
            if not any(_is_ruled_out(plain_texts[name], other, screen) for other in plain_texts.values())
        ]
    return possible[0] if len(possible) == 1 else ""


def _likeliest(plain_texts: Mapping[str, PlainText]) -> str:
    sums = {name: float(plain.figures.logprobs.sum()) for name, plain in plain_texts.items()}
    first, *others = sorted(sums, key=lambda name: -sums[name])
    is_told = all(sums[first] - sums[other] > -math.log(FALSE_ALARM) for other in others)
    return first if is_told else ""


def _is_ruled_out(plain: PlainText, other: PlainText, screen: Screen) -> bool:
    """Report whether log probabilities are nearer to another adapter's than chance explains."""
    own_distances, other_distances = plain.differences, other.differences
    if own_distances is None or other_distances is None:
        return False
    # two passes, each with its own rounding
    deviations = LEAST_FACTOR * math.sqrt(2) * screen.deviation * plain.figures.weights + _TINY
    own, of_other = (distances.nan_to_num(0.0) / deviations for distances in (own_distances, other_distances))
    apart = (own_distances - other_distances).nan_to_num(0.0) / deviations
    distance = float(apart.square().sum())
    if distance == 0:
        return False
    # rounding may make more of single tokens than of most: then what they differ by is their deviation
    ratios = screen.logprob_ratios(plain)
    assert ratios is not None
    healthy = own * (_MOST_HEALTHY / ratios.clamp_min(_MOST_HEALTHY))
    by_tokens = LEAST_FACTOR * float((apart * healthy).square().sum().sqrt())
    deviation = 2 * max(math.sqrt(distance), by_tokens)
    # an error that all log probabilities have alike, as that of a softmax's sum, does not average out
    by_all = 2 * screen.error_of_all(plain) * abs(float((apart / deviations).sum()))
    return float(own.square().sum() - of_other.square().sum()) > -distance + _DEVIATIONS * deviation + by_all


_TINY = 1e-9
"""Difference that nobody asks about: of a token that is certain both passes have a log probability of zero, nearly."""


def leaning_to(differences: Sequence[torch.Tensor], directions: Sequence[torch.Tensor]) -> str:
    """Return in words to which scaling of the adapter log probabilities lean; empty where to none that is certain.

    Parameters
    ----------
    differences : sequence of torch.Tensor
        `(tokens,)` for each text: log probabilities that came with it minus the exact ones.
    directions : sequence of torch.Tensor
        `(tokens,)` for each text: what leaving the adapter out would change.
    """
    pairs = list(zip(differences, directions, strict=True))
    if len(pairs) < _LEAST_TEXTS:
        return ""
    products = torch.stack([(d * direction).sum() for d, direction in pairs])
    squares = torch.stack([direction.square().sum() for _, direction in pairs])
    total = float(squares.sum())
    if total == 0 or not math.isfinite(float(products.sum())):
        return ""
    leaning = float(products.sum()) / total
    error = math.sqrt(float((products - leaning * squares).square().sum())) / total
    certain = student(len(pairs) - 1) * error
    if abs(leaning) <= max(certain, _LEAST_LEANING):
        return ""
    return (
        f"the log probabilities lean to another scaling of the adapter: as if it were {1 - leaning:.2f} of what it is "
        f"(± {error:.2f})"
    )


def can_lean(differences: Sequence[torch.Tensor], directions: Sequence[torch.Tensor]) -> bool:
    r"""Report whether log probabilities may lean to another scaling, by the directions of some of the texts alone.

    The leaning of all is at most :math:`\lVert d \rVert / \lVert g \rVert` (Cauchy and Schwarz), with d all differences
    and g all directions, and the norm of all directions is at least that of some.

    Parameters
    ----------
    differences : sequence of torch.Tensor
        As for `leaning_to`, of all texts.
    directions : sequence of torch.Tensor
        As for `leaning_to`, of the first texts.
    """
    of_differences, of_directions = (float(torch.cat(list(parts)).norm()) for parts in (differences, directions))
    return not of_differences <= _LEAST_LEANING * of_directions


def tokens_to_tell(texts: Sequence[JudgedText], others: Sequence[TokenFigures]) -> int | None:
    """Return how many tokens more would tell another model's texts from the right one's; None where it is not known.

    Of log probabilities the squared distance of the two, in units of rounding, grows with the number of tokens. Of
    tokens alone, one tells where the change of a margin exceeds a margin and what rounding makes of it: both are of
    these texts, each change beside each margin.
    """
    count = sum(len(text.exact.gaps) for text in texts)
    with_logprobs = all(text.tokens.judged_logprobs is not None for text in texts)
    rate = _rate_of_logprobs(texts, others) if with_logprobs else _rate_of_tokens(texts, others)
    if rate <= 0:
        return None
    wanted = math.ceil(1 / rate)
    return max(1, wanted - count)


def _rate_of_logprobs(texts: Sequence[JudgedText], others: Sequence[TokenFigures]) -> float:
    """Return which part of telling the two apart one token does."""
    screen = Screen.of(texts)
    distance = tokens = 0.0
    for text, other in zip(texts, others, strict=True):
        deviations = LEAST_FACTOR * math.sqrt(2) * screen.deviation * text.exact.weights + _TINY
        distance += float(((other.logprobs - text.exact.logprobs) / deviations).square().sum())
        tokens += len(deviations)
    return distance / tokens / (2 * _DEVIATIONS) ** 2


def _rate_of_tokens(texts: Sequence[JudgedText], others: Sequence[TokenFigures]) -> float:
    margins = torch.cat([text.exact.margins + text.allowed_gaps for text in texts]).sort().values
    changes = torch.cat([(other.margins - text.exact.margins).abs() for text, other in zip(texts, others, strict=True)])
    exceeded = torch.searchsorted(margins, changes).to(torch.float64) / len(margins)
    # half of the changes go the other way, and make a margin larger
    return float(exceeded.mean()) / 2 / _EXPECTED
