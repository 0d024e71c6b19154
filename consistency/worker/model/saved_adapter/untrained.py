"""Find layers of an adapter that are as they were before any training, for every method of PEFT. No torch here.

Methods begin without an effect on the model: one factor of a product is zero, a rotation's generator is zero, a scale
is one. A layer whose tensors are still so adds nothing. Methods whose first values are random, or computed from the
base, cannot be told from trained ones (HRA, VBLoRA, prompts), and nothing is said of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from consistency.worker.model.saved_adapter.contents import TensorContents

Parts = Mapping[str, TensorContents]
"""The tensors of one layer by their names in it."""


@dataclass(frozen=True, slots=True)
class _Factors:
    """Tensors that are multiplied: the layer adds nothing where one of them is zero."""

    names: re.Pattern[str]

    def inert_part(self, parts: Parts) -> str:
        """Return the name of a factor that is zero; empty where there is none."""
        zero = [name for name, tensor in parts.items() if self.names.fullmatch(name) and tensor.is_zero]
        return zero[-1] if zero else ""


@dataclass(frozen=True, slots=True)
class _Terms:
    """Tensors that each have an effect of their own: the layer adds nothing where all are as they began."""

    zeros: re.Pattern[str]
    ones: re.Pattern[str]

    def inert_part(self, parts: Parts) -> str:
        """Return the name of the first of these tensors, where all are as they began; empty otherwise."""
        terms = {name: tensor for name, tensor in parts.items() if self._begins_known(name)}
        if terms and all(self._is_as_begun(name, tensor) for name, tensor in terms.items()):
            return next(iter(terms))
        return ""

    def _begins_known(self, name: str) -> bool:
        return bool(self.zeros.fullmatch(name) or self.ones.fullmatch(name))

    def _is_as_begun(self, name: str, tensor: TensorContents) -> bool:
        return tensor.is_zero if self.zeros.fullmatch(name) else tensor.is_one


_NONE = re.compile(r"(?!)")

_METHODS: tuple[_Factors | _Terms, ...] = (
    _Factors(re.compile(r"lora_(?:embedding_)?[ABE]")),  # LoRA, AdaLoRA
    _Factors(re.compile(r"(?:delora|gralora|hira|lily|peanut|poly_lora)_[AB]|shadow_(?:up|down)")),
    _Factors(re.compile(r"hada_w[12]_[ab]")),
    _Factors(re.compile(r"lokr_w[12](?:_[ab])?")),
    _Factors(re.compile(r"p?vera_lambda_[bd]")),
    _Factors(re.compile(r"randlora_(?:lambda|gamma)")),
    _Terms(re.compile(r"miss_block|(?:shira|oft_R)(?:_weight)?"), _NONE),
    _Terms(re.compile(r"(?:waveft|fourierft)_spectrum|supertuning_values|beft_bias|c3a_kernel"), _NONE),
    _Terms(re.compile(r"boft_R"), re.compile(r"boft_s")),
    _Terms(re.compile(r"road_theta"), re.compile(r"road_alpha")),
    _Terms(_NONE, re.compile(r"ia3_l")),
)
"""Methods by the names of their tensors, as PEFT 0.21 begins them; a test saves a dozen of them untrained."""

_CHANGES_MORE = re.compile(r"lora_magnitude_vector")
"""Tensors of a layer that change it even where a factor is zero: DoRA's magnitude."""


def inert_part(parts: Parts) -> str:
    """Return the name of the tensor that leaves a layer without an effect; empty where it has one, or is not known."""
    if any(_CHANGES_MORE.fullmatch(name) for name in parts):
        return ""
    for method in _METHODS:
        if name := method.inert_part(parts):
            return name
    return ""


def is_known_method(parts: Parts) -> bool:
    """Report whether it can be told of a layer that it is untrained."""
    for method in _METHODS:
        patterns = (method.names,) if isinstance(method, _Factors) else (method.zeros, method.ones)
        if any(pattern.fullmatch(name) for pattern in patterns for name in parts):
            return True
    return False
