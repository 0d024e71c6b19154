"""Which layers an engine left without their adapter: found by least squares, then proved by a pass.

Near the outputs that a set of groups without adapter gives, each further group moves the outputs in a direction of its
own. The engine's outputs are a sum of some of these, with a weight of one for each group that it left out too, but for
what the groups do to each other; so weights are taken as one or none by halves, and the search goes on from there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_ROUNDS = 3
"""Rounds of the search: a set that the outputs of three others do not lead to is not found."""

_NEARER = 0.75
"""Part of the distance to the engine's outputs that a round leaves at most, or no further round is made.

Chosen by four mistakes with SmolLM2 in float32: where the groups were those that had been left out, a round left a
sixth or less; of mistakes that are none with layers 0.86 or more, so that further rounds were of no use.
"""

_EQUATIONS = 1 << 16
"""Values of the outputs at most that the weights are found from: far more than there are groups."""

_BLOCK = re.compile(r"^(?P<block>.*?\.(?P<number>\d+))(?:\.|$)")


def by_block(layers: Sequence[tuple[str, Any]]) -> dict[str, list[Any]]:
    """Return adapted layers by the block that they are in; a layer outside all blocks is a group of its own."""
    groups: dict[str, list[Any]] = {}
    for name, layer in layers:
        match = _BLOCK.match(name)
        block = match["block"] if match else name
        groups.setdefault(block, []).append(layer)
    return groups


def by_kind(layers: Sequence[tuple[str, Any]]) -> dict[str, list[Any]]:
    """Return adapted layers by the last part of their name: `q_proj`."""
    groups: dict[str, list[Any]] = {}
    for name, layer in layers:
        groups.setdefault(name.rpartition(".")[2], []).append(layer)
    return groups


def by_name(layers: Sequence[tuple[str, Any]]) -> dict[str, list[Any]]:
    """Return each adapted layer as a group of its own."""
    return {name.removeprefix("base_model.model."): [layer] for name, layer in layers}


def named(groups: Sequence[str]) -> str:
    """Return groups in words: the blocks of one stack as ranges, `layers 0–3, 7`; else the names themselves."""
    matches = [match for match in map(_BLOCK.fullmatch, groups) if match is not None]
    numbers = sorted(int(match["number"]) for match in matches)
    stacks = {match["block"].rpartition(".")[0] for match in matches}
    if len(numbers) < len(groups) or len(stacks) > 1:
        return ", ".join(groups)
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    noun = "layer" if len(numbers) == 1 else "layers"
    return f"{noun} {', '.join(_range_words(first, last) for first, last in ranges)}"


def _range_words(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}–{last}"


def search(
    wanted: torch.Tensor,
    groups: Mapping[str, Sequence[Any]],
    outputs: Callable[[frozenset[str]], torch.Tensor],
    fits: Callable[[torch.Tensor, frozenset[str]], bool],
) -> frozenset[str] | None:
    """Return the groups without which the model answers as wanted; None where no such set is found.

    Parameters
    ----------
    wanted : torch.Tensor
        The engine's outputs, float64.
    outputs : callable
        Return the model's outputs without the adapter in some groups.
    fits : callable
        Report whether the outputs without the adapter in some groups, and these groups, explain the engine's.
    """
    left_out: frozenset[str] = frozenset()
    tried = set()
    names = list(groups)
    farthest = math.inf
    for _ in range(_ROUNDS):
        present = outputs(left_out)
        distance = _sampled(wanted - present)
        # "not less" lets a distance that is NaN end the search too
        if not float(distance.norm()) <= farthest:
            return None
        farthest = _NEARER * float(distance.norm())
        # how the outputs move where one group more, or one less, is left out: a column for each
        moves = torch.stack([_sampled(outputs(left_out ^ {name}) - present) for name in names], dim=-1)
        weights = torch.linalg.lstsq(moves, distance.unsqueeze(-1), driver="gelsd").solution.reshape(-1)
        tried.add(left_out)
        changed = [name for name, weight in zip(names, weights, strict=True) if float(weight) > 0.5]
        left_out = left_out ^ frozenset(changed)
        if left_out in tried:
            return None
        if left_out and fits(outputs(left_out), left_out):
            return left_out
    return None


def _sampled(values: torch.Tensor) -> torch.Tensor:
    """Return values at equal distances, about as many as there are equations at most."""
    return values.reshape(-1)[:: max(1, values.numel() // _EQUATIONS)]
