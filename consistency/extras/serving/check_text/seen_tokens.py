"""Inputs with which a model sees other tokens than it has to, or has them at other positions."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
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


def other_windows(model: Any, tokens: Tokens, wrong_places: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield what each token may have seen: in words, and how many tokens, 0 for all.

    A window shows by the first token that is wrong, as all before it are within the window.

    Parameters
    ----------
    wrong_places : sequence of int
        Places of the text, from 0 on, whose token is wrong: the first one at first.
    """
    config = getattr(base_of(model), "config", None)
    own = getattr(config, "sliding_window", None) or 0
    length = len(tokens.prompt) + len(tokens.ids)
    if 0 < own < length:
        yield f"all tokens before it, and not the last {own} alone", 0
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
            yield f"the last {size} tokens alone", size


def seeing(inputs: Activations, window: int, dtype: torch.dtype) -> Activations:
    """Return inputs with which each token sees so many tokens, itself among them; 0 for all."""
    count = inputs["input_ids"].shape[1]
    queries, keys = torch.arange(count)[:, None], torch.arange(count)[None]
    is_seen = keys <= queries
    if window:
        is_seen &= keys > queries - window
    mask = torch.zeros(1, 1, count, count, dtype=dtype).masked_fill(~is_seen, torch.finfo(dtype).min)
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
