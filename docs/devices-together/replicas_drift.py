"""Train replicas by DistributedDataParallel, and compare every rank's gradients and parameters. Torch alone.

    torchrun --nproc-per-node 2 docs/devices-together/replicas_drift.py
    torchrun --nproc-per-node 2 docs/devices-together/replicas_drift.py --unlike

With `--unlike` the last rank takes the CPU's baseline kernels, as a device of another type would: all ranks get the
same averaged gradient, and their own AdamW rounds it differently, so the replicas drift apart.
"""

import os
import sys

if "--unlike" in sys.argv and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
    # read when torch first computes
    os.environ.update(ATEN_CPU_CAPABILITY="default", MKL_CBWR="COMPATIBLE", ONEDNN_MAX_CPU_ISA="SSE41")

import torch
import torch.distributed as dist
import torch.distributed.nn  # before a group is made: imported later, its default arguments keep it, with its threads

BACKEND = dist.get_default_backend_for_device(torch.accelerator.current_accelerator() or torch.device("cpu"))


def same(tensors: list[torch.Tensor]) -> str:
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, [tensor.detach().cpu() for tensor in tensors])
    wrong = sum(any(not torch.equal(one[i], every[0][i]) for one in every) for i in range(len(tensors)))
    return f"differ in {wrong} of {len(tensors)}" if wrong else "equal on all ranks"


def train() -> None:
    device = torch.device("cpu")
    if BACKEND != "gloo":
        device = torch.device(torch.accelerator.current_accelerator().type, dist.get_rank())
        torch.accelerator.set_device_index(dist.get_rank())
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 8, bias=False), torch.nn.Linear(8, 64, bias=False)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, 4):
        model(torch.randn(8, 64, generator=generator).to(device)).square().mean().backward()
        gradients = same([parameter.grad for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        parameters = same(list(model.parameters()))
        if dist.get_rank() == 0:
            print(f"step {step}: gradients {gradients}, parameters {parameters}")


if __name__ == "__main__":
    dist.init_process_group(BACKEND)
    # its model is gone before the group is: the reducer of DistributedDataParallel, if it is the last to hold that,
    # joins its threads with the interpreter's lock held, for which one of them may wait
    train()
    dist.destroy_process_group()
