"""Whether an adapter can change anything, by its file and its settings, before anything is computed.

Only what is certain is stated. A LoRA layer adds the product of its factors times its scaling, so a factor of zeros or
a scaling of 0 leaves the base as it is; of other methods the deltas (stage `merged`) and the outputs (stage `forward`)
decide.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from consistency.capture.records import Effect
from consistency.numerics.identity import start_of
from consistency.worker.context import Context
from consistency.worker.model.adapter_settings import tuner_layers
from consistency.worker.model.loading import ADAPTER_NAME

_FACTOR = re.compile(rf"^(?P<layer>.+)\.(?P<factor>lora_(?:embedding_)?[ABE])\.{ADAPTER_NAME}(?:\.weight)?$")
_SAVED = f".modules_to_save.{ADAPTER_NAME}"


def effect_of(context: Context) -> tuple[Effect, dict[str, Any]]:
    """Return the effect of the adapter as far as it is certain (empty where it is not), and the evidence."""
    model: Any = context.model
    config = model.peft_config[ADAPTER_NAME]
    # a prompt adds no layer: only the outputs show its effect
    if getattr(config, "is_prompt_learning", False):
        return "", {}
    if _acts_on_some_tokens(config):
        return "some-tokens", {}
    if not context.rewritten and not _has_own_parameters(context):
        return "no-layer", {}
    # a weight that loading rewrites, or a layer that is saved whole, changes results whatever the factors are
    if context.rewritten or _changes_saved_layer(context):
        return "", {}
    return _effect_of_layers([layer for _, layer in tuner_layers(model)], context.expected)


def _effect_of_layers(
    layers: Sequence[Any], expected: Mapping[str, tuple[str, torch.Tensor]]
) -> tuple[Effect, dict[str, Any]]:
    """Return the effect by scaling and factors; `expected` has the tensors of the adapter's file."""
    # they say nothing where a layer scales the whole weight too
    if not layers or any(_has_magnitude(layer) for layer in layers):
        return "", {}
    if all(_scaling(layer) == 0 for layer in layers):
        return "zero-scaling", {"zero": f"scaling of {len(layers)} of {len(layers)} layers"}
    zero_counts = _count_zero_factors(expected)
    if zero_counts:
        zero = ", ".join(f"{count} of {count} {factor} tensors" for factor, count in zero_counts.items())
        return "zero-weights", {"zero": zero}
    return "layers", {}


def _has_own_parameters(context: Context) -> bool:
    """Return whether the adapted model has parameters that the base has not."""
    base_addresses = context.base.addresses()
    return any(start_of(parameter) not in base_addresses for parameter in context.model.parameters())


def _changes_saved_layer(context: Context) -> bool:
    """Return whether the file holds a layer that was saved whole and differs from the base's."""
    return any(_is_changed(context, name) for name in context.expected if _SAVED in name)


def _acts_on_some_tokens(config: Any) -> bool:
    """Return whether an adapter acts on chosen tokens alone, which the inputs may not have."""
    kind = getattr(config.peft_type, "value", config.peft_type)
    names = ("trainable_token_indices", "alora_invocation_tokens")
    return kind == "TRAINABLE_TOKENS" or any(getattr(config, name, None) for name in names)


def _has_magnitude(layer: Any) -> bool:
    """Return whether a layer scales the whole weight as well, as DoRA does: its delta is not all that it changes."""
    names = ("lora_magnitude_vector", "lora_variant")
    return any(ADAPTER_NAME in (getattr(layer, name, None) or {}) for name in names)


def _scaling(layer: Any) -> float | None:
    """Return the scaling of a layer; None where it has none that is a number."""
    scaling = getattr(layer, "scaling", None)
    if not isinstance(scaling, dict):
        return None
    value = scaling.get(ADAPTER_NAME)
    return float(value) if isinstance(value, (int, float)) else None


def _is_changed(context: Context, name: str) -> bool:
    """Return whether a tensor of a layer that was saved whole differs from the base's, or may differ."""
    original = dict(context.model.named_parameters()).get(name.replace(_SAVED, ".original_module"))
    _, tensor = context.expected[name]
    if original is None or original.is_meta or original.shape != tensor.shape:
        return True
    return not torch.equal(original.detach().to("cpu"), tensor.to(original.dtype))


def _count_zero_factors(expected: Mapping[str, tuple[str, torch.Tensor]]) -> Counter[str]:
    """Return how many factors of zeros there are, by their names; empty unless every product of factors is zero."""
    layers: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for name, (_, tensor) in expected.items():
        match = _FACTOR.match(name)
        if match is not None:
            layers.setdefault(match["layer"], []).append((match["factor"], tensor))
        elif _SAVED not in name:
            return Counter()  # another method, or a bias
    counts = Counter[str]()
    for factors in layers.values():
        zero_factors = [factor for factor, tensor in reversed(factors) if not tensor.any()]
        if not zero_factors:
            return Counter()
        counts.update(zero_factors)
    return counts
