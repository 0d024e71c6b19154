"""Wrappers that the drill plants: one that hides nothing, which it wraps the base with, and faulty ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from consistency.worker.faults.planting import Install, instead


class Hiding(torch.nn.Module):
    """Forward the forward pass and nothing else: the first wrapper that people write."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model inside."""
        return self.model(*args, **kwargs)


class Harmless(Hiding):
    """Forward every attribute of the model inside."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)


class HoldingTwice(Harmless):
    """Keep a copy of every weight, in no module, as a wrapper for an average of weights does."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.kept = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def harmless(model: torch.nn.Module) -> torch.nn.Module:
    """Wrap a model without hiding anything of it."""
    return Harmless(model)


def _wrapping_with(make: Callable[[torch.nn.Module], torch.nn.Module]) -> Install:
    """Wrap the base in something other than what the user's function returns."""

    @instead("consistency.extras.peft_api.wrapping.worker:wrap")
    def wrapped(real: Callable[..., Any], text: str, plain: torch.nn.Module) -> torch.nn.Module:
        real(text, plain)
        return make(plain)

    return wrapped


hides_model = _wrapping_with(Hiding)
holds_twice = _wrapping_with(HoldingTwice)
