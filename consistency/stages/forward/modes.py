"""The modes of the stage `forward`: with the adapter on, off and merged."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from consistency.capture.names import ADAPTER_MERGED as MERGED
from consistency.capture.names import ADAPTER_OFF as OFF
from consistency.capture.names import ADAPTER_ON as ON
from consistency.worker.context import Context
from consistency.worker.model.merging import adapted_layers, disabled, in_merged
from consistency.worker.model.running import (
    matrix_elements,
)

T = TypeVar("T")


def modes_of(context: Context) -> list[str]:
    """Return the modes in which the model runs; one without an adapter, and one that merges nothing, has fewer."""
    if context.job.case.adapter is None:
        return [OFF]
    # an adapter without layers, as a prompt, has nothing to merge
    has_adapted_layer = any(True for _ in adapted_layers(context.model))
    return [ON, OFF, MERGED] if has_adapted_layer else [ON, OFF]


def block_modes(context: Context, model: torch.nn.Module) -> list[str]:
    """Return the modes whose blocks are compared: all, or of a large model the first: adapter on, where one is given.

    The same weights are multiplied by the same kernels without it, and the stage `merged` judges merged weights.
    """
    modes = modes_of(context)
    is_small = matrix_elements(model) <= context.job.case.plan.float64_merges
    return modes if is_small else modes[:1]


def in_mode(model: Any, mode: str, run: Callable[[], T]) -> T:
    """Put the model into a mode, and return what `run` returns in it."""
    if mode == MERGED:
        return in_merged(model, run)
    is_disabled = mode == OFF and hasattr(model, "peft_config")
    with disabled(model) if is_disabled else nullcontext():
        return run()


def exact_mode_of(mode: str) -> str:
    """Return the mode whose float64 pass serves a mode: a merged adapter has the one of the adapter on."""
    return ON if mode == MERGED else mode


def products_suffix(mode: str) -> str:
    """Return the end of the name of a device's products in a mode: a merged adapter has errors of its own."""
    return ", merged" if mode == MERGED else ""
