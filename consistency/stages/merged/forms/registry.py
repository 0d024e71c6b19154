"""Which layers have a closed form: PEFT's layer classes, and how to make the form of each.

A class that another one derives from may override anything, so only PEFT's own classes count. What has no
form here, or lacks a tensor in its file, is compared with PEFT's code in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from consistency import plugins
from consistency.numerics.dtype import UNIT_ROUNDOFF
from consistency.stages.merged.forms.dora import Dora
from consistency.stages.merged.forms.form import Form
from consistency.stages.merged.forms.ia3 import IA3
from consistency.stages.merged.forms.loha import LoHa
from consistency.stages.merged.forms.lokr import LoKr
from consistency.stages.merged.forms.low_rank_product import (
    LoraConvolution,
    of_convolution,
    of_embedding,
    of_experts,
    of_linear,
)
from consistency.stages.merged.forms.source import Source
from consistency.worker.context import Context
from consistency.worker.model.loading import ADAPTER_NAME
from consistency.worker.model.low_rank import Expected
from consistency.worker.precision import products_of

Make = Callable[[Source], Form | None]


def form_of(context: Context, name: str, layer: Any, weight: Callable[[], torch.Tensor]) -> Form | None:
    """Return the closed form of a layer; None where its class has no form, or the adapter's file no tensor for it.

    `weight` reads the weight before the merge, and is called only if there is a form.
    """
    make = maker_of(layer)
    files = {} if make is None else files_of(context.expected, name, layer)
    if make is None or not files:
        return None
    on_cpu = context.device.type == "cpu"
    products = products_of(context.device)
    return make(Source(layer=layer, weight=weight(), files=files, products=products, on_cpu=on_cpu))


def files_of(expected: Expected, name: str, layer: Any) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors of one layer from its file, by name in the layer, in their dtypes on the device."""
    tensors = {}
    for parameter_name, parameter in layer.named_parameters():
        in_file = expected.get(f"{name}.{parameter_name}")
        if in_file is not None and parameter.dtype in UNIT_ROUNDOFF:
            _, tensor = in_file
            tensors[parameter_name] = tensor.to(parameter.dtype)
    return tensors


def maker_of(layer: Any) -> Make | None:
    """Return the function that makes the form of a layer; None where its class has none."""
    variant = getattr(layer, "lora_variant", {}).get(ADAPTER_NAME)
    if variant is not None and not isinstance(variant, type):  # PEFT holds a class or an object
        variant = type(variant)
    return makers().get((type(layer), variant))


def _without_variant(layers: Iterable[type], make: Make) -> dict[tuple[type, None], Make]:
    """Return the entries of layer classes whose adapter has no variant, all with the same form."""
    return {(layer, None): make for layer in layers}


@functools.cache
def makers() -> Mapping[tuple[type, type | None], Make]:
    """Return the functions that make forms, by PEFT's class of the layer and the class of its LoRA's variant.

    A plug-in adds classes; it cannot replace a form of this table.
    """
    from peft.tuners import LoHaModel, LoKrModel
    from peft.tuners.ia3 import layer as ia3
    from peft.tuners.lora import layer as lora
    from peft.tuners.lora import variants

    def dora_on_linear(source: Source) -> Form | None:
        return Dora.of(source, of_linear(source), by_row=not source.layer.fan_in_fan_out)

    def dora_on_embedding(source: Source) -> Form | None:
        return Dora.of(source, of_embedding(source), by_row=False)

    def dora_on_convolution(source: Source) -> Form | None:
        return Dora.of(source, of_convolution(source), by_row=True)

    # the forms of this table come last, and so replace a plug-in's for the same class
    of_plugins: dict[tuple[type, type | None], Make] = {}
    for _, forms in plugins.offered("forms"):
        of_plugins |= forms()
    return of_plugins | {
        **_without_variant(LoHaModel.layers_mapping.values(), LoHa.of),
        **_without_variant(LoKrModel.layers_mapping.values(), LoKr.of),
        **_without_variant((ia3.Linear, ia3.Conv2d, ia3.Conv3d), IA3.of),
        **_without_variant((lora.Conv1d, lora.Conv2d, lora.Conv3d), LoraConvolution.of),
        (lora.ParamWrapper, None): of_experts,
        (lora.Linear, variants.DoraLinearVariant): dora_on_linear,
        (lora.Embedding, variants.DoraEmbeddingVariant): dora_on_embedding,
        (lora.Conv1d, variants.DoraConv1dVariant): dora_on_convolution,
        (lora.Conv2d, variants.DoraConv2dVariant): dora_on_convolution,
        (lora.Conv3d, variants.DoraConv3dVariant): dora_on_convolution,
    }
