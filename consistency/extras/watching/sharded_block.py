"""One block of a model that FSDP2 shards, as it was in the training's own pass.

A pass of the whole model once more needs all ranks, and its gradients would go into the optimizer's. So hooks on the
block in turn keep what entered it and what arrived at it in the training's own pass, and add up what this rank's own
backward passes give one of its tensors before FSDP2 adds the ranks' up. The whole weights are there while the block
computes; for the check by the CPU all ranks gather them once more.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from consistency.extras.watching.block_function import BlockInputs, keep_inputs_of
from consistency.extras.watching.micro_batch import WatchedModel
from consistency.extras.watching.sums import LocalSum


class ShardedBlock:
    """What a block had in the last micro-batch of a step.

    Attributes
    ----------
    name : str
        Name of the block.
    inputs : BlockInputs
        What entered it and arrived at it.
    local : LocalSum or None
        What this rank's own backward passes gave one of its tensors; None where it trains none.
    """

    def __init__(self, watched: WatchedModel, name: str, number: int) -> None:
        self.name = name
        self.inputs = BlockInputs()
        self._block = watched.blocks[name]
        self._handles: list[Any] = []
        self._listened: set[int] = set()
        own = [tensor for tensor, parameter in self._block.named_parameters() if parameter.requires_grad]
        self._tensor = own[number % len(own)] if own else ""
        self.local: LocalSum | None = None
        if self._tensor:
            parameter = self._block.get_parameter(self._tensor)
            self.local = LocalSum(name=f"{name}.{self._tensor}", parameter=parameter)

    def begin_micro_batch(self) -> None:
        """Note the next pass in place of an earlier one of the step, and add its gradient to theirs."""
        self._remove()
        self.inputs = BlockInputs()
        self._handles = keep_inputs_of(self._block, self.inputs)
        self._handles.append(self._block.register_forward_pre_hook(self._listen))

    def _listen(self, *_: Any) -> None:
        """Add up gradients of the whole tensor, which is the module's own while the block computes."""
        if self.local is None:
            return
        whole = self._block.get_parameter(self._tensor)
        if not isinstance(whole, DTensor) and id(whole) not in self._listened:
            self._listened.add(id(whole))
            self.local.listen_to(whole)

    def end(self) -> None:
        """Note no more."""
        self._remove()
        if self.local is not None:
            self.local.end()

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def can_be_gathered(watched: WatchedModel, name: str) -> bool:
    """Report whether a block is sharded by FSDP2 as one: neither its parts by themselves, nor by tensor parallel."""
    if watched.shares_batches or watched.has_flat_parts or name not in watched.blocks:
        return False
    block = watched.blocks[name]
    inner = [module for module in block.modules() if module is not block]
    return isinstance(block, FSDPModule) and not any(isinstance(module, FSDPModule) for module in inner)
