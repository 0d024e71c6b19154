"""Find what each parameter of a loaded adapter should hold: PEFT's loading function is run again, and observed."""

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
    the installed PEFT.

    Returns
    -------
    dict of str to (str, torch.Tensor)
        By name in the model: the name in the file, and the tensor on the CPU in its dtype.
    """
    from peft import set_peft_model_state_dict

    in_file = dict(files.read_all())
    # converted tensors are new objects: unconverted ones are recognized by storage and shape
    file_names = {(start_of(tensor), tuple(tensor.shape)): name for name, tensor in in_file.items() if tensor.numel()}
    with (
        _prompt_on_the_host(model, adapter) as prompt,
        _recording_load_state_dict(model) as loaded,
        _ranks_as_they_are(model),
    ):
        set_peft_model_state_dict(model, in_file, adapter_name=adapter)
    expected: dict[str, tuple[str, torch.Tensor]] = {}
    for name, tensor in loaded.items():
        expected[name] = file_names.get((start_of(tensor), tuple(tensor.shape)), name), tensor
    prefix = f"prompt_encoder.{adapter}."
    if prompt is not None and not any(name.startswith(prefix) for name in expected):
        # the method itself has split a tensor of the file: its parts are named after it
        whole = next((name for name in expected if name in in_file), prefix)
        return _filled_parts(prompt, whole, prefix)
    return expected


def _filled_parts(prompt: torch.nn.Module, whole: str, prefix: str) -> dict[str, tuple[str, torch.Tensor]]:
    """Return the tensors of a prompt's module that loading has filled, as `expected_adapter` does.

    Parameters
    ----------
    prompt : torch.nn.Module
        The module of `_prompt_on_the_host`: a tensor that nothing was loaded into is still full of NaN.
    whole : str
        Name in the file of the tensor that was split.
    prefix : str
        Prefix of the module's tensors in the model.
    """
    parts: dict[str, tuple[str, torch.Tensor]] = {}
    for name, tensor in prompt.state_dict().items():
        if tensor.is_floating_point() and not bool(tensor.isnan().all()):
            parts[f"{prefix}{name}"] = f"{whole}.{name}", tensor
    return parts


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
    """Collect the tensors that are loaded into the model and its parts, by name in the model, and load none of them.

    A prompt's tensors go to the prompt's own module; modules outside of the model load as ever.
    """
    loaded: dict[str, torch.Tensor] = {}
    prefixes = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
    real = torch.nn.Module.load_state_dict

    def record(module: torch.nn.Module, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        if id(module) not in prefixes:
            return real(module, state_dict, *args, **options)
        own_names = set(module.state_dict(keep_vars=True))
        if module is model:
            loaded.update(state_dict)
        else:
            prefix = prefixes[id(module)]
            taken = {f"{prefix}{name}": tensor for name, tensor in state_dict.items() if name in own_names}
            # PEFT offers the same tensors to the whole model first, which has no such name
            taken_ids = {id(tensor) for tensor in taken.values()}
            for name in [name for name, tensor in loaded.items() if id(tensor) in taken_ids]:
                del loaded[name]
            loaded.update(taken)
        return torch.nn.modules.module._IncompatibleKeys(
            missing_keys=sorted(own_names - set(state_dict)), unexpected_keys=sorted(set(state_dict) - own_names)
        )

    with mock.patch.object(torch.nn.Module, "load_state_dict", record):
        yield loaded
