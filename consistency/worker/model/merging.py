"""Merge the adapter into one layer by PEFT's own code, and leave the layer as it was, to the bit."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import is_dataclass
from typing import Any, TypeVar
from unittest import mock

import torch

from consistency.numerics.digest import TensorDigest, digest
from consistency.worker.model.adapter_settings import tuner_layers
from consistency.worker.model.loading import ADAPTER_NAME
from consistency.worker.model.running import model_code
from consistency.worker.quantized.held import dequantized, is_quantized
from consistency.worker.recorder import Skip

T = TypeVar("T")
Merge = Callable[[Any], AbstractContextManager[Any]]
"""Returns a context manager in which a layer is merged."""

# errors by which PEFT refuses to merge
NO_MERGE = (NotImplementedError, ValueError, RuntimeError, AttributeError, TypeError)


def adapted_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and module of every layer that the adapter changes, in the model's order."""
    for name, module in tuner_layers(model):
        if hasattr(module, "merge") and hasattr(module, "get_base_layer"):
            yield name, module


@contextmanager
def merged(layer: Any, *, safe: bool) -> Iterator[torch.Tensor]:
    """Merge one layer by PEFT's own code, yield the merged weight, and restore the layer to the bit at the end.

    The weight has storage of its own, and stays as it is after that. One that was quantized again is dequantized.
    """
    with restored(layer):
        layer.merge(safe_merge=safe, adapter_names=[ADAPTER_NAME])
        yield dequantized(layer.get_base_layer()) if has_quantized_weight(layer) else weight_of(layer)


def digest_merged(layer: Any, *, safe: bool) -> TensorDigest:
    """Merge one layer and return the digest of its weight."""
    with merged(layer, safe=safe) as weight:
        return digest(weight)


@contextmanager
def restored(layer: Any) -> Iterator[None]:
    """Let a merge write into copies of a layer's weights, and restore the layer to the bit at the end.

    The storage of the model is never written: its pages are mapped from the weight files, and each that is written
    becomes private memory; a tied weight shares it. PEFT does not unmerge, which would compute the delta once more and
    round: a merge also changes attributes of modules, and they are put back.
    """
    # a quantized weight is replaced, never written; but PEFT edits its attributes
    written = [parameter for parameter in merged_into(layer) if not is_quantized(parameter)]
    # the copies are held to the end, so that a merge that puts another weight in their place frees nothing
    storages = [(parameter, parameter.data, parameter.detach().clone()) for parameter in written]
    owners = (*layer.modules(), *filter(is_quantized, merged_into(layer)))
    restorers = [_attributes(owner) for owner in owners]
    with torch.no_grad():
        try:
            for parameter, _, copied in storages:
                parameter.data = copied
            yield
        finally:
            for restore in restorers:
                restore()
            for parameter, data, _ in storages:
                parameter.data = data  # the storage it had, which a tied weight shares


@contextmanager
def taking(layer: Any, deltas: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let merges take deltas that the layer has computed already, by adapter, as long as nothing writes into them."""
    real, versions = layer.get_delta_weight, {name: delta._version for name, delta in deltas.items()}

    def get_delta_weight(adapter: str) -> Any:
        is_unwritten = adapter in deltas and deltas[adapter]._version == versions[adapter]
        return deltas[adapter] if is_unwritten else real(adapter)

    with mock.patch.object(layer, "get_delta_weight", get_delta_weight):
        yield


def weight_of(layer: Any) -> torch.Tensor:
    """Return the weight that a merge changes: of the base layer, or the parameter that PEFT wraps by its name."""
    weight = layer.get_param() if hasattr(layer, "get_param") else getattr(layer.get_base_layer(), weight_name(layer))
    assert isinstance(weight, torch.Tensor)
    return weight.detach()


def weight_name(layer: Any) -> str:
    """Return the name in the base layer of the weight that a merge changes.

    Torch's MultiheadAttention has three projections in one weight.
    """
    return "in_proj_weight" if hasattr(layer.get_base_layer(), "in_proj_weight") else "weight"


def merged_into(layer: Any) -> list[torch.nn.Parameter]:
    """Return the parameters that a merge may write: all of the base layer, or the one parameter that PEFT wraps.

    Beside a wrapped parameter the base layer may have others, such as those of other experts, which stay as they are.
    """
    if hasattr(layer, "get_param"):
        return [layer.get_param()]
    return list(layer.get_base_layer().parameters())


def has_quantized_weight(layer: Any) -> bool:
    """Report whether a merge of a layer requantizes its weight."""
    return not hasattr(layer, "get_param") and is_quantized(layer.get_base_layer()._parameters.get("weight"))


def _attributes(module: Any) -> Callable[[], None]:
    """Return a function that restores a module's attributes, and the content of lists, dictionaries and records there.

    Merged adapters are such a list; caches, parameters, buffers and submodules such dictionaries; the state of a
    quantized layer such a record.
    """
    attributes = vars(module)
    copies: list[tuple[Any, Any]] = [(attributes, dict(attributes))]
    for value in attributes.values():
        is_record = is_dataclass(value) and not isinstance(value, type)
        container = vars(value) if is_record else value
        if isinstance(container, (list, dict)):
            copies.append((container, container.copy()))

    def restore() -> None:
        for container, content in copies:
            container.clear()
            if isinstance(container, list):
                container.extend(content)
            else:
                container.update(content)

    return restore


class MergeRefusedError(Skip):
    """PEFT does not merge this adapter; the message is PEFT's."""


def in_merged(model: Any, run: Callable[[], T], *, merge: Merge | None = None) -> T:
    """Run a model whose adapter is merged by PEFT's own code, and leave the model as it was.

    A merge of the whole model would take as much private memory as its adapted layers: their pages are mapped from the
    weight files, and each that is written becomes a copy. So each layer is merged for the time that it runs. A layer
    whose weight another module uses too, or that is not run itself, is merged all the time.

    Parameters
    ----------
    run : callable
        Runs the model; it may be called again.
    merge : callable, optional
        Merges one layer for as long as its context is entered, in another way than `merged`.

    Raises
    ------
    MergeRefusedError
        Any error of PEFT's, but none of the device or its memory.
    """
    with model_code(model, kinds=NO_MERGE, raises=MergeRefusedError):
        check = getattr(model.base_model, "_check_merge_allowed", None)
        if check is not None:
            check()
    merging = _or_refused(merge or functools.partial(merged, safe=False))
    units = _adapted_units(model)
    if units:
        with _merged_on_arrival(units, merging):
            return run()
    layers = [layer for _, layer in adapted_layers(model)]
    merged_throughout = _layers_that_share_weights(model, layers)
    while True:
        in_turn = [layer for layer in layers if layer not in merged_throughout]
        ran: set[int] = set()
        with ExitStack() as stack:
            for layer in merged_throughout:
                stack.enter_context(merging(layer))
            for layer in in_turn:
                _merge_while_it_runs(layer, merging, ran, stack)
            result = run()
        # other code reads the weights of a layer that did not run: in the next run it is merged all the time
        missed = [layer for layer in in_turn if id(layer) not in ran]
        if not missed:
            return result
        merged_throughout += missed


def _layers_that_share_weights(model: torch.nn.Module, layers: list[Any]) -> list[Any]:
    """Return the layers with a weight that another module has too."""
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return [layer for layer in layers if any(owners[id(parameter)] > 1 for parameter in merged_into(layer))]


def _merge_while_it_runs(layer: Any, merging: Merge, ran: set[int], stack: ExitStack) -> None:
    """Put hooks on a layer that merge it for each of its passes, and add its identity to `ran` then."""
    merge = stack.enter_context(ExitStack())

    def begin(layer: Any, _inputs: Any) -> None:
        merge.enter_context(merging(layer))
        ran.add(id(layer))

    stack.callback(layer.register_forward_pre_hook(begin).remove)
    stack.callback(layer.register_forward_hook(lambda *_: merge.close(), always_call=True).remove)


def _adapted_units(model: torch.nn.Module) -> list[Any]:
    """Return the hooks that bring the weights of the adapted layers of an offloaded model to its device.

    A module with weights of its own may have adapted layers inside, each with a unit of its own.
    """
    from consistency.worker.model.offload import units_of

    layers = {id(layer) for _, layer in adapted_layers(model)}
    return [unit for module, unit in units_of(model) if id(module) in layers]


@contextmanager
def _merged_on_arrival(units: list[Any], merging: Merge) -> Iterator[None]:
    """Merge the adapted layers of an offloaded model whenever their weights arrive on the device."""
    try:
        for unit in units:
            unit.around = functools.partial(_merged_inside, merging=merging)
        yield
    finally:
        for unit in units:
            unit.around = None


@contextmanager
def _merged_inside(module: torch.nn.Module, *, merging: Merge) -> Iterator[None]:
    """Merge every adapted layer inside a module."""
    with ExitStack() as stack:
        for _, layer in adapted_layers(module):
            stack.enter_context(merging(layer))
        yield


def _or_refused(merge: Merge) -> Merge:
    """Return a merge that raises PEFT's errors as `MergeRefusedError`."""

    @contextmanager
    def merging(layer: Any) -> Iterator[None]:
        with ExitStack() as stack:
            with model_code(layer, kinds=NO_MERGE, raises=MergeRefusedError):
                stack.enter_context(merge(layer))
            yield

    return merging


class DisableRefusedError(Skip):
    """PEFT does not disable this adapter; the message is PEFT's."""


@contextmanager
def disabled(model: Any) -> Iterator[None]:
    """Disable the adapter, and enable it again at the end.

    Raises
    ------
    DisableRefusedError
        Any error of PEFT's on the way in: some methods have nothing to disable, and a prompt on a model that does not
        generate ends in an error.
    """
    with ExitStack() as stack:
        with model_code(model, raises=DisableRefusedError):
            stack.enter_context(model.disable_adapter())
        yield
