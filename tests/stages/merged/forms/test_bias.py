"""The bias that a merge changes: whose is judged, and that nothing but roundings is allowed."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch

from consistency.numerics.running_error import measure_tracked
from consistency.stages.merged.forms.bias import bias_of, of
from consistency.stages.merged.forms.source import Source
from consistency.worker.model.merging import merged
from tests.stages.merged.forms.conftest import Each
from tests.stages.merged.forms.made_layers import Adapted, adapted

SCALED = peft.IA3Config(target_modules=["linear", "conv2d"], feedforward_modules=[])
ADDED = peft.LoraConfig(r=2, lora_alpha=3.1, lora_bias=True, target_modules=["linear", "conv2d"])


def share(one: Adapted, *, safe: bool, broken: bool = False) -> float:
    before = bias_of(one.layer)
    assert before is not None
    exact = of(Source(layer=one.layer, weight=before.clone(), files=one.files))
    assert exact is not None
    with torch.no_grad(), merged(one.layer, safe=safe):
        after = bias_of(one.layer)
        assert after is not None
        found = measure_tracked(before if broken else after, exact)
    assert found.ratio is not None
    return float(found.ratio)


@pytest.mark.parametrize("config", [SCALED, ADDED], ids=["scaled", "added"])
@pytest.mark.parametrize("safe", [False, True])
def test_what_peft_computes_is_within_and_a_bias_left_as_it_was_is_not(each: Each, config: Any, safe: bool) -> None:
    layers = each(config)
    assert len(layers) == 2
    for one in layers:
        assert share(one, safe=safe) <= 1
        assert share(one, safe=safe, broken=True) > 1


def test_a_merge_that_changes_no_bias_is_not_asked_for_one() -> None:
    linear: dict[str, Any] = {"target_modules": ["linear"]}
    inputs = peft.IA3Config(feedforward_modules=["linear"], **linear)
    for config in (inputs, peft.LoraConfig(r=2, **linear), peft.LoHaConfig(r=2, **linear)):
        (one,) = adapted(config)
        assert bias_of(one.layer) is None
