"""Train the same model on the same data on every rank alone, and name the first step at which they part. Torch alone.

    torchrun --nproc-per-node 2 docs/devices-together/trainings_part.py
    torchrun --nproc-per-node 2 docs/devices-together/trainings_part.py --unlike
    torchrun --nproc-per-node 2 docs/devices-together/trainings_part.py --wrong

With `--unlike` the last rank takes the CPU's baseline kernels; with `--wrong` its gradients are off by 1 % from step 5
on. Both part from rank 0, and both losses look alike: what tells them apart is each step judged from the numbers that
the rank had before it. marin-community/marin#4755.
"""

import os
import sys

if "--unlike" in sys.argv and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
    # read when torch first computes
    os.environ.update(ATEN_CPU_CAPABILITY="default", MKL_CBWR="COMPATIBLE", ONEDNN_MAX_CPU_ISA="SSE41")

import copy

import torch
import torch.distributed as dist
import torch.distributed.nn  # before a group is made: imported later, its default arguments keep it, with its threads

STEPS, ALLOWED = 20, 1e-4
BACKEND = dist.get_default_backend_for_device(torch.accelerator.current_accelerator() or torch.device("cpu"))


def passed(model: torch.nn.Module, x: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
    model.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), x.argmax(1) % 32)
    loss.backward()
    return float(loss.detach()), [parameter.grad for parameter in model.parameters()]


def main() -> None:
    dist.init_process_group(BACKEND)
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if BACKEND != "gloo":
        device = torch.device(torch.accelerator.current_accelerator().type, rank)
        torch.accelerator.set_device_index(rank)
    is_last = rank == world - 1
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 32)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(0)
    first_bits, first_wrong, loss = 0, 0, 0.0
    for step in range(1, STEPS + 1):
        x = torch.randn(16, 64, generator=generator)
        # the float64 gradient at this rank's own parameters: no error of an earlier step is in the difference
        _, exact = passed(copy.deepcopy(model).cpu().double(), x.double())
        loss, gradients = passed(model, x.to(device))
        if "--wrong" in sys.argv and is_last and step >= 5:
            gradients[0].mul_(1.01)
        off = max(float((g.cpu().double() - e).norm() / e.norm()) for g, e in zip(gradients, exact, strict=True))
        first_wrong = first_wrong or (step if off > ALLOWED else 0)
        optimizer.step()
        every: list = [None] * world
        dist.all_gather_object(every, [parameter.detach().cpu() for parameter in model.parameters()])
        if any(not torch.equal(*pair) for pair in zip(every[rank], every[0], strict=True)):
            first_bits = first_bits or step
    said: list = [None] * world
    dist.all_gather_object(said, (first_bits, first_wrong, loss))
    for other, (bits, wrong, last) in enumerate(said if rank == 0 else ()):
        parts = f"other bits than rank 0 from step {bits} on" if bits else "the bits of rank 0"
        verdict = f"a gradient that rounding does not explain at step {wrong}" if wrong else "every step is rounding"
        print(f"rank {other}: loss {last:.6f} after {STEPS} steps; {parts}; {verdict}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
