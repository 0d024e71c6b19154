"""The collectives that are tried: what each rank gives, what it has to get, and by which function of torch."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from consistency.case.stages import Level
from consistency.numerics.sums import Sum, exact_sum

FLOATS = ("float32", "bfloat16", "float16")

SIZES: dict[Level, tuple[int, ...]] = {
    Level.QUICK: (1, 8, 1023, 1025),
    # a remainder of eight elements went unprocessed at one size alone (nccl#1950), and another size was wrong by itself
    Level.STANDARD: (1, 7, 8, 9, 1023, 1024, 1025, (1 << 16) - 1, (1 << 16) + 8, 1 << 20),
    Level.THOROUGH: (1, 7, 8, 9, 1023, 1024, 1025, (1 << 16) - 1, (1 << 16) + 8, (1 << 20) + 1, 1 << 22, 1 << 26),
}
"""Elements that each rank gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective.

    Attributes
    ----------
    run : callable
        Takes what this rank gives, which it may change, its rank and the number of ranks; returns what it gets.
    moved : callable or None
        Takes what all ranks give, and a rank; returns what that rank has to get, bit by bit.
    summed : callable or None
        The same for sums, with the terms of each element in the first dimension.
    average : bool
        Whether the sum is divided by the number of ranks.
    is_same : bool
        Whether all ranks have to get the same bits; otherwise each gets something of its own.
    """

    name: str
    run: Callable[[torch.Tensor, int, int], torch.Tensor]
    moved: Callable[[list[torch.Tensor], int], torch.Tensor] | None = None
    summed: Callable[[list[torch.Tensor], int], torch.Tensor] | None = None
    average: bool = False
    is_same: bool = False
    dtypes: tuple[str, ...] = FLOATS

    def expected(self, given: list[torch.Tensor], rank: int) -> torch.Tensor | Sum:
        """Return what a rank has to get: bits, or a sum with its bound."""
        if self.moved is not None:
            return self.moved(given, rank)
        assert self.summed is not None
        terms = self.summed(given, rank)
        if not terms.is_floating_point():
            return terms.sum(0, dtype=terms.dtype)
        return exact_sum(terms, average=self.average)


def given(name: str, dtype: str, elements: int, rank: int) -> torch.Tensor:
    """Return what a rank gives, on the CPU: NumPy draws it, so every rank knows what the others give.

    Parameters
    ----------
    elements : int
        In all; the shape is (elements,).
    """
    seed = zlib.crc32(f"{name} {dtype} {elements} {rank}".encode())
    generator = np.random.Generator(np.random.Philox(seed))
    if dtype == "int32":
        return torch.from_numpy(generator.integers(-(1 << 20), 1 << 20, elements, dtype=np.int32))
    values = torch.from_numpy(generator.standard_normal(elements, dtype=np.float32))
    return values.to(getattr(torch, dtype))


def _all_reduce(operation: dist.ReduceOp.RedOpType) -> Callable[[torch.Tensor, int, int], torch.Tensor]:
    def run(own: torch.Tensor, _rank: int, _world: int) -> torch.Tensor:
        dist.all_reduce(own, op=operation)
        return own

    return run


def _at_once(own: torch.Tensor, _rank: int, _world: int) -> torch.Tensor:
    """Reduce quarters of a tensor at the same time."""
    parts = [part.clone() for part in own.tensor_split(4)]
    works = [dist.all_reduce(part, async_op=True) for part in parts if part.numel()]
    for work in works:
        work.wait()
    return torch.cat(parts)


def _unaligned(own: torch.Tensor, _rank: int, _world: int) -> torch.Tensor:
    """Reduce a tensor whose memory begins one element after an aligned address."""
    room = own.new_zeros(own.numel() + 1)
    room[1:] = own
    dist.all_reduce(room[1:])
    return room[1:].clone()


def _all_gather(own: torch.Tensor, _rank: int, world: int) -> torch.Tensor:
    whole = own.new_zeros(own.numel() * world)
    dist.all_gather_into_tensor(whole, own)
    return whole


def _reduce_scatter(own: torch.Tensor, _rank: int, world: int) -> torch.Tensor:
    part = own.new_zeros(own.numel() // world)
    dist.reduce_scatter_tensor(part, own)
    return part


def _all_to_all(own: torch.Tensor, _rank: int, _world: int) -> torch.Tensor:
    whole = torch.zeros_like(own)
    dist.all_to_all_single(whole, own)
    return whole


def _broadcast(own: torch.Tensor, _rank: int, world: int) -> torch.Tensor:
    dist.broadcast(own, src=world - 1)
    return own


def _ring(own: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Send to the next rank, and receive from the one before."""
    received = torch.zeros_like(own)
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, own, (rank + 1) % world), dist.P2POp(dist.irecv, received, (rank - 1) % world)
    ])  # fmt: skip
    for work in works:
        work.wait()
    return received


def _terms(given: list[torch.Tensor], _rank: int) -> torch.Tensor:
    return torch.stack(given)


def _own_part(given: list[torch.Tensor], rank: int) -> torch.Tensor:
    return torch.stack([one.view(len(given), -1)[rank] for one in given])


COLLECTIVES: tuple[Collective, ...] = (
    Collective(
        name="all_reduce.sum", run=_all_reduce(dist.ReduceOp.SUM), summed=_terms, is_same=True,
        dtypes=(*FLOATS, "int32"),
    ),
    Collective(name="all_reduce.avg", run=_all_reduce(dist.ReduceOp.AVG), summed=_terms, average=True, is_same=True),
    Collective(
        name="all_reduce.max", run=_all_reduce(dist.ReduceOp.MAX), is_same=True,
        moved=lambda given, _: torch.stack(given).amax(0),
    ),
    Collective(name="all_reduce.four-at-once", run=_at_once, summed=_terms, is_same=True),
    Collective(name="all_reduce.unaligned", run=_unaligned, summed=_terms, is_same=True),
    Collective(name="all_gather", run=_all_gather, moved=lambda given, _: torch.cat(given), is_same=True),
    Collective(name="reduce_scatter.sum", run=_reduce_scatter, summed=_own_part),
    Collective(name="broadcast", run=_broadcast, moved=lambda given, _: given[-1], is_same=True),
    Collective(
        name="all_to_all", run=_all_to_all,
        moved=lambda given, rank: torch.cat([one.view(len(given), -1)[rank] for one in given]),
    ),
    Collective(name="send-receive", run=_ring, moved=lambda given, rank: given[rank - 1]),
)  # fmt: skip
"""In the order in which every rank runs them."""

IN_PARTS = frozenset({"reduce_scatter.sum", "all_to_all"})
"""Collectives of which each rank gives a part to every rank: so many elements are given for each."""
