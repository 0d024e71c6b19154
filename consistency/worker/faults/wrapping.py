"""Wrappers: one that hides nothing, for the drill to wrap the base with, and what goes wrong with others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from consistency.worker.faults.planting import Install, Undo, replace


class Hiding(torch.nn.Module):
    """Hand the forward pass on, and nothing else: what people write first."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model inside."""
        return self.model(*args, **kwargs)


class Harmless(Hiding):
    """Answer what the model inside answers."""

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


def _instead(make: Callable[[torch.nn.Module], torch.nn.Module]) -> Install:
    """Wrap the base in something else than what the user's function gives."""

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(text: str, plain: torch.nn.Module) -> torch.nn.Module:
            real(text, plain)
            return make(plain)

        return wrapped

    def install() -> Undo:
        from consistency.worker.stages import wrapping

        return replace(wrapping, "wrap", wrap)

    return install


FAULTS: dict[str, Install] = {
    "wrapper-hides-model": _instead(Hiding),
    "wrapper-holds-twice": _instead(HoldingTwice),
}
