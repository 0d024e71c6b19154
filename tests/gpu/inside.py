"""What tests do on an accelerator, in a process of its own: `python tests/gpu/inside.py TASK ARGUMENTS`, JSON out."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch


def cards(kind: str) -> dict[str, Any]:
    """List the devices of a type."""
    module = torch.get_device_module(kind)
    found = []
    for index in range(module.device_count()):
        of = module.get_device_properties(index)
        capability = [of.major, of.minor] if hasattr(of, "major") else []
        uuid = str(getattr(of, "uuid", ""))
        found.append({"name": f"{kind}:{index}", "model": of.name, "uuid": uuid, "capability": capability})
    built: dict[str, str | None] = {"CUDA": torch.version.cuda, "HIP": torch.version.hip}
    names = [f"{name} {version}" for name, version in built.items() if version]
    return {"torch": torch.__version__, "built_for": (names or ["no GPU"])[0], "cards": found}


def free_bytes(device: str) -> int:
    """Return a device's free memory."""
    free: int = torch.get_device_module(torch.device(device).type).mem_get_info(torch.device(device))[0]
    return free


def fill(device: str) -> list[torch.Tensor]:
    """Take all memory of a device that can be had, whatever its size."""
    taken, size = [], 2**32
    while size >= 2**12:
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            size //= 2
    return taken


def hold(device: str) -> int:
    """Fill a device until the input ends."""
    taken = fill(device)
    print("full", flush=True)
    sys.stdin.read()
    return len(taken)


def run_out(place: str, device: str) -> dict[str, Any]:
    """Run out of memory: in the first call, which makes the context, in a product, or in a merge by PEFT."""
    from consistency.worker.device_error import is_out_of_memory
    from consistency.worker.model.merging import merged

    def first_call() -> None:
        torch.ones(1, device=device).add_(1)

    def product() -> None:
        a = torch.ones(64, 64, device=device)
        kept.extend(fill(device))
        (a @ a).sum().item()

    def merge() -> None:
        layer = _lora(4096, 4096, torch.float32, device)
        kept.extend(fill(device))
        with merged(layer, safe=False):
            pass

    kept: list[torch.Tensor] = []
    try:
        {"context": first_call, "product": product, "merge": merge}[place]()
    except Exception as error:  # of which kind is what the test asks
        return {"raised": type(error).__name__, "text": str(error)[:300], "recognized": is_out_of_memory(error)}
    return {"raised": None}


def merge_shares(device: str) -> dict[str, float]:
    """Return the share of its limit that the peak of healthy merges takes, and of one with a third copy."""
    from consistency.worker.faults import plant
    from consistency.worker.memory.merge_peak import measure_merge
    from consistency.worker.memory.peak import AllocatorMeter

    found = {}
    for out, inner, dtype in ((128, 128, torch.float32), (768, 768, torch.bfloat16), (4096, 4096, torch.float32)):
        for safe in (False, True):
            layer = _lora(out, inner, dtype, device)
            meter = AllocatorMeter(torch.device(device), lambda: None)
            share = measure_merge(layer, meter, safe=safe).share
            assert share is not None
            found[f"{out}x{inner} {dtype}{' safe' if safe else ''}"] = share
        with plant("merge-third-copy"):
            third = measure_merge(layer, meter, safe=False).share
        assert third is not None
        found[f"{out}x{inner} {dtype}, third copy"] = third
    return found


def allocated(device: str) -> list[int | None]:
    """Return what the allocator counts before, with and after a tensor of 32 MiB, and its peak."""
    from consistency.worker.memory.placement import Allocator

    of = torch.device(device)
    torch.ones(1, device=of)
    allocator = Allocator(of.type)
    allocator.reset_peak(of)
    before = allocator.figures(of).allocated
    tensor = torch.ones(2**25, dtype=torch.uint8, device=of)
    held = allocator.figures(of).allocated
    del tensor
    after = allocator.figures(of)
    return [before, held, after.allocated, after.peak_allocated]


def variants(device: str) -> dict[str, Any]:
    """Multiply and convolve under the settings of every variant of CUDA: digests, or why torch cannot set one."""
    from consistency.devices.backends import BACKENDS
    from consistency.errors import UsageError
    from consistency.numerics.digest import digest
    from consistency.worker.determinism import changed, deterministic

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(1024, 1024, generator=generator).to(device) for _ in range(2))
    x, w = (torch.randn(4, 16, 16, 16, generator=generator).to(device) for _ in range(2))
    found: dict[str, Any] = {}
    trials: dict[str, dict[str, Any]] = {"": {}, **{v.name: dict(v.settings) for v in BACKENDS["cuda"].variants}}
    for name, settings in trials.items():
        try:
            with deterministic(threads=1, **settings) as asked:
                torch.nn.functional.conv2d(x, w)  # cuDNN may take a kernel without TF32
                found[name] = {
                    "cublas": torch._C._get_cublas_allow_tf32(), "cudnn": torch._C._get_cudnn_allow_tf32(),
                    "product": digest(a @ b).value, "changed": list(changed(asked)),
                }  # fmt: skip
        except UsageError as refused:
            found[name] = str(refused.hint)
    return found


def _lora(out: int, inner: int, dtype: torch.dtype, device: str) -> Any:
    """Return a linear layer with LoRA on a device."""
    import peft

    from consistency.worker.model.merging import adapted_layers

    base = torch.nn.Sequential(torch.nn.Linear(inner, out, bias=False)).to(dtype)
    config = peft.LoraConfig(r=8, target_modules=["0"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what PEFT says of layers of its own accord
        ((_, layer),) = adapted_layers(peft.get_peft_model(base, config).to(device))
    return layer


TASKS: tuple[Callable[..., Any], ...] = (cards, free_bytes, hold, run_out, merge_shares, allocated, variants)


if __name__ == "__main__":
    _, asked, *given = sys.argv
    print(json.dumps({task.__name__: task for task in TASKS}[asked](*given)))
