"""LoRA on parameters: each expert has its own factors, which two matrices hold in different orders."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora import layer as lora

from tests.worker.stages.merged.forms.conftest import Each
from tests.worker.stages.merged.forms.made_layers import adapted, moved

PARAMETERS = ["experts.stack", "experts.matrix", "other_way.stack"]


def config(*parameters: str) -> Any:
    return peft.LoraConfig(r=4, lora_alpha=6.2, target_modules=[], target_parameters=list(parameters))


def test_what_peft_computes_is_within(each: Each) -> None:
    layers = each(config(*PARAMETERS))
    assert len(layers) == 3
    for one in layers:
        assert all(share <= 1 for share in one.shares().values()), one.name


def test_the_bound_is_sharp() -> None:
    for one in adapted(config(*PARAMETERS)):
        assert all(share > 0.1 for share in one.shares().values()), one.name


@pytest.mark.parametrize("parameter", ["experts.stack", "other_way.stack"])
def test_an_element_of_the_last_expert_is_found(parameter: str) -> None:
    (one,) = adapted(config(parameter))
    assert one.form is not None
    for tested in one.tensors().values():
        (measure,) = one.form.measure([moved(tested, (2, 7, 9), 256)])
        assert measure.worst_index == (2, 7, 9)
        assert measure.ratio is not None
        assert measure.ratio > 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda b, a: (b, a.flip(0)),
        lambda b, a: (b.flip(1), a),
        lambda b, a: (b.reshape(b.shape[0], b.shape[2], b.shape[1]).transpose(1, 2), a),
    ],
    ids=["other-expert", "rank-reversed", "experts-as-the-slower-index"],
)
def test_a_wrong_formula_in_every_precision_is_found(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    real = torch.einsum
    monkeypatch.setattr(lora.torch, "einsum", lambda equation, b, a: real(equation, *wrong(b, a)))
    (one,) = adapted(config("experts.stack"))
    tensors = list(one.tensors().values())
    monkeypatch.undo()
    assert one.form is not None
    assert all(found.ratio and found.ratio > 10 for found in one.form.measure(tensors))
