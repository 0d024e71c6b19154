"""End a group that DistributedDataParallel still holds: some ranks wait for ever. Torch alone.

    for i in $(seq 20); do timeout 60 torchrun --nproc-per-node 2 docs/upstream/ddp_ends_last.py; echo $?; done

With `--before` the model is gone first, and every rank ends.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # before a group is made: imported later, its default arguments keep it


def train() -> None:
    """Take some steps."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    for _ in range(3):
        model(torch.randn(8, 64)).square().mean().backward()
        dist.all_gather_object([None] * dist.get_world_size(), [one.grad for one in model.parameters()])
    if "--before" not in sys.argv:
        dist.destroy_process_group()


dist.init_process_group("gloo")
train()
if "--before" in sys.argv:
    dist.destroy_process_group()
