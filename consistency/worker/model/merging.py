"""Merge the adapter into one layer by PEFT's own code, and leave the layer as it was, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import is_dataclass
from typing import Any

import torch

from consistency.numerics.digest import digest
from consistency.worker.model.loading import ADAPTER_NAME

# what PEFT raises where it does not merge
NO_MERGE = (NotImplementedError, ValueError, RuntimeError, AttributeError, TypeError)


def adapted_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and module of every layer that the adapter changes, in the model's order."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and hasattr(module, "merge") and hasattr(module, "get_base_layer"):
            yield name, module


@contextmanager
def merged(layer: Any, *, safe: bool) -> Iterator[torch.Tensor]:
    """Merge one layer by PEFT's own code, yield the merged weight, and restore the layer to the bit at the end.

    The weight has storage of its own, and stays as it is after that.
    """
    with restored(layer):
        layer.merge(safe_merge=safe, adapter_names=[ADAPTER_NAME])
        yield weight_of(layer)


@contextmanager
def restored(layer: Any) -> Iterator[None]:
    """Let a merge write into copies of a layer's weights, and restore the layer to the bit at the end.

    The storage of the model is never written: its pages are mapped from the weight files, and each that is written
    becomes private memory; a tied weight shares it. PEFT does not unmerge, which would compute the delta once more and
    round: what a merge changes besides is attributes of modules, and they are put back.
    """
    # the copies are held to the end, so that a merge that puts another weight in their place frees nothing
    kept = [(parameter, parameter.data, parameter.detach().clone()) for parameter in _merged_into(layer)]
    put_back = [_attributes(module) for module in layer.modules()]
    with torch.no_grad():
        try:
            for parameter, _, copied in kept:
                parameter.data = copied
            yield
        finally:
            for restore in put_back:
                restore()
            for parameter, data, _ in kept:
                parameter.data = data  # the storage it had, which a tied weight shares


@contextmanager
def taking(layer: Any, delta: torch.Tensor) -> Iterator[None]:
    """Let merges take a delta that the layer has computed already, as long as nothing writes into it."""
    real, version = layer.get_delta_weight, delta._version

    def get_delta_weight(adapter: str) -> Any:
        return delta if adapter == ADAPTER_NAME and delta._version == version else real(adapter)

    layer.get_delta_weight = get_delta_weight
    try:
        yield
    finally:
        del layer.get_delta_weight


def weight_of(layer: Any) -> torch.Tensor:
    """Return the weight that a merge changes: of the base layer, or the parameter that PEFT wraps by its name."""
    weight = layer.get_param() if hasattr(layer, "get_param") else layer.get_base_layer().weight
    assert isinstance(weight, torch.Tensor)
    return weight.detach()


def _merged_into(layer: Any) -> list[torch.nn.Parameter]:
    """Return the parameters that a merge may write: of a wrapped parameter, not the other experts' beside it."""
    return [layer.get_param()] if hasattr(layer, "get_param") else list(layer.get_base_layer().parameters())


def _attributes(module: torch.nn.Module) -> Callable[[], None]:
    """Return a function that puts back a module's attributes, and what lists, dictionaries and records of them hold.

    Merged adapters are such a list; caches, parameters, buffers and submodules such dictionaries; the state of a
    quantized layer such a record.
    """
    own = vars(module)
    held: list[tuple[Any, Any]] = [(own, dict(own))]
    for value in own.values():
        content = vars(value) if is_dataclass(value) and not isinstance(value, type) else value
        if isinstance(content, (list, dict)):
            held.append((content, content.copy()))

    def restore() -> None:
        for container, content in held:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)

    return restore


def merge_adapter(model: Any) -> None:
    """Merge the adapter into the whole model by PEFT's own code.

    Merged weights of an offloaded base would take as much memory as the base: its layers are merged on the device
    whenever their weights arrive there. Each is merged once at first, so that what PEFT raises is raised here.
    """
    from consistency.worker.model.offload import units_of

    units = units_of(model)
    # a module with weights of its own may have adapted layers inside, each with a unit of its own
    adapted = [(module, unit) for module, unit in units if any(layer is module for _, layer in adapted_layers(module))]
    try:
        for module, unit in adapted:
            unit.around = _merged_inside
            unit.pre_forward(module)
            unit.post_forward(module, None)
    except NO_MERGE:
        for _, unit in adapted:
            unit.around = None
        raise
    if not units:
        model.merge_adapter()


@contextmanager
def _merged_inside(module: torch.nn.Module) -> Iterator[None]:
    with ExitStack() as stack:
        for _, layer in adapted_layers(module):
            stack.enter_context(merged(layer, safe=False))
        yield


@contextmanager
def merging_inside(model: torch.nn.Module) -> Iterator[None]:
    """Merge each layer for as long as it computes: the model itself is not changed, and holds no second copy."""
    from consistency.worker.model.offload import units_of

    units = units_of(model)
    with ExitStack() as stack:
        for _, unit in units:
            unit.around = _merged_inside
            stack.callback(setattr, unit, "around", None)
        for _, layer in () if units else adapted_layers(model):
            _merge_while_it_computes(layer, stack)
        yield


def _merge_while_it_computes(layer: Any, stack: ExitStack) -> None:
    inside = stack.enter_context(ExitStack())

    def begin(layer: Any, _inputs: Any) -> None:
        inside.enter_context(merged(layer, safe=False))

    def end(_layer: Any, _inputs: Any, _output: Any) -> None:
        inside.close()

    stack.callback(layer.register_forward_pre_hook(begin).remove)
    stack.callback(layer.register_forward_hook(end).remove)


@contextmanager
def unmerged_afterwards(
    model: torch.nn.Module, in_file: Callable[[torch.nn.Parameter], torch.Tensor | None]
) -> Iterator[list[tuple[int, ...]]]:
    """Take an adapter that is merged into the whole model inside off again, to the bit.

    Weights are put back where they were from the file, so that no copy of them is needed; of one that no file holds a
    copy is kept on the host. Yields a list that has the shapes of those that could not be put back at the end.
    """
    from consistency.worker.model.offload import units_of

    units, layers = units_of(model), [layer for _, layer in adapted_layers(model)]
    put_back = [_attributes(module) for layer in layers for module in layer.modules()]
    parameters = {id(p): p for layer in layers for p in _merged_into(layer)} if not units else {}
    kept = [
        (p, p.data, digest(p).value, p.detach().to("cpu", copy=True) if in_file(p) is None else None)
        for p in parameters.values()
    ]
    failed: list[tuple[int, ...]] = []
    yield failed
    for _, unit in units:
        unit.around = None
    for restore in put_back:
        restore()
    with torch.no_grad():
        for parameter, data, before, copied in kept:
            parameter.data = data
            if digest(parameter).value != before:
                right = in_file(parameter) if copied is None else copied
                if right is not None and right.shape == data.shape:
                    data.copy_(right)
                if digest(parameter).value != before:
                    failed.append(tuple(data.shape))
