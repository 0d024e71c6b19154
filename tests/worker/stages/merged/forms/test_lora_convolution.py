"""LoRA on convolutions: each element is an inner product of as many terms as the rank."""

from __future__ import annotations

from typing import Any

import peft
import pytest
from peft.tuners.lora import layer as lora

from tests.worker.stages.merged.forms.conftest import Each
from tests.worker.stages.merged.forms.made_layers import adapted, largest, moved

LAYERS = ["conv1d", "conv2d", "conv3d", "point"]


def config(*targets: str, **changes: Any) -> Any:
    return peft.LoraConfig(r=4, lora_alpha=6.2, target_modules=list(targets), **changes)


@pytest.mark.parametrize("stabilized", [False, True])
def test_what_peft_computes_is_within(each: Each, stabilized: bool) -> None:
    for one in each(config(*LAYERS, use_rslora=stabilized)):
        assert all(share <= 1 for share in one.shares().values()), one.name


def test_the_bound_is_sharp() -> None:
    for one in adapted(config(*LAYERS)):
        assert all(share > 0.1 for share in one.shares().values()), one.name


def test_a_convolution_with_groups_has_no_form() -> None:
    (one,) = adapted(config("grouped"))
    assert one.form is None


def test_one_element_that_is_off_by_some_numbers_is_found() -> None:
    (one,) = adapted(config("conv2d"))
    assert one.form is not None
    for tested in one.tensors().values():
        place = largest(tested)
        (measure,) = one.form.measure([moved(tested, place, 256)])
        assert measure.ratio is not None
        assert measure.ratio > 1
        assert measure.worst_index == place


@pytest.mark.parametrize("target", ["conv1d", "conv2d", "conv3d"])
def test_a_kernel_that_is_turned_in_every_precision_is_found(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    real = lora._ConvNd.get_delta_weight
    monkeypatch.setattr(lora._ConvNd, "get_delta_weight", lambda layer, adapter: real(layer, adapter).flip(-1))
    (one,) = adapted(config(target))
    assert all(share > 10 for share in one.shares().values())


def test_a_wrong_scaling_of_the_layer_is_found() -> None:
    (one,) = adapted(config("conv2d", use_rslora=True))
    one.layer.scaling["default"] = 6.2 / 4
    assert all(share > 10 for share in one.shares().values())
