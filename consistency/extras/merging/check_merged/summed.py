"""Several adapters in one folder: their deltas are added, at once or one after the other.

A writer merges adapters one after the other, and stores what each merge left in some dtype, or adds up their deltas and
merges once (PEFT's `add_weighted_adapter` of the type `cat`). The second is one low-rank delta, of the factors side by
side. Of the first the ends of each merge are the base of the next one: adding and rounding keep them in order, as in
`orders.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from consistency.errors import InputError
from consistency.extras.merging.check_merged.adapter import Adapter, LowRankTarget, Replaced, Target
from consistency.extras.merging.check_merged.orders import LowRankSum, Order, delta_ends, orders, rounded, stored_ends
from consistency.extras.merging.check_merged.outside import OutsideElements, blocks

_TRIED = 64
"""Rows of a matrix, evenly taken, on which a way to merge is tried before all of them are read."""

_NO_SUM = "check the last one alone, and give the folder that holds all before it as --base"


@dataclass(frozen=True, slots=True, kw_only=True)
class SummedTarget(LowRankTarget):
    """A tensor to which several adapters add: its own factors are theirs side by side, with their scalings inside.

    Attributes
    ----------
    parts : tuple of LowRankTarget
        What each adapter adds, in the order in which they were given.
    labels : tuple of str
        Their names.
    """

    parts: tuple[LowRankTarget, ...] = ()
    labels: tuple[str, ...] = ()

    @classmethod
    def of(cls, parts: Sequence[LowRankTarget], labels: Sequence[str]) -> SummedTarget:
        """Return the sum of targets of the same tensor."""
        left = torch.cat([part.left.double() * part.scaling for part in parts], dim=2)
        right = torch.cat([part.right.double() for part in parts], dim=1)
        return cls(
            name=parts[0].name,
            left=left,
            right=right,
            scaling=1.0,
            is_bias=parts[0].is_bias,
            parts=tuple(parts),
            labels=tuple(labels),
        )

    @property
    def scalings(self) -> dict[str, float]:
        """Return no scaling that a merge may take by mistake: each adapter has its own."""
        return {}

    def first_rows(self, rows: int) -> SummedTarget:
        """Return the sum for the first rows of the tensor alone."""
        return SummedTarget.of([replace(part, left=part.left[:, :rows]) for part in self.parts], self.labels)


def add_up(adapters: Mapping[str, Adapter], weights: Sequence[float]) -> Adapter:
    """Return the changes that several adapters make together, each times its weight.

    Parameters
    ----------
    adapters : mapping of str to Adapter
        By the name that tells one from the others.
    weights : sequence of float
        A factor for each; empty for 1.

    Raises
    ------
    InputError
        Two of them change a tensor, and not both by adding to it, or a weight is given for what is not added.
    """
    factors = dict(zip(adapters, weights or [1.0] * len(adapters), strict=True))
    by_tensor: dict[str, list[tuple[str, Target]]] = {}
    for label, adapter in adapters.items():
        for name, target in adapter.targets.items():
            by_tensor.setdefault(name, []).append((label, _weighted(label, target, factors[label])))
    total = Adapter()
    for name, labelled in by_tensor.items():
        total.targets[name] = _sum(name, labelled)
    for label, adapter in adapters.items():
        total.unmatched += adapter.unmatched
        total.renaming = total.renaming or adapter.renaming
        total.drawn = total.drawn or adapter.drawn
        total.shared |= adapter.shared
        for name, base in adapter.bases.items():
            if len(by_tensor[name]) > 1 or name in total.bases:
                raise _no_sum(name, label, "has it whole and adapts it too")
            total.bases[name] = base
    return total


def _weighted(label: str, target: Target, weight: float) -> Target:
    """Return a target whose delta is taken `weight` times."""
    if weight == 1:
        return target
    if not isinstance(target, LowRankTarget):
        raise InputError(
            "a weight is for what an adapter adds",
            where=target.name,
            got=f"{weight:g} for {label}, which does not add to it but changes it as a whole",
            hint=_NO_SUM,
        )
    return replace(target, scaling=weight * target.scaling)


def _sum(name: str, labelled: Sequence[tuple[str, Target]]) -> Target:
    """Return what several adapters make of a tensor."""
    targets = [target for _, target in labelled]
    if len(targets) == 1:
        return targets[0]
    first = targets[0]
    if isinstance(first, Replaced) and all(isinstance(one, Replaced) and _are_equal(one, first) for one in targets):
        return first
    low_rank = [target for target in targets if isinstance(target, LowRankTarget)]
    if len(low_rank) == len(targets):
        return SummedTarget.of(low_rank, [label for label, _ in labelled])
    label = next(label for label, target in labelled if not isinstance(target, LowRankTarget))
    raise _no_sum(name, label, "does not add to it but changes it as a whole")


def _are_equal(one: Replaced, other: Replaced) -> bool:
    return one.rows is None and other.rows is None and one.value.equal(other.value)


def _no_sum(name: str, label: str, text: str) -> InputError:
    return InputError("these adapters have no sum", where=name, got=f"{label} {text}", hint=_NO_SUM)


class SumWriter:
    """Finds in which order a writer merged several adapters, and how it rounded: the last way that fitted is first."""

    def __init__(self) -> None:
        self._last: tuple[Order, tuple[int, ...]] | None = None

    def judge(self, actual: torch.Tensor, base: torch.Tensor, target: SummedTarget, number: int) -> OutsideElements:
        """Judge one matrix of a stack as merged one adapter after the other; the best of all ways is returned.

        Parameters
        ----------
        actual, base : torch.Tensor
            `(rows, columns)`.
        number : int
            Its number in the stack.
        """
        sums = [LowRankSum(base, part.left[number], part.right[number], part.scaling) for part in target.parts]
        best: OutsideElements | None = None
        for order, sequence in self._ways(actual, sums):
            ordered = [sums[place] for place in sequence]
            step = max(1, len(actual) // _TRIED)
            sample = slice(None, None, step)
            sampled = _judge_in_turn(actual[sample], [_rows_of(one, sample) for one in ordered], order)
            if best is None or sampled.share < best.share:
                best = sampled
            if sampled.outside:
                continue
            whole = sampled if step == 1 else _judge_in_turn(actual, ordered, order)
            if not whole.outside:
                self._last = order, sequence
                return whole
            best = whole if best.share >= whole.share or best is sampled else best
        assert best is not None
        return best

    def left_out(self, actual: torch.Tensor, base: torch.Tensor, target: SummedTarget, number: int) -> str:
        """Return the names of the adapters without which a matrix is right; empty where there are none."""
        count = len(target.parts)
        for size in range(count - 1, 0, -1):
            for chosen in itertools.combinations(range(count), size):
                some_parts = SummedTarget.of([target.parts[place] for place in chosen], target.labels)
                if not SumWriter().judge(actual, base, some_parts, number).outside:
                    missing = [label for place, label in enumerate(target.labels) if place not in chosen]
                    return " and ".join(missing)
        return ""

    def _ways(self, actual: torch.Tensor, sums: Sequence[LowRankSum]) -> Iterator[tuple[Order, tuple[int, ...]]]:
        """Yield the orders of roundings, with the orders of adapters, that a writer may have taken."""
        base = sums[0].base.dtype
        tried: list[tuple[Order, tuple[int, ...]]] = []
        adapter_dtypes = dict.fromkeys(one.left.dtype for one in sums)
        for adapter in adapter_dtypes:
            # TF32 is left out: over two merges its room is wide enough to hide a wrong element of a half type
            for order in [one for one in orders(actual.dtype, base, adapter) if one.change is None and not one.tf32]:
                for between in dict.fromkeys((actual.dtype, base, torch.float32)):
                    for sequence in itertools.permutations(range(len(sums))):
                        tried.append((replace(order, between=between), sequence))
        if self._last is not None and len(self._last[1]) == len(sums):
            yield self._last
        yield from dict.fromkeys(tried)


def _rows_of(one: LowRankSum, rows: slice) -> LowRankSum:
    return replace(one, base=one.base[rows], left=one.left[rows])


def _judge_in_turn(actual: torch.Tensor, sums: Sequence[LowRankSum], order: Order) -> OutsideElements:
    """Look for elements that no merge of deltas one after the other explains, each rounded as `order` says."""
    rows, columns = actual.shape
    outside = OutsideElements(order, torch.zeros(rows, dtype=torch.int32))
    deltas: list[Callable[[slice], torch.Tensor]] = [delta_ends(one, order) for one in sums]
    for block in blocks(rows, columns):
        values = actual[block]
        ends = sums[0].base[block].double().expand(2, -1, -1)
        for number, delta in enumerate(deltas):
            if number:
                ends = stored_ends(ends, order.between or torch.float32)
            ends = rounded(rounded(ends, order.total) + delta(block), order.total)
        low, high = stored_ends(ends, actual.dtype)
        doubles = values.double()
        wrong = ~((doubles >= low) & (doubles <= high)) & values.isfinite()
        outside.seen += values.numel()
        if bool(wrong.any()):
            row, column = wrong.nonzero(as_tuple=True)
            outside.add((row + block.start, column), values[wrong], torch.stack((low, high))[:, wrong])
    return outside
