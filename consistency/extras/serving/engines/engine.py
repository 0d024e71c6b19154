"""What an engine is here: a compiler for one function, and the name it goes by."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any, Protocol

import torch

from consistency.errors import InputError, did_you_mean
from consistency.extras.serving.engines import compilers

Compiled = Callable[[dict[str, torch.Tensor]], torch.Tensor]
"""Takes the inputs on the CPU, any number of rows of them, and returns the logits on the CPU."""


class Engine(Protocol):
    """A compiler of models; it is made with the device that they run on, in torch's spelling."""

    name: str
    version: str
    device: str
    """`name`, `version`, `device`: as they stand in the outputs."""
    settings: dict[str, str]
    """Further settings that the numbers may depend on."""

    def compiled(self, model: LogitsOf, inputs: dict[str, torch.Tensor]) -> Compiled:
        """Return a function for any number of rows, to be run while the model is in the state that it is in now."""
        ...


class LogitsOf(torch.nn.Module):
    """A model as a function of its inputs in order, whose result is one tensor: what compilers take."""

    def __init__(self, model: torch.nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.names = names
        config = getattr(model, "config", None)
        self.extras: dict[str, Any] = {"use_cache": False} if hasattr(config, "use_cache") else {}

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        output = self.model(**dict(zip(self.names, inputs, strict=True)), **self.extras)
        logits: torch.Tensor = output if isinstance(output, torch.Tensor) else output["logits"]
        return logits


def make_engine(name: str, device: str) -> Engine:
    """Return an engine by its name.

    Raises
    ------
    InputError
        There is no engine of that name, or a library that it needs is not installed.
    """
    classes = compilers()
    if name not in classes:
        raise InputError(
            f"no inference engine is known as {name!r}",
            wanted="one of " + ", ".join(classes),
            hint=did_you_mean(name, list(classes)),
        )
    engine: Engine = pkgutil.resolve_name(classes[name])(device)
    return engine
