"""Which layers an engine left without their adapter: found by least squares, then proved by a pass.

Near the outputs that a set of groups without adapter gives, each further group moves the outputs in a direction of its
own. The engine's outputs are a sum of some of these, with a weight of one for each group that it left out too, but for
what the groups do to each other; so weights are taken as one or none by halves, and the search goes on from there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_ROUNDS = 3
"""Of the search: a set that the outputs of three others do not lead to is not found."""

_EQUATIONS = 1 << 16
"""Values of the outputs at most that the weights are found from: far more than there are groups."""

_BLOCK = re.compile(r"^(?P<block>.*?\.(?P<number>\d+))(?:\.|$)")


def by_block(layers: Sequence[tuple[str, Any]]) -> dict[str, list[Any]]:
    """Return adapted layers by the block that they are in; one outside all blocks is a group of its own."""
    found: dict[str, list[Any]] = {}
    for name, layer in layers:
        match = _BLOCK.match(name)
        found.setdefault(match["block"] if match else name, []).append(layer)
    return found


def by_kind(layers: Sequence[tuple[str, Any]]) -> dict[str, list[Any]]:
    """Return adapted layers by the last part of their name: `q_proj`."""
    found: dict[str, list[Any]] = {}
    for name, layer in layers:
        found.setdefault(name.rpartition(".")[2], []).append(layer)
    return found


def by_name(layers: Sequence[tuple[str, Any]]) -> dict[str, list[Any]]:
    """Return each adapted layer as a group of its own."""
    return {name.removeprefix("base_model.model."): [layer] for name, layer in layers}


def named(groups: Sequence[str]) -> str:
    """Return groups for people: blocks that follow each other as a range."""
    blocks = [_BLOCK.fullmatch(name) for name in groups]
    numbers = sorted(int(block["number"]) for block in blocks if block is not None)
    stems = {block["block"].rpartition(".")[0] for block in blocks if block is not None}
    if len(numbers) < len(groups) or len(stems) > 1:
        return ", ".join(groups)
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    text = ", ".join(f"{first}" if first == last else f"{first}–{last}" for first, last in ranges)
    return f"{'layer' if len(numbers) == 1 else 'layers'} {text}"


def search(
    wanted: torch.Tensor,
    groups: Mapping[str, Sequence[Any]],
    outputs: Callable[[frozenset[str]], torch.Tensor],
    fits: Callable[[torch.Tensor], bool],
) -> frozenset[str] | None:
    """Return the groups without which the model answers as wanted; None where no such set is found.

    Parameters
    ----------
    wanted : torch.Tensor
        The engine's outputs, float64.
    outputs : callable
        Gives the model's without some groups.
    fits : callable
        Whether outputs explain the engine's.
    """
    chosen: frozenset[str] = frozenset()
    tried = set()
    for _ in range(_ROUNDS):
        here = outputs(chosen)
        names = list(groups)
        moves = torch.stack([_some(outputs(chosen ^ {name}) - here) for name in names], dim=-1)
        weights = torch.linalg.lstsq(moves, _some(wanted - here).unsqueeze(-1), driver="gelsd").solution.reshape(-1)
        tried.add(chosen)
        chosen = chosen ^ frozenset(name for name, weight in zip(names, weights, strict=True) if float(weight) > 0.5)
        if chosen in tried:
            return None
        if chosen and fits(outputs(chosen)):
            return chosen
    return None


def _some(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1)[:: max(1, values.numel() // _EQUATIONS)]
