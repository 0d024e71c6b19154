"""The bias that a merge changes beside the weight.

IA³ scales that of a layer whose outputs it scales, and a LoRA with `lora_bias` adds its own one, scaled.
Product and sum are computed in the wider dtype and rounded to that of the bias: half a unit in the last place of each
rounding (`consistency.numerics.typed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from consistency.numerics.dtype import UNIT_ROUNDOFF
from consistency.numerics.typed import Typed
from consistency.stages.merged.forms.form import Form, Judged
from consistency.stages.merged.forms.registry import files_of
from consistency.stages.merged.forms.source import Source
from consistency.worker.context import Context
from consistency.worker.model.loading import ADAPTER_NAME


def bias_of(layer: Any) -> torch.Tensor | None:
    """Return the bias of a layer; None where a merge does not change it, or its dtype has no bound."""
    bias = getattr(layer.get_base_layer(), "bias", None)
    if not isinstance(bias, torch.Tensor) or bias.dtype not in UNIT_ROUNDOFF:
        return None
    is_scaled = hasattr(layer, "ia3_l") and not getattr(layer, "is_feedforward", True)
    is_added_to = getattr(layer, "lora_bias", {}).get(ADAPTER_NAME, False)
    return bias.detach() if is_scaled or is_added_to else None


def exact_bias(context: Context, name: str, layer: Any) -> Typed | None:
    """Return the exact merged bias of a layer from the files; None where a merge changes none.

    Call it before the merge: a bias that no file holds is read from the layer.
    """
    before = bias_of(layer)
    if before is None:
        return None
    bias = context.expected_under(name, "base_layer.bias")
    if bias is None:
        bias = before.to("cpu", copy=True)
    return of(Source(layer=layer, weight=bias, files=files_of(context.expected, name, layer)))


def of(source: Source) -> Typed | None:
    """Return the exact merged bias; None where the adapter's file has no tensor that changes it.

    The source has the bias in the place of the weight.
    """
    bias = Typed.known(source.weight)
    scales = source.tensor("ia3_l")
    if scales is not None:
        return (bias * Typed.known(scales.reshape(-1))).to(bias.dtype)
    added = source.files.get(f"lora_B.{ADAPTER_NAME}.bias")
    if added is not None:
        return (bias + Typed.known(added).scaled(source.lora_scaling())).to(bias.dtype)
    return None


class Bias(Form):
    """The merged bias of a layer as a form; its source has the bias in the place of the weight."""

    has_delta = False

    def __init__(self, source: Source, exact: Typed) -> None:
        super().__init__(source.weight)
        self._exact = exact

    @classmethod
    def of(cls, source: Source) -> Bias | None:
        """Return the form of a bias that the file's tensors change."""
        exact = of(source)
        return None if exact is None else cls(source, exact)

    def block(self, tensors: Sequence[Judged], rows: slice) -> Sequence[Typed]:
        return [self._exact.moved(lambda v: v[rows].reshape(-1, 1))] * len(tensors)
