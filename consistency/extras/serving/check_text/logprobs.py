"""What the log probabilities of a text may be, besides the model's own: taken after a temperature, or without the end.

An engine's sampler divides logits by a temperature, and masks the end of the text where it is told to go on. Some
engines give the log probabilities of what is left, which a trainer then takes for the model's. Both have a closed form
in the exact logits, so each is one more figure of the same passes, with its own rounding error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

MASKED_END = "the end of the text masked"

_LEAST_TOKENS = 4
"""A temperature is fitted to the text: of fewer tokens nearly any log probabilities are those of some temperature."""

_MOST_FITTED = 16
"""Tokens that a temperature is fitted to; it is then held against all."""

_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 0.05, 10.0
_TEMPERATURE_STEP = 1.1
"""Factor between temperatures of the coarse search."""

_DIGITS = (1, 2, 3)
"""Decimals of a temperature that somebody sets: the fewest that fit name it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobWay:
    """A way to take log probabilities from logits: `name` follows "with" in a report."""

    name: str
    temperature: float = 1.0
    is_end_masked: bool = False

    def of(self, logits: torch.Tensor, without_ends: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return the log probability of each token that was chosen, `(tokens, 1)`.

        Parameters
        ----------
        logits, without_ends : torch.Tensor
            `(tokens, vocabulary)`: as the model gives them, and with the end ruled out where the text goes on.
        chosen : torch.Tensor
            `(tokens,)`: the ids of the text.
        """
        if self.is_end_masked:
            logits = without_ends
        return (logits / self.temperature).log_softmax(-1).gather(1, chosen[:, None])


MODEL = LogprobWay(name="")
"""The model's own log probabilities."""


def ways_of(
    logprobs: list[float] | None, logits: torch.Tensor, without_ends: torch.Tensor, chosen: torch.Tensor
) -> list[LogprobWay]:
    """Return the model's own way first, and then others that the log probabilities of a text may be taken in.

    The model's way alone where no log probabilities came with the text.
    """
    ways = [MODEL]
    if logprobs is None:
        return ways
    masks_end = not torch.equal(logits, without_ends)
    if masks_end:
        ways.append(LogprobWay(name=MASKED_END, is_end_masked=True))
    if len(logprobs) < _LEAST_TOKENS:
        return ways
    wanted = torch.tensor(logprobs, dtype=torch.float64)
    for temperature in _temperatures(wanted, logits, chosen):
        ways.append(LogprobWay(name=f"temperature {temperature:g}", temperature=temperature))
    if not masks_end:
        return ways
    for temperature in _temperatures(wanted, without_ends, chosen):
        name = f"temperature {temperature:g} and {MASKED_END}"
        ways.append(LogprobWay(name=name, temperature=temperature, is_end_masked=True))
    return ways


def _temperatures(wanted: torch.Tensor, logits: torch.Tensor, chosen: torch.Tensor) -> list[float]:
    """Return the temperature whose log probabilities are nearest to those wanted, to one, two and three decimals.

    0 and 1 are left out: the one is no temperature, and the other is the model's own way.
    """
    # the least likely tokens: where a token is certain at any temperature, nothing is learned of it
    fitted = wanted.argsort()[:_MOST_FITTED]
    wanted, logits, chosen = wanted[fitted], logits[fitted], chosen[fitted]

    def squared_error(temperature: float) -> float:
        way = LogprobWay(name="", temperature=temperature)
        return float((way.of(logits, logits, chosen)[:, 0] - wanted).square().sum())

    count = math.ceil(math.log(_MOST_TEMPERATURE / _LEAST_TEMPERATURE, _TEMPERATURE_STEP))
    coarse = [_LEAST_TEMPERATURE * _TEMPERATURE_STEP**number for number in range(count)]
    nearest = min(coarse, key=squared_error)
    # then thirds: between two neighbours of the nearest one the error has one minimum
    low, high = nearest / _TEMPERATURE_STEP, nearest * _TEMPERATURE_STEP
    while high - low > 1e-5 * nearest:  # finer than the last decimal that is tried
        third = (high - low) / 3
        if squared_error(low + third) < squared_error(high - third):
            high -= third
        else:
            low += third
    rounded = dict.fromkeys(round((low + high) / 2, digits) for digits in _DIGITS)
    return [temperature for temperature in rounded if temperature not in (0.0, 1.0)]
