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
    """Return the bias of a layer that a merge changes."""
    bias = getattr(layer.get_base_layer(), "bias", None)
    scaled = hasattr(layer, "ia3_l") and not getattr(layer, "is_feedforward", True)
    added = getattr(layer, "lora_bias", {}).get(ADAPTER_NAME, False)
    changes = isinstance(bias, torch.Tensor) and bias.dtype in UNIT_ROUNDOFF and (scaled or added)
    return bias.detach() if changes and isinstance(bias, torch.Tensor) else None


def exact_bias(context: Context, name: str, layer: Any) -> Typed | None:
    """Return the merged bias of a layer by the files; call it before the merge."""
    before = bias_of(layer)
    if before is None:
        return None
    known = context.expected_under(name, "base_layer.bias")
    bias = before.to("cpu", copy=True) if known is None else known
    return of(Source(layer=layer, weight=bias, files=files_of(context.expected, name, layer)))


def of(source: Source) -> Typed | None:
    """Return the merged bias, whose source has the bias in the place of the weight; None without its tensor."""
    bias = Typed.known(source.weight)
    scales, added = source.tensor("ia3_l"), source.files.get(f"lora_B.{ADAPTER_NAME}.bias")
    if scales is not None:
        return (bias * Typed.known(scales.reshape(-1))).to(bias.dtype)
    return None if added is None else (bias + Typed.known(added).scaled(source.lora_scaling())).to(bias.dtype)


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
