"""A pass of the model that another adapter computes: all of it, some tokens, or some layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from consistency.extras.serving.engine_outputs.passes import without
from consistency.worker.model.merging import adapted_layers
from consistency.worker.model.running import base_of

BASE_ALONE = None
"""Stands for the base alone, where the name of an adapter stands for an adapter."""


def can_disable(model: Any) -> bool:
    """Report whether PEFT can disable the adapter."""
    return hasattr(model, "disable_adapter")


@contextmanager
def active(model: Any, name: str) -> Iterator[None]:
    """Let another adapter be the active one."""
    before = model.active_adapter
    model.set_adapter(name)
    try:
        yield
    finally:
        model.set_adapter(before)


def layers_by_token(model: Any) -> list[Any]:
    """Return the adapted layers; none where some compute otherwise than token by token, or the model has an encoder."""
    config = getattr(base_of(model), "config", None)
    layers = [layer for _, layer in adapted_layers(model)]
    if getattr(config, "is_encoder_decoder", False) or any(hasattr(layer, "get_param") for layer in layers):
        return []
    return layers


@contextmanager
def tokens_by(layers: Sequence[Any], places: slice, writer: str | None) -> Iterator[None]:
    """Let layers compute some places of the sequence by another adapter, or by the base alone.

    Keys and values of these places are then what an engine keeps of them in its cache.
    """

    def mixed(layer: Any, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        mixed_output = output.clone()
        mixed_output[:, places] = _output_by(layer, args[0], writer)[:, places]
        return mixed_output

    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_hook(mixed).remove)
        yield


def _output_by(layer: Any, hidden: torch.Tensor, writer: str | None) -> Any:
    if writer is BASE_ALONE:
        return layer.get_base_layer()(hidden)
    with _active_in([layer], writer):
        return layer.forward(hidden)  # not by a call, which would come back here


@contextmanager
def layers_by(layers: Sequence[Any], writer: str | None) -> Iterator[None]:
    """Let some layers compute by another adapter, or by the base alone."""
    if writer is not BASE_ALONE:
        with _active_in(layers, writer):
            yield
        return
    with without(layers):
        yield


@contextmanager
def _active_in(layers: Sequence[Any], writer: str | None) -> Iterator[None]:
    """Let an adapter be the active one in some layers; it leaves which parameters are trained as it is."""
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(mock.patch.object(layer, "_active_adapter", [writer]))
        yield
