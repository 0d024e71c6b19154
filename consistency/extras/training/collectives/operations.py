"""The collectives that are tried: what each rank contributes, the result that it has to get, and torch's function."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from consistency.case.stage import Level
from consistency.extras.training.ranks.group import JoinedGroup
from consistency.numerics.running_error import Sum, exact_sum

FLOATS = ("float32", "bfloat16", "float16")
MOVED = (*FLOATS, "int64", "int8", "uint8")

LARGEST_BYTES = 256 << 20
"""Bytes of the largest tensor that a rank gives or gets."""

SIZES: dict[Level, tuple[int, ...]] = {
    Level.QUICK: (1, 8, 1023, 1025),
    # a remainder of eight elements went unprocessed at one size alone (nccl#1950), and another size was wrong by itself
    Level.STANDARD: (1, 7, 8, 9, 1023, 1024, 1025, (1 << 16) - 1, (1 << 16) + 8, 1 << 20),
    Level.THOROUGH: (1, 7, 8, 9, 1023, 1024, 1025, (1 << 16) - 1, (1 << 16) + 8, (1 << 20) + 1, 1 << 22, 1 << 26),
}
"""Elements that each rank gives, or gives to each rank."""

SIZES_OF_SOME: dict[Level, tuple[int, ...]] = {
    Level.QUICK: (1025,),
    Level.STANDARD: (9, 1025, (1 << 16) + 8),
    Level.THOROUGH: (1, 9, 1023, 1025, (1 << 16) + 8, (1 << 20) + 1),
}
"""Elements that each rank gives, or gives to each rank, where only some of the ranks form a group."""

WORLDS = (2, 3)
"""Sizes of the groups that are tried besides the one of all ranks: another number of ranks takes another algorithm."""


class Combine(enum.Enum):
    """The operation by which a collective combines the elements that all ranks give."""

    SUM = enum.auto()
    AVERAGE = enum.auto()
    MAXIMUM = enum.auto()


Piece = tuple[int, int, int]
"""A part of one rank's contribution: the rank, the first element and the one after the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective: it moves elements between ranks, or combines those that all ranks give."""

    name: str
    run: Callable[[torch.Tensor, JoinedGroup], torch.Tensor]
    """Takes this rank's contribution, which it may change, and the ranks; returns the result of this rank."""
    moved: Callable[[int, int, int], Sequence[Piece]] | None = None
    """Takes a rank, the number of ranks, and of elements that each gives; returns the pieces that the rank has to get.
    None for a collective that combines elements."""
    combined: Combine | None = None
    """Combines all elements, or, with `in_parts`, the elements of the rank's own part; None if elements are moved."""
    in_parts: bool = False
    """Whether each rank gives a part to every rank."""
    gathers: bool = False
    """Whether each rank gets all that all ranks give."""
    is_same: bool = False
    """Whether all ranks have to get the same bits; otherwise each has a result of its own."""
    dtypes: tuple[str, ...] = FLOATS
    """Dtypes that are tried."""

    def size(self, size: int, dtype: str, world: int) -> int:
        """Return the size, or as much of it as keeps every tensor within the largest."""
        bytes_per_element: int = getattr(torch, dtype).itemsize
        if self.in_parts or self.gathers:
            bytes_per_element *= world
        return min(size, LARGEST_BYTES // bytes_per_element)

    def contributions(self, dtype: str, size: int, world: int) -> tuple[Contribution, ...]:
        """Return the contribution of each rank."""
        elements = size * world if self.in_parts else size
        return tuple(Contribution(name=self.name, dtype=dtype, elements=elements, rank=rank) for rank in range(world))

    def expected(self, contributions: Sequence[Contribution], rank: int) -> torch.Tensor | Sum:
        """Return the result that a rank has to get, `(elements,)`: bits, or a sum with its bound."""
        world, elements = len(contributions), contributions[0].elements
        if self.moved is not None:
            return _put_together(contributions, self.moved(rank, world, elements))
        start, stop = 0, elements
        if self.in_parts:
            length = elements // world
            start, stop = rank * length, (rank + 1) * length
        blocks = _blocks(contributions, start, stop)
        if self.combined is Combine.MAXIMUM:
            return torch.cat([block.amax(0) for block in blocks])
        # integers add up without rounding, in any order
        if contributions[0].dtype not in FLOATS:
            return torch.cat([block.sum(0, dtype=block.dtype) for block in blocks])
        return _sum_of_blocks(blocks, stop - start, average=self.combined is Combine.AVERAGE)


def _put_together(contributions: Sequence[Contribution], pieces: Sequence[Piece]) -> torch.Tensor:
    """Return pieces of contributions, one after the other."""
    length = sum(stop - start for _, start, stop in pieces)
    result = torch.empty(length, dtype=getattr(torch, contributions[0].dtype))
    offset = 0
    for rank, start, stop in pieces:
        result[offset : offset + stop - start] = contributions[rank].between(start, stop)
        offset += stop - start
    return result


def _blocks(contributions: Sequence[Contribution], start: int, stop: int) -> Iterator[torch.Tensor]:
    """Yield the elements of all ranks from `start` to before `stop`, `(ranks, elements)`, a block at a time."""
    for first in range(start, stop, BLOCK):
        last = min(first + BLOCK, stop)
        yield torch.stack([contribution.between(first, last) for contribution in contributions])


def _sum_of_blocks(blocks: Iterable[torch.Tensor], length: int, *, average: bool) -> Sum:
    """Return the exact sum or average of all ranks' elements, with its bound, from their blocks in order."""
    value, allowed = np.empty(length), np.empty(length)
    for number, block in enumerate(blocks):
        of_block = exact_sum(block, average=average)
        place = slice(number * BLOCK, number * BLOCK + block.shape[1])
        value[place], allowed[place] = of_block.value, of_block.allowed
    return Sum(value=value, allowed=allowed)


def _all_reduce(operation: dist.ReduceOp.RedOpType) -> Callable[[torch.Tensor, JoinedGroup], torch.Tensor]:
    """Return a function that reduces a tensor in place by an operation."""

    def run(contribution: torch.Tensor, ranks: JoinedGroup) -> torch.Tensor:
        dist.all_reduce(contribution, op=operation, group=ranks.process_group)
        return contribution

    return run


def _at_once(contribution: torch.Tensor, ranks: JoinedGroup) -> torch.Tensor:
    """Reduce quarters of a tensor at the same time."""
    quarters = [quarter.clone() for quarter in contribution.tensor_split(4)]
    works = []
    for quarter in quarters:
        # of fewer than four elements some quarters are empty
        if quarter.numel():
            works.append(dist.all_reduce(quarter, group=ranks.process_group, async_op=True))
    for work in works:
        work.wait()
    return torch.cat(quarters)


def _unaligned(contribution: torch.Tensor, ranks: JoinedGroup) -> torch.Tensor:
    """Reduce a tensor whose memory begins one element after an aligned address."""
    buffer = contribution.new_zeros(contribution.numel() + 1)
    buffer[1:] = contribution
    dist.all_reduce(buffer[1:], group=ranks.process_group)
    return buffer[1:].clone()


def _transposed(contribution: torch.Tensor, ranks: JoinedGroup) -> torch.Tensor:
    """Reduce the transpose of a matrix, whose elements lie in memory in another order, without gaps."""
    buffer = contribution.new_zeros(contribution.numel() + contribution.numel() % 2)
    buffer[: contribution.numel()] = contribution
    dist.all_reduce(buffer.view(2, -1).t(), group=ranks.process_group)
    return buffer[: contribution.numel()].clone()


def _strided(contribution: torch.Tensor, ranks: JoinedGroup) -> torch.Tensor:
    """Reduce every other element of a tensor."""
    buffer = contribution.new_zeros(2 * contribution.numel())
    buffer[::2] = contribution
    dist.all_reduce(buffer[::2], group=ranks.process_group)
    return buffer[::2].clone()


def overlooks_gaps(ranks: JoinedGroup) -> bool:
    """Report whether a sum leaves out every other element as if its tensor had no gaps: gloo does, without an error.

    It adds up as many elements as the tensor has, from the first one on as they lie in memory.
    """
    sums = _strided(torch.ones(2, device=ranks.device), ranks).tolist()
    # the second element is at the third place in memory: not added up
    return sums == [float(ranks.world), 1.0]


def _all_gather(contribution: torch.Tensor, ranks: JoinedGroup) -> torch.Tensor:
    whole = contribution.new_zeros(contribution.numel() * ranks.world)
    dist.all_gather_into_tensor(whole, contribution, group=ranks.process_group)
    return whole


def _reduce_scatter(contribution: torch.Tensor, ranks: JoinedGroup) -> torch.Tensor:
    part = contribution.new_zeros(contribution.numel() // ranks.world)
    dist.reduce_scatter_tensor(part, contribution, group=ranks.process_group)
    return part


def _all_to_all(contribution: torch.Tensor, ranks: JoinedGroup) -> torch.Tensor:
    whole = torch.zeros_like(contribution)
    dist.all_to_all_single(whole, contribution, group=ranks.process_group)
    return whole


def _broadcast(contribution: torch.Tensor, ranks: JoinedGroup) -> torch.Tensor:
    dist.broadcast(contribution, group=ranks.process_group, group_src=ranks.world - 1)
    return contribution


def _ring(contribution: torch.Tensor, ranks: JoinedGroup) -> torch.Tensor:
    """Send to the next rank, and receive from the one before."""
    received, group = torch.zeros_like(contribution), ranks.process_group
    after, before = (ranks.rank + 1) % ranks.world, (ranks.rank - 1) % ranks.world
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, contribution, group=group, group_peer=after),
            dist.P2POp(dist.irecv, received, group=group, group_peer=before),
        ]
    )
    for work in works:
        work.wait()
    return received


STRIDED = "all_reduce.strided"

EVERY_COLLECTIVE: tuple[Collective, ...] = (
    Collective(
        name="all_reduce.sum", run=_all_reduce(dist.ReduceOp.SUM), combined=Combine.SUM, is_same=True,
        dtypes=(*FLOATS, "int32", "int64"),
    ),
    Collective(
        name="all_reduce.avg", run=_all_reduce(dist.ReduceOp.AVG), combined=Combine.AVERAGE, is_same=True,
    ),
    Collective(
        name="all_reduce.max", run=_all_reduce(dist.ReduceOp.MAX), combined=Combine.MAXIMUM, is_same=True,
        dtypes=(*FLOATS, "int64"),
    ),
    Collective(name="all_reduce.four-at-once", run=_at_once, combined=Combine.SUM, is_same=True),
    Collective(name="all_reduce.unaligned", run=_unaligned, combined=Combine.SUM, is_same=True),
    Collective(name="all_reduce.transposed", run=_transposed, combined=Combine.SUM, is_same=True),
    Collective(name=STRIDED, run=_strided, combined=Combine.SUM, is_same=True),
    Collective(
        name="all_gather", run=_all_gather, gathers=True, is_same=True, dtypes=MOVED,
        moved=lambda _rank, world, elements: [(giver, 0, elements) for giver in range(world)],
    ),
    Collective(name="reduce_scatter.sum", run=_reduce_scatter, combined=Combine.SUM, in_parts=True),
    Collective(
        name="broadcast", run=_broadcast, is_same=True, dtypes=MOVED,
        moved=lambda _rank, world, elements: [(world - 1, 0, elements)],
    ),
    Collective(
        name="all_to_all", run=_all_to_all, in_parts=True, dtypes=MOVED,
        moved=lambda rank, world, elements: [
            (giver, rank * elements // world, (rank + 1) * elements // world) for giver in range(world)
        ],
    ),
    Collective(
        name="send-receive", run=_ring, dtypes=MOVED,
        moved=lambda rank, world, elements: [((rank - 1) % world, 0, elements)],
    ),
)  # fmt: skip
"""All collectives; every rank runs them in this order."""


def groups_of(world: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each smaller group: neighbours, and every rank is in one of each size.

    The last group of a size reaches back to ranks of the one before where the number does not divide.
    """
    groups = []
    for size in WORLDS:
        # all ranks together are a group already
        if size < world:
            starts = dict.fromkeys(min(start, world - size) for start in range(0, world, size))
            groups += [tuple(range(start, start + size)) for start in starts]
    return tuple(groups)


BLOCK = 1 << 18
"""Elements that are drawn at a time: in memory is one block of all ranks' contributions, and never the whole of all."""

_DRAWN: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "int8": lambda generator, n: generator.integers(-128, 128, n, dtype=np.int8),
    "uint8": lambda generator, n: generator.integers(0, 256, n, dtype=np.uint8),
    # so that the sum of a thousand ranks does not overflow
    "int32": lambda generator, n: generator.integers(-(1 << 20), 1 << 20, n, dtype=np.int32),
    "int64": lambda generator, n: generator.integers(-(1 << 52), 1 << 52, n, dtype=np.int64),
}
"""Functions that draw integers, by dtype. Floats are normally distributed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """The numbers that one rank gives to one collective, `(elements,)`, drawn on the CPU when they are read.

    Every rank draws the same numbers for it, so each knows the contributions of all others.
    """

    name: str
    dtype: str
    elements: int
    rank: int

    def between(self, start: int, stop: int) -> torch.Tensor:
        """Return the elements from `start` to before `stop`."""
        elements = torch.empty(stop - start, dtype=getattr(torch, self.dtype))
        for number in range(start // BLOCK, -(-stop // BLOCK)):
            first = number * BLOCK
            block = self._block(number)[max(0, start - first) : stop - first]
            offset = max(start, first) - start
            elements[offset : offset + len(block)] = block
        return elements

    def whole(self) -> torch.Tensor:
        return self.between(0, self.elements)

    def _block(self, number: int) -> torch.Tensor:
        """Draw a block, from a seed that each block of each contribution has for itself."""
        seed = zlib.crc32(f"{self.name} {self.dtype} {self.elements} {self.rank} {number}".encode())
        generator = np.random.Generator(np.random.SFC64(seed))
        length = min(BLOCK, self.elements - number * BLOCK)
        if self.dtype in _DRAWN:
            return torch.from_numpy(_DRAWN[self.dtype](generator, length))
        return torch.from_numpy(generator.standard_normal(length, dtype=np.float32))
