"""IA³: nothing but the rounding of one product is allowed, and the vector belongs to inputs or to outputs."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from peft.tuners.ia3 import layer as ia3

from consistency.worker.model.merging import weight_of
from consistency.worker.stages.merged.forms.form import Judged
from tests.worker.stages.merged.forms.conftest import Each
from tests.worker.stages.merged.forms.made_layers import CONVOLUTIONS_IN_GROUPS, adapted, moved

TARGETS = ["linear", "conv2d", "conv3d", "point", "grouped"]


def config(*, inputs: bool, targets: tuple[str, ...] | list[str] = TARGETS, **changes: Any) -> Any:
    targets = [target for target in targets if not inputs or target != "grouped" or CONVOLUTIONS_IN_GROUPS]
    return peft.IA3Config(target_modules=list(targets), feedforward_modules=list(targets) if inputs else [], **changes)


@pytest.mark.parametrize("inputs", [False, True])
def test_what_peft_computes_is_within(each: Each, inputs: bool) -> None:
    transposed = config(inputs=inputs, targets=["transposed"], fan_in_fan_out=True)
    for one in [*each(config(inputs=inputs)), *each(transposed)]:
        shares = one.shares()
        assert set(shares) == {"plain", "safe"}
        assert all(share <= 1 for share in shares.values()), one.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_next_number_is_found(dtype: torch.dtype) -> None:
    (one,) = adapted(config(inputs=True, targets=["linear"]), dtype, dtype)
    assert one.form is not None
    for tested in one.tensors().values():
        for column in range(8):
            (measure,) = one.form.measure([moved(tested, (2, column), 2)])
            assert measure.ratio is not None
            assert measure.ratio > 1


@pytest.mark.parametrize("inputs", [False, True])
def test_a_vector_in_another_order_is_found(inputs: bool) -> None:
    (one,) = adapted(config(inputs=inputs, targets=["transposed"], fan_in_fan_out=True))
    one.layer.ia3_l["default"].data = one.layer.ia3_l["default"].data.flip(0, 1)
    assert all(share > 10 for share in one.shares().values())


def test_a_vector_of_outputs_that_scales_the_inputs_is_found() -> None:
    (one,) = adapted(config(inputs=False, targets=["grouped"]))
    assert one.form is not None
    with torch.no_grad():
        wrong = weight_of(one.layer) * one.files["ia3_l.default"].reshape(-1)[: one.form.shape[1]].view(1, -1, 1, 1)
    (measure,) = one.form.measure([Judged(actual=wrong, safe=False)])
    assert measure.ratio is not None
    assert measure.ratio > 10


@pytest.mark.skipif(not CONVOLUTIONS_IN_GROUPS, reason="PEFT 0.20 merges an IA³ of a convolution's groups")
def test_a_group_that_takes_the_vector_of_another_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ia3.Conv2d._get_ia3_scaling_for_weight
    monkeypatch.setattr(ia3.Conv2d, "_get_ia3_scaling_for_weight", lambda layer, scales: real(layer, scales).roll(8, 0))
    (one,) = adapted(config(inputs=True, targets=["grouped"]))
    assert all(share > 10 for share in one.shares().values())


def test_a_vector_that_is_applied_twice_in_every_precision_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.mul
    monkeypatch.setattr(ia3.torch, "mul", lambda weight, scales: real(real(weight, scales), scales))
    (one,) = adapted(config(inputs=False, targets=["linear"]))
    tensors = one.tensors()
    monkeypatch.undo()
    assert one.form is not None
    assert all(found.ratio and found.ratio > 10 for found in one.form.measure(list(tensors.values())))
