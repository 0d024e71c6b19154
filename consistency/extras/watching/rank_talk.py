"""Talk between the ranks of a training: a process group of the watch's own, beside the one that trains.

It is gloo's, on the CPU, whatever the training uses: a card that is busy or broken does not keep the ranks from telling
each other so. A training without a process group, or of one process, is one rank that talks to itself.
"""

from __future__ import annotations

import pickle
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class RankTalk:
    """What one rank tells the others, and is told. Every rank has to make it, and to call each method alike.

    Attributes
    ----------
    rank, world : int
        Number of this rank, and how many there are.
    """

    def __init__(self, *, timeout_s: float) -> None:
        is_together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if is_together else 0
        self.world = dist.get_world_size() if is_together else 1
        self._group = None
        if is_together:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self._group)
        return values

    def pass_on(self, value: Any) -> Any:
        """Give a value to the next rank, and return that of the rank before; the last rank gives to the first."""
        if self._group is None:
            return value
        sent = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self.gather(sent.numel())
        before, after = (self.rank - 1) % self.world, (self.rank + 1) % self.world
        received = torch.empty(sizes[before], dtype=torch.uint8)
        requests = [
            dist.isend(sent, after, group=self._group),
            dist.irecv(received, before, group=self._group),
        ]
        for request in requests:
            if request is not None:
                request.wait()
        return pickle.loads(received.numpy().tobytes())

    def tell_first(self, value: Any, *, sender: int) -> Any:
        """Give the value of one rank to the first rank, which returns it; the others return None."""
        if self.rank == sender == 0:
            return value
        values = [value]
        if self.rank == sender:
            dist.send_object_list(values, dst=0, group=self._group)
        elif self.rank == 0:
            dist.recv_object_list(values, src=sender, group=self._group)
            return values[0]
        return None

    def close(self) -> None:
        """Leave the group, as far as it is still there."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def rank_names(ranks: Sequence[int]) -> str:
    """Write ranks as in a sentence: `rank 1`, `ranks 0, 2`."""
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


def place_of_rank(device: torch.device) -> str:
    """Return host and device of this rank: `node7, cuda:3 NVIDIA H100`."""
    name = str(device)
    if device.type == "cuda":
        name = f"{device} {torch.cuda.get_device_name(device)}"
    return f"{socket.gethostname()}, {name}"
