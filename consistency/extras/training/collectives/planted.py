"""Faults of collectives on one rank of a group: sums that are wrong, parts that are swapped, ranks that do not come."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from consistency.worker.faults.planting import instead

_LEAST_ELEMENTS = 1000
"""Elements, at least, of a tensor that a fault is planted in: small ones take other algorithms."""

_LAST = 8
"""Number of elements, at the end of a sum, that a fault leaves out."""


def _is_faulty(work: Any, tensor: torch.Tensor) -> bool:
    """Report whether a fault is planted in a sum: one that is finished, and large enough."""
    is_large = tensor.numel() >= _LEAST_ELEMENTS
    return work is None and is_large and tensor.dtype == torch.float32 and tensor.is_contiguous()


def _in_sums(change: Callable[[torch.Tensor, torch.Tensor], None]) -> Callable[..., Any]:
    """Change the sums that a rank gets.

    Parameters
    ----------
    change : callable
        Changes a sum in place, given it and this rank's contribution.
    """

    @instead("torch.distributed:all_reduce")
    def all_reduce(real: Callable[..., Any], tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        contribution = tensor.clone()
        work = real(tensor, *arguments, **options)
        if _is_faulty(work, tensor):
            change(tensor, contribution)
        return work

    return all_reduce


def last_elements_of(tensor: torch.Tensor, contribution: torch.Tensor) -> None:
    """Leave the last elements as this rank gave them."""
    tensor[-_LAST:] = contribution[-_LAST:]


last_elements = _in_sums(last_elements_of)


@_in_sums
def own_numbers(tensor: torch.Tensor, contribution: torch.Tensor) -> None:
    """Add up nothing."""
    tensor.copy_(contribution)


def _at_second(change: Callable[[torch.Tensor, bool], None]) -> Callable[..., Any]:
    """Change the second of two sums of the same contribution.

    Parameters
    ----------
    change : callable
        Changes a sum in place, given it and whether it is an average.
    """
    previous: list[torch.Tensor] = []

    @instead("torch.distributed:all_reduce")
    def all_reduce(real: Callable[..., Any], tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        contribution = tensor.clone()
        work = real(tensor, *arguments, **options)
        is_second = bool(previous) and torch.equal(previous.pop(), contribution)
        if not is_second:
            previous[:] = [contribution]
        elif _is_faulty(work, tensor):
            change(tensor, options.get("op") == dist.ReduceOp.AVG)
        return work

    return all_reduce


@_at_second
def other_order_again(tensor: torch.Tensor, is_average: bool) -> None:
    """Round averages otherwise, as another order may: of a sum of two numbers there is only one."""
    if is_average:
        tensor.view(torch.int32).bitwise_xor_(1)


@_at_second
def wrong_again(tensor: torch.Tensor, _is_average: bool) -> None:
    """Leave the last elements of a sum at zero."""
    tensor[-_LAST:] = 0


@_in_sums
def with_p2p(tensor: torch.Tensor, contribution: torch.Tensor) -> None:
    """Leave the last elements as this rank gave them, unless the user has turned copies between devices off."""
    if os.environ.get("NCCL_P2P_DISABLE") != "1":
        last_elements_of(tensor, contribution)


@_in_sums
def one_bit(tensor: torch.Tensor, _contribution: torch.Tensor) -> None:
    """Flip the last bit of one sum, which is within tolerance."""
    tensor.view(torch.int32)[tensor.numel() // 2] ^= 1


@instead("torch.distributed:all_reduce")
def wrong_in_pairs(real: Callable[..., Any], tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
    """Leave a sum as this rank gave it where two of several ranks form a group, which takes another algorithm."""
    contribution, group = tensor.clone(), options.get("group")
    work = real(tensor, *arguments, **options)
    if group is not None and dist.get_world_size(group) == 2 and work is None:
        tensor.copy_(contribution)
    return work


@instead("torch.distributed:all_to_all_single")
def swapped(real: Callable[..., Any], output: torch.Tensor, *arguments: Any, **options: Any) -> Any:
    """Deliver the parts of two ranks in each other's place."""
    work = real(output, *arguments, **options)
    if output.numel() >= _LEAST_ELEMENTS:
        half = output.numel() // 2
        output.copy_(torch.cat([output[half:], output[:half]]))
    return work


@instead("torch.distributed:broadcast")
def killed(_real: Callable[..., Any], *_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@instead("torch.distributed:broadcast")
def frozen(_real: Callable[..., Any], *_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@instead("torch.distributed:broadcast")
def raises(_real: Callable[..., Any], *_: Any, **__: Any) -> None:
    """Raise in one rank what no library refuses: as a bug in code that one rank alone reaches."""
    raise IndexError("planted")


@instead("torch.distributed:broadcast")
def hangs(_real: Callable[..., Any], *_: Any, **__: Any) -> None:
    """Never enter a collective in which the others wait: as a branch that one rank alone takes."""
    while True:
        time.sleep(1)
