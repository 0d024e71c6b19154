"""What each parameter of a loaded adapter should hold: PEFT's loading function is run again, and observed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from consistency.numerics.identity import start_of
from consistency.worker.model.loading import ADAPTER_NAME
from consistency.worker.model.weight_files import WeightFiles


def expected_adapter(
    model: torch.nn.Module, files: WeightFiles, adapter: str = ADAPTER_NAME
) -> dict[str, tuple[str, torch.Tensor]]:
    """Ask PEFT itself which parameter each tensor of the adapter's file goes to.

    PEFT's loading function is run again on tensors read on the CPU, with the last step, `load_state_dict` of the model
    and of its parts, replaced by one that only observes. So key mapping, renaming and weight conversion are those of
    the installed PEFT. Returned by name in the model: the name in the file, and the tensor on the CPU in its dtype.
    """
    from peft import set_peft_model_state_dict

    given = dict(files.read_all())
    # converted tensors are new objects: unconverted ones are recognized by storage and shape
    origin = {(start_of(t), tuple(t.shape)): name for name, t in given.items() if t.numel()}
    with (
        _prompt_on_the_host(model, adapter) as prompt,
        _recording_load_state_dict(model) as seen,
        _ranks_as_they_are(model),
    ):
        set_peft_model_state_dict(model, given, adapter_name=adapter)
    found = {name: (origin.get((start_of(tensor), tuple(tensor.shape)), name), tensor) for name, tensor in seen.items()}
    prefix = f"prompt_encoder.{adapter}."
    if prompt is not None and not any(name.startswith(prefix) for name in found):
        # taken apart by the method itself: the parts are named after what they are parts of
        whole = next((name for name in found if name in given), prefix)
        floating = {name: part for name, part in prompt.state_dict().items() if part.is_floating_point()}
        parts = {name: part for name, part in floating.items() if not bool(part.isnan().all())}
        found = {f"{prefix}{name}": (f"{whole}.{name}", part) for name, part in parts.items()}
    return found


def is_made_anew(state: Mapping[str, torch.Tensor], name: str, adapter: str = ADAPTER_NAME) -> bool:
    """Report whether PEFT makes a tensor anew that the adapter's file holds, and does not load the file's.

    PEFT before version 0.21 does so with the projections of VeRA: it offers them to the model by their names in the
    file, which lack the adapter's.
    """
    return name not in state and f"{name}.{adapter}" in state


@contextmanager
def _prompt_on_the_host(model: torch.nn.Module, adapter: str) -> Iterator[torch.nn.Module | None]:
    """Put a copy full of NaN, on the CPU, in the place of the prompt's own module, if there is one.

    Some methods copy the file's tensor into their parameters themselves: on the device they would be loaded again,
    without anybody having compared the first load.
    """
    prompts: Any = getattr(model, "prompt_encoder", {})
    real = dict(prompts.items()).get(adapter)
    if real is None:
        yield None
        return
    prompts[adapter] = copy.deepcopy(real).to_empty(device="cpu")
    with torch.no_grad():
        for tensor in prompts[adapter].state_dict().values():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
    try:
        yield prompts[adapter]
    finally:
        prompts[adapter] = real


@contextmanager
def _ranks_as_they_are(model: Any) -> Iterator[None]:
    """Keep AdaLoRA from cutting its layers to the ranks in the file: the load has done so, and a second cut fails."""
    cut = "resize_modules_by_rank_pattern"
    tuner = getattr(model, "base_model", None)
    if not hasattr(tuner, cut):
        yield
        return

    def keep(*_: object) -> None:
        pass

    with mock.patch.object(tuner, cut, keep):
        yield


@contextmanager
def _recording_load_state_dict(model: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Collect what is loaded into the model and its parts: a prompt's tensors go to the prompt's own module."""
    seen: dict[str, torch.Tensor] = {}
    prefixes = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
    real = torch.nn.Module.load_state_dict

    def look(module: torch.nn.Module, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        if id(module) not in prefixes:
            return real(module, state_dict, *args, **options)
        own = set(module.state_dict(keep_vars=True))
        if module is model:
            seen.update(state_dict)
        else:
            taken = {f"{prefixes[id(module)]}{name}": t for name, t in state_dict.items() if name in own}
            # PEFT offers the same tensors to the whole model first, which has no such name
            for name in [n for n, t in seen.items() if any(t is other for other in taken.values())]:
                del seen[name]
            seen.update(taken)
        return torch.nn.modules.module._IncompatibleKeys(
            missing_keys=sorted(own - set(state_dict)), unexpected_keys=sorted(set(state_dict) - own)
        )

    with mock.patch.object(torch.nn.Module, "load_state_dict", look):
        yield seen
