"""Add a low-rank adapter before `fully_shard` and after it, train three steps, and compare the ranks. Torch alone.

    torchrun --nproc-per-node 2 docs/devices-together/adapter_after_fully_shard.py

Added afterwards, its factors are plain tensors of each rank: nothing broadcasts them and nothing averages their
gradients, so every rank trains an adapter of its own, and no loss shows it. huggingface/transformers#48792.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

BACKEND = dist.get_default_backend_for_device(torch.accelerator.current_accelerator() or torch.device("cpu"))


class Adapted(torch.nn.Module):
    """A linear layer with a low-rank delta, as PEFT wraps one."""

    def __init__(self, layer: torch.nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        device = next(layer.parameters()).device
        self.lora_a = torch.nn.Linear(layer.in_features, rank, bias=False, device=device)
        self.lora_b = torch.nn.Linear(rank, layer.out_features, bias=False, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.lora_b(self.lora_a(x))


def network(device: torch.device) -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64, device=device) for _ in range(2)]
    torch.manual_seed(100 + dist.get_rank())  # from here on each rank has its own numbers, as in a script of a user
    return torch.nn.Sequential(*layers)


def with_adapter(model: torch.nn.Sequential) -> torch.nn.Sequential:
    for number, layer in enumerate(model):
        model[number] = Adapted(layer)
    return model


def sharded(model: torch.nn.Sequential, device: torch.device) -> torch.nn.Sequential:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model: torch.nn.Module, device: torch.device) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())  # each rank has its own batch
    for _ in range(3):
        model(torch.randn(8, 64, generator=generator).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def differing(model: torch.nn.Module) -> str:
    own = {}
    for name, parameter in model.named_parameters():
        if "lora" in name:
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            own[name] = whole.detach().cpu()
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)  # every rank's own answer: rank 0 alone would say that all is well
    wrong = sum(any(not torch.equal(one[name], own[name]) for one in every) for name in own)
    return f"the ranks hold different numbers in {wrong} of {len(own)} factors" if wrong else "the ranks agree"


def main() -> None:
    dist.init_process_group(BACKEND)
    device = torch.device("cpu")
    if BACKEND != "gloo":
        device = torch.device(torch.accelerator.current_accelerator().type, dist.get_rank())
        torch.accelerator.set_device_index(dist.get_rank())
    before = sharded(with_adapter(network(device)), device)
    after = with_adapter(sharded(network(device), device))
    for title, model in (("before", before), ("after", after)):
        train(model, device)
        said = differing(model)
        if dist.get_rank() == 0:
            print(f"adapter added {title} fully_shard: {said}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # fully_shard keeps the group's threads; one that runs while the interpreter ends aborts it
