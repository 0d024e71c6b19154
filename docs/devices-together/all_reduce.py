"""Sum over the ranks at many sizes, and judge every rank's own answer. Torch and NumPy alone.

    torchrun --nproc-per-node 2 docs/devices-together/all_reduce.py

A sum of n terms may be off by (n - 1) u Σ|x| in any order, and all ranks have to hold the same bits. A script that
prints what rank 0 got says that all is well where the other ranks are wrong: pytorch#138811, nccl#1497, nccl#1950,
rocm#6565.
"""

import hashlib

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # before a group is made: imported later, its default arguments keep it, with its threads

BACKEND = dist.get_default_backend_for_device(torch.accelerator.current_accelerator() or torch.device("cpu"))
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SIZES = (1, 7, 8, 9, 1023, 1024, 1025, (1 << 16) - 1, (1 << 16) + 8, 1 << 20)


def given(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what a rank gives, which every other rank can draw too."""
    generator = np.random.Generator(np.random.Philox(1000 * rank + size % 997))
    return torch.from_numpy(generator.standard_normal(size, dtype=np.float32)).to(dtype)


def main() -> None:
    dist.init_process_group(BACKEND)
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if BACKEND != "gloo":
        device = torch.device(torch.accelerator.current_accelerator().type, rank)
        torch.accelerator.set_device_index(rank)
    wrong = 0
    for dtype, unit in UNIT_ROUNDOFF.items():
        for size in SIZES:
            terms = torch.stack([given(other, size, dtype) for other in range(world)]).double()
            found = given(rank, size, dtype).to(device)
            dist.all_reduce(found)
            found = found.cpu()
            allowed = 1.01 * (world - 1) * unit * terms.abs().sum(0) + 2.0**-24
            outside = int(((found.double() - terms.sum(0)).abs() > allowed).sum())
            bits = hashlib.sha256(found.view(torch.uint8).numpy().tobytes()).hexdigest()
            every: list = [None] * world
            dist.all_gather_object(every, (outside, bits))
            for other, (elements, digest) in enumerate(every):
                problems = [f"{elements} elements outside of the bound"] if elements else []
                problems += ["other bits than rank 0"] if digest != every[0][1] else []
                wrong += bool(problems)
                if problems and rank == 0:
                    print(f"{str(dtype).removeprefix('torch.')} {size}: rank {other}: {', '.join(problems)}")
    if rank == 0:
        print(f"{BACKEND}, {world} ranks: {wrong or 'no'} wrong answers of {3 * len(SIZES) * world}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
