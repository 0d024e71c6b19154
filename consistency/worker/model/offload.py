"""Keep a base on the host: accelerate's hooks bring each layer's weights to the device when it computes.

`accelerate.cpu_offload` would do for a base alone. Two things differ here for an adapter's sake. The adapter's own
tensors stay on the device, so that they can be compared there and have gradients. And the weights below one of PEFT's
layers arrive for the whole of that layer's forward pass, not for the base layer's part of it: several methods (DoRA,
BOFT, MiSS) read the base weight outside of it.

PEFT loads an adapter while the base is on the host (as it does onto any base that accelerate has offloaded), because
some methods compute from the base's values.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_module
from accelerate.utils import send_to_device
from peft.tuners.tuners_utils import BaseTunerLayer


class Weights(AlignDevicesHook):  # type: ignore[misc]  # accelerate has no types
    """Bring one module's own parameters to the device, and drop them there; its buffers stay there."""

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        parameters = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
        super().__init__(execution_device=device, offload=True, weights_map=parameters)
        self.init_hook(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Weights:
        return self  # a copy of a layer is not a copy of the base


@dataclass(slots=True, eq=False)
class Part:
    """A module of the base that has tensors of its own, with these tensors as they are on the host."""

    name: str
    module: torch.nn.Module
    parameters: dict[str, Any]
    buffers: dict[str, Any]
    hook: Weights | None = None

    def arrive(self) -> None:
        assert self.hook is not None
        self.hook.pre_forward(self.module)

    def leave(self) -> None:
        assert self.hook is not None
        self.hook.post_forward(self.module, None)


Around = Callable[[torch.nn.Module], AbstractContextManager[None]]
"""Returns a context manager to be entered around a module's forward pass."""


class Unit(ModelHook):  # type: ignore[misc]  # accelerate has no types
    """Hold the weights of some parts on the device for one module's forward pass.

    `around` is entered with the module while they are there: it may merge an adapter into them.
    """

    def __init__(self, parts: list[Part], device: torch.device) -> None:
        self.execution_device = device
        self.around: Around | None = None
        self._parts = parts
        self._entered = ExitStack()

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        return self

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        self._entered.close()  # a pass that failed inside the module has left it open
        self._entered.enter_context(_onloaded(self._parts))
        if self.around is not None:
            self._entered.enter_context(self.around(module))
        return send_to_device(args, self.execution_device), send_to_device(kwargs, self.execution_device)

    def post_forward(self, _module: torch.nn.Module, output: Any) -> Any:
        self._entered.close()
        return output


@contextmanager
def _onloaded(parts: list[Part]) -> Iterator[None]:
    """Hold the weights of some parts on the device."""
    try:
        for part in parts:
            part.arrive()
        yield
    finally:
        for part in parts:
            part.leave()


class Offload:
    """The base's tensors on the host, by the modules that have them, and the hooks that bring them to a device."""

    def __init__(self, base: torch.nn.Module, device: torch.device) -> None:
        self._device = device
        self._units: list[torch.nn.Module] = []
        self.parts = [
            Part(name, module, dict(module._parameters), dict(module._buffers))
            for name, module in base.named_modules()
            if any(tensor is not None for tensor in (*module._parameters.values(), *module._buffers.values()))
        ]

    def attach(self, model: torch.nn.Module) -> None:
        """Put the hooks on; `model` is the base, or PEFT's model around it, whose other tensors go to the device."""
        # every part inside one of PEFT's layers arrives with that layer's forward pass, the outermost if they nest
        adapted_layer_of: dict[int, torch.nn.Module] = {}
        for layer in model.modules():
            if isinstance(layer, BaseTunerLayer):
                for inner in layer.modules():
                    adapted_layer_of.setdefault(id(inner), layer)
        units: dict[int, tuple[torch.nn.Module, list[Part]]] = {}
        for part in self.parts:
            # a method may have put new tensors in the place of the base's
            part.parameters, part.buffers = dict(part.module._parameters), dict(part.module._buffers)
            part.hook = Weights(part.module, self._device)
            unit = adapted_layer_of.get(id(part.module), part.module)
            units.setdefault(id(unit), (unit, []))[1].append(part)
        _move_others(model, self._device, {id(part.module) for part in self.parts})
        for unit, parts in units.values():
            add_hook_to_module(unit, Unit(parts, self._device))
            self._units.append(unit)

    def detach(self) -> None:
        """Take the hooks off; every module has its tensors on the host again, the same objects."""
        for unit in self._units:
            remove_hook_from_module(unit)
        self._units.clear()
        for part in self.parts:
            part.module._parameters.update(part.parameters)
            part.module._buffers.update(part.buffers)

    @contextmanager
    def onload(self, module: torch.nn.Module) -> Iterator[None]:
        """Hold every weight inside a module on the device."""
        inside = {id(inner) for inner in module.modules()}
        with _onloaded([part for part in self.parts if id(part.module) in inside]):
            yield

    def tensors(self, names: Container[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield these tensors of the base by name; one is on the device until the next is taken."""
        for part in self.parts:
            prefix = f"{part.name}." if part.name else ""
            wanted = [name for name in (*part.parameters, *part.buffers) if f"{prefix}{name}" in names]
            if wanted:
                with _onloaded([part]):
                    for name in wanted:
                        yield f"{prefix}{name}", getattr(part.module, name)

    def buffers(self) -> Iterator[torch.Tensor]:
        """Yield the base's buffers on the device."""
        for part in self.parts:
            yield from (tensor for tensor in part.module._buffers.values() if tensor is not None)


def units_of(model: torch.nn.Module) -> list[tuple[torch.nn.Module, Unit]]:
    """Return the modules of an offloaded model whose weights arrive together, with their hooks.

    A model that is whole on its device has none.
    """
    hooks = ((module, getattr(module, "_hf_hook", None)) for module in model.modules())
    return [(module, hook) for module, hook in hooks if isinstance(hook, Unit)]


def _move_others(model: torch.nn.Module, device: torch.device, spared: Container[int]) -> None:
    """Move every tensor of a model to the device, except those of some modules; a shared one stays shared."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        if id(module) in spared:
            continue
        tables: list[dict[str, Any]] = [module._parameters, module._buffers]
        for table in tables:
            for name, tensor in table.items():
                if tensor is None or tensor.is_meta:  # bytes that never arrived are reported
                    continue
                if id(tensor) not in moved:
                    moved[id(tensor)] = _moved(tensor, device)
                table[name] = moved[id(tensor)]


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on the device, a parameter as a parameter."""
    on_device = tensor.detach().to(device)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(on_device, tensor.requires_grad)
    return on_device
