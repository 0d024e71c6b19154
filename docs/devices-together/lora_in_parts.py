"""Split a layer and its low-rank adapter over ranks, and say whether the difference from one device is healthy.

    torchrun --nproc-per-node 2 docs/devices-together/lora_in_parts.py

Torch alone. The layer is split by columns and by rows, right and with two errors that raise nothing: the delta added
once for each rank, and a packed query-key-value layer whose factor is cut into as many equal pieces as there are ranks.
Sums over parts are added in another order, which rounding explains; the errors are 10⁴ times as large and more.
vllm#21471, TensorRT-LLM#2589, opacus#789, vllm#2679.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn  # before a group is made: imported later, its default arguments keep it, with its threads

BACKEND = dist.get_default_backend_for_device(torch.accelerator.current_accelerator() or torch.device("cpu"))
WIDTH, RANK, UNIT_ROUNDOFF = 96, 8, 2.0**-24


def main() -> None:
    dist.init_process_group(BACKEND)
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if BACKEND != "gloo":
        device = torch.device(torch.accelerator.current_accelerator().type, rank)
        torch.accelerator.set_device_index(rank)
    generator = torch.Generator().manual_seed(0)
    x, w, a, b = (
        torch.randn(*shape, generator=generator)
        for shape in ((16, WIDTH), (WIDTH, WIDTH), (RANK, WIDTH), (WIDTH, RANK))
    )
    packed_w, packed_b = torch.cat([w, w, w]), torch.cat([b, 2 * b, 3 * b])

    def judge(title: str, found: torch.Tensor, weight: torch.Tensor, factor: torch.Tensor) -> None:
        exact = x.double() @ (weight.double() + factor.double() @ a.double()).T
        sizes = x.double().abs() @ (weight.double().abs() + factor.double().abs() @ a.double().abs()).T
        allowed = (WIDTH + RANK + world + 2) * UNIT_ROUNDOFF * sizes  # of a sum of so many terms, in any order
        ratio = float(((found.cpu().double() - exact).abs() / allowed).max())
        if rank == 0:
            print(f"{title}: {'healthy' if ratio <= 1 else 'WRONG'}, {ratio:.2g} of what rounding may do")

    mine = slice(rank * WIDTH // world, (rank + 1) * WIDTH // world)
    on = [tensor.to(device) for tensor in (x, w, a, b, packed_w, packed_b)]
    x_, w_, a_, b_, packed_w_, packed_b_ = on

    def gathered(part: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(part) for _ in range(world)]
        dist.all_gather(parts, part.contiguous())
        return parts

    def reduced(part: torch.Tensor) -> torch.Tensor:
        whole = part.contiguous()
        dist.all_reduce(whole)
        return whole

    judge("split by columns", torch.cat(gathered(x_ @ w_[mine].T + x_ @ a_.T @ b_[mine].T), 1), w, b)
    inner = reduced(x_[:, mine] @ a_[:, mine].T)
    base = x_[:, mine] @ w_[:, mine].T
    judge("split by rows", reduced(base) + inner @ b_.T, w, b)
    judge("split by rows, delta added on each rank", reduced(base + inner @ b_.T), w, b)
    heads = [slice(part * WIDTH + mine.start, part * WIDTH + mine.stop) for part in range(3)]
    right = torch.cat([x_ @ packed_w_[one].T + x_ @ a_.T @ packed_b_[one].T for one in heads], 1)
    third = slice(rank * 3 * WIDTH // world, (rank + 1) * 3 * WIDTH // world)
    wrong = torch.cat([x_ @ packed_w_[one].T for one in heads], 1) + x_ @ a_.T @ packed_b_[third].T
    for title, part in (("packed, by heads", right), ("packed, factor cut into equal pieces", wrong)):
        pieces = [piece.chunk(3, 1) for piece in gathered(part)]
        judge(title, torch.cat([piece[i] for i in range(3) for piece in pieces], 1), packed_w, packed_b)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
