"""Faults of one road alone: where PEFT chooses the device, with `low_cpu_mem_usage`, or in transformers' loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from consistency.worker.faults.planting import Install, Undo, replace

Tensors = dict[str, torch.Tensor]


def _on_load_paths(applies: Callable[[dict[str, Any]], bool], change: Callable[[Tensors], None]) -> Install:
    """Change what PEFT reads from the adapter's file, in the calls whose options say so."""
    hit = False

    def note(real: Callable[..., Any]) -> Callable[..., Any]:
        def load_adapter(self: Any, *args: Any, **options: Any) -> Any:
            nonlocal hit
            hit = applies(options)
            return real(self, *args, **options)

        return load_adapter

    def wrap(real: Callable[..., Any]) -> Callable[..., Tensors]:
        def load(*args: Any, **kwargs: Any) -> Tensors:
            found: Tensors = {name: tensor.clone() for name, tensor in real(*args, **kwargs).items()}
            if hit:
                change(found)
            return found

        return load

    def install() -> Undo:
        from peft import PeftModel, peft_model

        first, second = replace(PeftModel, "load_adapter", note), replace(peft_model, "load_peft_weights", wrap)

        def undo() -> None:
            second()
            first()

        return undo

    return install


def _in_transformers(change: Callable[[torch.nn.Module], None]) -> Install:
    """Change the model after transformers' own `load_adapter`."""

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def load_adapter(self: Any, *args: Any, **options: Any) -> Any:
            done = real(self, *args, **options)
            with torch.no_grad():
                change(self)
            return done

        return load_adapter

    def install() -> Undo:
        from transformers.integrations.peft import PeftAdapterMixin

        return replace(PeftAdapterMixin, "load_adapter", wrap)

    return install


def _no_b(tensors: Tensors) -> None:
    for name in [name for name in tensors if "lora_B" in name]:
        del tensors[name]


def _through_bfloat16(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        tensors[name] = tensor.to(torch.bfloat16).to(tensor.dtype)


def _zeros(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.zero_()


FAULTS: dict[str, Install] = {
    # lora_B stays at its initial zeros, as where the copies from the device that PEFT chooses never arrive
    "road-copies-dropped": _on_load_paths(lambda options: options.get("torch_device") is None, _no_b),
    "road-low-memory-rounds": _on_load_paths(lambda options: bool(options.get("low_cpu_mem_usage")), _through_bfloat16),
    "road-transformers-zeros": _in_transformers(_zeros),
}
