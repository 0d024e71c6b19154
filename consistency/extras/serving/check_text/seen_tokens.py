"""Inputs with which a model sees other tokens than it has to, or has them at other positions."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from consistency.extras.serving.check_text.texts import Tokens
from consistency.worker.model.running import Activations, base_of

_LEAST_WINDOW = 4
"""Tokens that a window has, at least."""

_SHIFTED = {
    "one further from the first token of the text on": (0, 1),
    "one lower from the first token of the text on": (0, -1),
    "counted from 1 on": (1, 1),
}
"""Two numbers for each kind of positions: the first is added to those of the prompt, the second to the text's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenKeys:
    """Which tokens each token sees, of itself and those before it.

    Attributes
    ----------
    about : str
        The same in words.
    window : int
        So many of the last ones; 0 for all.
    dropped : int
        So many of the first ones are not seen.
    dropped_by : int
        Position of the first token that does not see these, from 0 on.
    """

    about: str
    window: int = 0
    dropped: int = 0
    dropped_by: int = 0

    def mask(self, count: int) -> torch.Tensor:
        """Return which keys each query sees, `(count, count)`."""
        queries, keys = torch.arange(count)[:, None], torch.arange(count)[None]
        is_seen = keys <= queries
        if self.window:
            is_seen &= keys > queries - self.window
        if self.dropped:
            is_seen &= ~((keys < self.dropped) & (queries >= self.dropped_by))
        return is_seen


def otherwise_seen(model: Any, tokens: Tokens, wrong_places: Sequence[int]) -> Iterator[SeenKeys]:
    """Yield what each token may have seen: another window, or none, or a cache that has lost its beginning.

    Both show by the first token that is wrong, as all before it are within the window, or were there before the loss.

    Parameters
    ----------
    wrong_places : sequence of int
        Places of the text, from 0 on, whose token is wrong: the first one at first.
    """
    config = getattr(base_of(model), "config", None)
    own = getattr(config, "sliding_window", None) or 0
    length = len(tokens.prompt) + len(tokens.ids)
    if 0 < own < length:
        yield SeenKeys(about=f"all tokens before it, and not the last {own} alone")
    if not wrong_places:
        return
    last_seen = len(tokens.prompt) + wrong_places[0] - 1
    if wrong_places[0] == 0:  # the prompt is longer than the window, whose size nothing shows
        sizes = [2**power for power in range(2, last_seen.bit_length()) if 2**power <= last_seen]
    else:
        # a few tokens may be right by chance
        sizes = [last_seen - step for step in (0, 1, 2, 3, 5, 8)]
    for size in sizes:
        if size >= _LEAST_WINDOW and size != own:
            yield SeenKeys(about=f"the last {size} tokens alone", window=size)
    if wrong_places[0] > 0:  # a prompt that has lost its beginning is another prompt
        yield from _without_beginning(last_seen, has_logprobs=tokens.logprobs is not None)


def _without_beginning(last_seen: int, *, has_logprobs: bool) -> Iterator[SeenKeys]:
    """Yield caches that have lost their first tokens before the token at a position was computed."""
    # a log probability is right by chance nowhere, and a token may be
    steps = (0,) if has_logprobs else (0, 1, 2, 4)
    for step in steps:
        for power in range((last_seen - step).bit_length()):
            count = 2**power
            if count < last_seen - step:
                about = f"all tokens but the first {count}, from some token on"
                yield SeenKeys(about=about, dropped=count, dropped_by=last_seen - step)


def seeing(inputs: Activations, seen: SeenKeys, dtype: torch.dtype) -> Activations:
    """Return inputs with which each token sees so much."""
    count = inputs["input_ids"].shape[1]
    hidden = torch.finfo(dtype).min
    mask = torch.zeros(1, 1, count, count, dtype=dtype).masked_fill(~seen.mask(count), hidden)
    return {**inputs, "attention_mask": mask}


def other_positions(model: Any, tokens: Tokens, inputs: Activations) -> Iterator[tuple[str, Activations]]:
    """Yield inputs with other positions: in words, and the inputs; none where the model takes no positions."""
    if "position_ids" not in inspect.signature(base_of(model).forward).parameters:
        return
    count = inputs["input_ids"].shape[1]
    positions = torch.arange(count)
    for name, (of_prompt, of_text) in _SHIFTED.items():
        shifted = positions + torch.where(positions < len(tokens.prompt), of_prompt, of_text)
        yield name, {**inputs, "position_ids": shifted[None]}
