"""LoHa: what PEFT merges is within the bound, and one factor for another is not."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from peft.tuners.loha import layer as loha

from tests.worker.stages.merged.forms.conftest import Each
from tests.worker.stages.merged.forms.made_layers import CONVOLUTIONS_IN_GROUPS, adapted, largest, moved

TARGETS = ["linear", "conv1d", "conv2d", "point", *CONVOLUTIONS_IN_GROUPS]


def config(**changes: Any) -> Any:
    return peft.LoHaConfig(**{"r": 4, "alpha": 6, "target_modules": TARGETS, **changes})


@pytest.mark.parametrize("core", [False, True])
def test_what_peft_computes_is_within(each: Each, core: bool) -> None:
    for one in each(config(use_effective_conv2d=core, alpha=3.1)):
        assert all(share <= 1 for share in one.shares().values()), one.name


def test_the_bound_is_sharp() -> None:
    (one,) = adapted(config(target_modules=["linear"]))
    shares = one.shares()
    assert shares["delta"] > 0.1
    assert shares["plain"] > 0.5


def test_one_element_that_is_off_by_some_numbers_is_found() -> None:
    (one,) = adapted(config(target_modules=["linear"]))
    assert one.form is not None
    for tested in one.tensors().values():
        place = largest(tested)
        (measure,) = one.form.measure([moved(tested, place, 64)])
        assert measure.ratio is not None
        assert measure.ratio > 1
        assert measure.worst_index == place


@pytest.mark.parametrize(
    "wrong",
    [
        lambda a, b, c, d, scale: ((a @ d) * (c @ b)) * scale,
        lambda a, b, c, d, scale: ((a @ b) * (c @ d)) * scale**0,
        lambda a, b, c, d, scale: ((a @ b) + (c @ d)) * scale,
    ],
    ids=["factors-swapped", "scaling-missing", "sum"],
)
def test_a_wrong_formula_in_every_precision_is_found(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    monkeypatch.setattr(loha, "make_weight", wrong)
    (one,) = adapted(config(target_modules=["linear"]))
    assert all(share > 10 for share in one.shares().values())


def test_a_core_read_the_other_way_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = loha.make_weight_cp
    monkeypatch.setattr(
        loha, "make_weight_cp",
        lambda t1, a, b, t2, c, d, scale: real(t1.transpose(0, 1).contiguous(), a, b, t2, c, d, scale),
    )  # fmt: skip
    (one,) = adapted(config(target_modules=["conv2d"], use_effective_conv2d=True))
    assert all(share > 10 for share in one.shares().values())


def test_a_wrong_scaling_of_the_layer_is_found() -> None:
    (one,) = adapted(config(target_modules=["linear"]))
    one.layer.scaling["default"] *= 1 + 1e-4
    assert one.shares()["delta"] > 1


def test_a_file_without_a_factor_has_no_form() -> None:
    from consistency.worker.stages.merged.forms.loha import LoHa
    from consistency.worker.stages.merged.forms.source import Source

    (one,) = adapted(config(target_modules=["linear"]))
    files = {name: tensor for name, tensor in one.files.items() if "w2_b" not in name}
    assert LoHa.of(Source(layer=one.layer, weight=torch.zeros(48, 40), files=files)) is None
