"""Which layers have a closed form: PEFT's classes and no others."""

from __future__ import annotations

import peft
from peft.tuners import LoHaModel, LoKrModel
from peft.tuners.loha.layer import LoHaLayer
from peft.tuners.lora.layer import LoraLayer

from consistency.stages.merged.forms.registry import maker_of, makers
from tests.stages.merged.forms.made_layers import adapted


def test_every_layer_that_the_lycoris_methods_have_has_a_form() -> None:
    kinds = {layer for layer, _ in makers()}
    assert {*LoHaModel.layers_mapping.values(), *LoKrModel.layers_mapping.values()} <= kinds


def test_plain_lora_on_a_linear_layer_has_its_own_path() -> None:
    (one,) = adapted(peft.LoraConfig(r=2, target_modules=["linear"]))
    assert isinstance(one.layer, LoraLayer)
    assert maker_of(one.layer) is None


def test_a_class_that_derives_from_pefts_has_none() -> None:
    (one,) = adapted(peft.LoHaConfig(r=2, target_modules=["linear"]))
    assert maker_of(one.layer) is not None

    class Own(type(one.layer)):  # type: ignore[misc]  # whatever class PEFT has chosen
        def get_delta_weight(self, adapter_name: str, **options: object) -> object:
            return super().get_delta_weight(adapter_name, **options) * 2

    one.layer.__class__ = Own
    assert isinstance(one.layer, LoHaLayer)
    assert maker_of(one.layer) is None


def test_no_variant_but_dora_has_a_form() -> None:
    (one,) = adapted(peft.LoraConfig(r=2, target_modules=["linear"]))
    one.layer.lora_variant["default"] = object()
    assert maker_of(one.layer) is None
