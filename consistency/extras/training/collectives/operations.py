"""The collectives that are tried: what each rank gives, what it has to get, and by which function of torch."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Callable, Sequence
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
"""Of the largest tensor that a rank gives or gets."""

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
"""The same where only some of the ranks form a group."""

WORLDS = (2, 3)
"""Ranks of the groups that are tried besides the one of all: another number of ranks takes another algorithm."""


class Combine(enum.Enum):
    """What a collective makes of the elements that all ranks give."""

    SUM = enum.auto()
    AVERAGE = enum.auto()
    MAXIMUM = enum.auto()


Piece = tuple[int, int, int]
"""A part of what one rank gives: the rank, the first element and the one after the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective."""

    name: str
    run: Callable[[torch.Tensor, JoinedGroup], torch.Tensor]
    """Takes what this rank gives, which it may change, and the ranks; returns what this one gets."""
    moved: Callable[[int, int, int], Sequence[Piece]] | None = None
    """Takes a rank, the number of ranks, and of elements that each gives; returns what that rank has to get."""
    combined: Combine | None = None
    """What it gets instead: of each element, or of those of its own part."""
    in_parts: bool = False
    """Whether each rank gives a part to every rank."""
    gathers: bool = False
    """Whether each rank gets all that all ranks give."""
    is_same: bool = False
    """Whether all ranks have to get the same bits; otherwise each gets something of its own."""
    dtypes: tuple[str, ...] = FLOATS

    def size(self, size: int, dtype: str, world: int) -> int:
        """Return the size, or as much of it as keeps every tensor within the largest."""
        held: int = getattr(torch, dtype).itemsize * (world if self.in_parts or self.gathers else 1)
        return min(size, LARGEST_BYTES // held)

    def given(self, dtype: str, size: int, world: int) -> tuple[Contribution, ...]:
        """Return what each rank gives."""
        elements = size * world if self.in_parts else size
        return tuple(Contribution(name=self.name, dtype=dtype, elements=elements, rank=rank) for rank in range(world))

    def expected(self, given: Sequence[Contribution], rank: int) -> torch.Tensor | Sum:
        """Return what a rank has to get: bits, or a sum with its bound."""
        elements = given[0].elements
        if self.moved is not None:
            return _put_together(given, self.moved(rank, len(given), elements))
        length = elements // len(given) if self.in_parts else elements
        start = rank * length if self.in_parts else 0
        terms = (
            torch.stack([one.part(at, min(at + BLOCK, start + length)) for one in given])
            for at in range(start, start + length, BLOCK)
        )
        if self.combined is Combine.MAXIMUM:
            return torch.cat([block.amax(0) for block in terms])
        if given[0].dtype not in FLOATS:
            return torch.cat([block.sum(0, dtype=block.dtype) for block in terms])
        value, allowed = np.empty(length), np.empty(length)
        for number, block in enumerate(terms):
            part = exact_sum(block, average=self.combined is Combine.AVERAGE)
            at = slice(number * BLOCK, number * BLOCK + block.shape[1])
            value[at], allowed[at] = part.value, part.allowed
        return Sum(value=value, allowed=allowed)


def _put_together(given: Sequence[Contribution], pieces: Sequence[Piece]) -> torch.Tensor:
    found = torch.empty(sum(stop - start for _, start, stop in pieces), dtype=getattr(torch, given[0].dtype))
    at = 0
    for rank, start, stop in pieces:
        found[at : at + stop - start] = given[rank].part(start, stop)
        at += stop - start
    return found


def _all_reduce(operation: dist.ReduceOp.RedOpType) -> Callable[[torch.Tensor, JoinedGroup], torch.Tensor]:
    def run(own: torch.Tensor, ranks: JoinedGroup) -> torch.Tensor:
        dist.all_reduce(own, op=operation, group=ranks.process_group)
        return own

    return run


def _at_once(own: torch.Tensor, ranks: JoinedGroup) -> torch.Tensor:
    """Reduce quarters of a tensor at the same time."""
    parts = [part.clone() for part in own.tensor_split(4)]
    works = [dist.all_reduce(part, group=ranks.process_group, async_op=True) for part in parts if part.numel()]
    for work in works:
        work.wait()
    return torch.cat(parts)


def _unaligned(own: torch.Tensor, ranks: JoinedGroup) -> torch.Tensor:
    """Reduce a tensor whose memory begins one element after an aligned address."""
    room = own.new_zeros(own.numel() + 1)
    room[1:] = own
    dist.all_reduce(room[1:], group=ranks.process_group)
    return room[1:].clone()


def _transposed(own: torch.Tensor, ranks: JoinedGroup) -> torch.Tensor:
    """Reduce the transpose of a matrix, whose elements lie in memory in another order, without gaps."""
    room = own.new_zeros(own.numel() + own.numel() % 2)
    room[: own.numel()] = own
    dist.all_reduce(room.view(2, -1).t(), group=ranks.process_group)
    return room[: own.numel()].clone()


def _strided(own: torch.Tensor, ranks: JoinedGroup) -> torch.Tensor:
    """Reduce every other element of a tensor."""
    room = own.new_zeros(2 * own.numel())
    room[::2] = own
    dist.all_reduce(room[::2], group=ranks.process_group)
    return room[::2].clone()


def overlooks_gaps(ranks: JoinedGroup) -> bool:
    """Report whether a sum leaves out every other element as if its tensor had no gaps: gloo does, without an error.

    It adds up as many elements as the tensor has, from the first one on as they lie in memory.
    """
    found = _strided(torch.ones(2, device=ranks.device), ranks).tolist()
    return found == [float(ranks.world), 1.0]


def _all_gather(own: torch.Tensor, ranks: JoinedGroup) -> torch.Tensor:
    whole = own.new_zeros(own.numel() * ranks.world)
    dist.all_gather_into_tensor(whole, own, group=ranks.process_group)
    return whole


def _reduce_scatter(own: torch.Tensor, ranks: JoinedGroup) -> torch.Tensor:
    part = own.new_zeros(own.numel() // ranks.world)
    dist.reduce_scatter_tensor(part, own, group=ranks.process_group)
    return part


def _all_to_all(own: torch.Tensor, ranks: JoinedGroup) -> torch.Tensor:
    whole = torch.zeros_like(own)
    dist.all_to_all_single(whole, own, group=ranks.process_group)
    return whole


def _broadcast(own: torch.Tensor, ranks: JoinedGroup) -> torch.Tensor:
    dist.broadcast(own, group=ranks.process_group, group_src=ranks.world - 1)
    return own


def _ring(own: torch.Tensor, ranks: JoinedGroup) -> torch.Tensor:
    """Send to the next rank, and receive from the one before."""
    received, group = torch.zeros_like(own), ranks.process_group
    after, before = (ranks.rank + 1) % ranks.world, (ranks.rank - 1) % ranks.world
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, own, group=group, group_peer=after),
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
        moved=lambda _rank, world, elements: [(one, 0, elements) for one in range(world)],
    ),
    Collective(name="reduce_scatter.sum", run=_reduce_scatter, combined=Combine.SUM, in_parts=True),
    Collective(
        name="broadcast", run=_broadcast, is_same=True, dtypes=MOVED,
        moved=lambda _rank, world, elements: [(world - 1, 0, elements)],
    ),
    Collective(
        name="all_to_all", run=_all_to_all, in_parts=True, dtypes=MOVED,
        moved=lambda rank, world, elements: [
            (one, rank * elements // world, (rank + 1) * elements // world) for one in range(world)
        ],
    ),
    Collective(
        name="send-receive", run=_ring, dtypes=MOVED,
        moved=lambda rank, world, elements: [((rank - 1) % world, 0, elements)],
    ),
)  # fmt: skip
"""In the order in which every rank runs them."""


def groups_of(world: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each smaller group: neighbours, and every rank is in one of each size.

    The last group of a size reaches back to ranks of the one before where the number does not divide.
    """
    return tuple(
        tuple(range(start, start + size))
        for size in WORLDS
        if size < world
        for start in dict.fromkeys(min(start, world - size) for start in range(0, world, size))
    )


BLOCK = 1 << 18
"""Elements that are drawn at a time. What all ranks gave of one block is held at once, and never all that they gave."""

_DRAWN: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "int8": lambda generator, n: generator.integers(-128, 128, n, dtype=np.int8),
    "uint8": lambda generator, n: generator.integers(0, 256, n, dtype=np.uint8),
    # so that the sum of a thousand ranks does not overflow
    "int32": lambda generator, n: generator.integers(-(1 << 20), 1 << 20, n, dtype=np.int32),
    "int64": lambda generator, n: generator.integers(-(1 << 52), 1 << 52, n, dtype=np.int64),
}
"""By dtype, where it is no float: those are normally distributed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What one rank gives to one collective: `elements` in all, of the shape (elements,), on the CPU."""

    name: str
    dtype: str
    elements: int
    rank: int

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Return the elements from `start` to before `stop`."""
        found = torch.empty(stop - start, dtype=getattr(torch, self.dtype))
        for number in range(start // BLOCK, -(-stop // BLOCK)):
            first = number * BLOCK
            block = self._block(number)[max(0, start - first) : stop - first]
            at = max(start, first) - start
            found[at : at + len(block)] = block
        return found

    def whole(self) -> torch.Tensor:
        return self.part(0, self.elements)

    def _block(self, number: int) -> torch.Tensor:
        seed = zlib.crc32(f"{self.name} {self.dtype} {self.elements} {self.rank} {number}".encode())
        generator = np.random.Generator(np.random.SFC64(seed))
        length = min(BLOCK, self.elements - number * BLOCK)
        if self.dtype in _DRAWN:
            return torch.from_numpy(_DRAWN[self.dtype](generator, length))
        return torch.from_numpy(generator.standard_normal(length, dtype=np.float32))
