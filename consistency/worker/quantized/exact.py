"""Let quantized layers compute in float64 passes, and restore what a pass replaces in them.

A quantized layer's own kernels take no float64. For the reference, each layer multiplies by its exact weight instead,
which is made for the time of one product. Where the layer quantizes its inputs too (8-bit layers of bitsandbytes,
dynamic ones of torchao), the reference does not: that error is the CPU's own too, so it is part of what `relative`
allows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from consistency.numerics.identity import start_of
from consistency.worker.quantized.held import quantized_layers, weight_of_layer


@contextmanager
def exact_layers(model: torch.nn.Module) -> Iterator[None]:
    """Let the quantized layers of a model on the CPU compute with their exact weights.

    A layer whose kind has no formula computes by its own kernels.
    """
    with ExitStack() as stack:
        for _, layer in quantized_layers(model):
            forward = next((forward for kind, forward in _FORWARD.items() if isinstance(layer, kind)), None)
            if forward is not None and weight_of_layer(layer) is not None:
                stack.enter_context(_replaced_forward(layer, functools.partial(forward, layer)))
        yield


def _linear(layer: Any, inputs: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(inputs, _exact(layer), layer.bias)


def _embedding(layer: Any, inputs: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(inputs, _exact(layer))


_FORWARD = {torch.nn.Linear: _linear, torch.nn.Embedding: _embedding}


def _exact(layer: Any) -> torch.Tensor:
    """Return the exact weight of a layer whose kind has a formula."""
    weight = weight_of_layer(layer)
    assert weight is not None
    return weight.exact()


@contextmanager
def _replaced_forward(layer: Any, forward: Any) -> Iterator[None]:
    """Let a layer compute by another function; a `forward` of its own, as hooks of libraries put there, comes back."""
    attributes = vars(layer)
    had_own, own = "forward" in attributes, attributes.get("forward")
    attributes["forward"] = forward
    try:
        yield
    finally:
        if had_own:
            attributes["forward"] = own
        else:
            del attributes["forward"]


@contextmanager
def as_loaded(model: torch.nn.Module) -> Iterator[None]:
    """Restore at the end of a `with` block what a pass replaces in quantized layers.

    On a CPU with AVX512-BF16, the first pass of a 4-bit layer of bitsandbytes replaces its codes by others in another
    order, and its scales by ones rounded to bfloat16. Whatever else reads them after that (a merge, a backward pass)
    takes them for the old ones. An 8-bit layer moves its scales from the weight to the layer.
    """
    layers = [(layer.weight, layer.weight.data, _attributes(layer)) for layer in _bitsandbytes_layers(model)]
    try:
        yield
    finally:
        for weight, data, attributes in layers:
            if start_of(weight.data) != start_of(data) or weight.shape != data.shape:
                weight.data = data
            for table, before in attributes:
                table.clear()
                table.update(before)


def _bitsandbytes_layers(model: torch.nn.Module) -> Iterator[Any]:
    """Yield the layers whose weights are of bitsandbytes."""
    for _, layer in quantized_layers(model):
        if type(layer.weight).__name__ in ("Params4bit", "Int8Params"):
            yield layer


def _attributes(layer: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the tables of attributes of a layer's weight and of the records of its state, each with a copy."""
    owners = [layer.weight, getattr(layer.weight, "quant_state", None), getattr(layer, "state", None)]
    owners.append(getattr(owners[1], "state2", None))
    return [(vars(owner), dict(vars(owner))) for owner in owners if owner is not None]
