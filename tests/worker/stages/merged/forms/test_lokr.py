"""LoKr: whole and decomposed factors, and kernels with a core; another Kronecker product is outside."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from peft.tuners.lokr import layer as lokr

from tests.worker.stages.merged.forms.conftest import Each
from tests.worker.stages.merged.forms.made_layers import CONVOLUTIONS_IN_GROUPS, adapted, largest, moved

TARGETS = ["linear", "conv1d", "conv2d", "point", *CONVOLUTIONS_IN_GROUPS]


def config(**changes: Any) -> Any:
    return peft.LoKrConfig(**{"r": 2, "alpha": 3, "target_modules": TARGETS, **changes})


@pytest.mark.parametrize(
    "changes",
    [{}, {"r": 64}, {"r": 1, "decompose_both": True}, {"use_effective_conv2d": True}, {"decompose_factor": 4}],
    ids=["decomposed", "whole", "both-decomposed", "core", "factor"],
)
def test_what_peft_computes_is_within(each: Each, changes: dict[str, Any]) -> None:
    for one in each(config(alpha=3.1, **changes)):
        assert all(share <= 1 for share in one.shares().values()), one.name


def test_the_bound_is_sharp() -> None:
    (one,) = adapted(config(target_modules=["linear"]))
    assert all(share > 0.5 for share in one.shares().values())


def test_one_element_that_is_off_by_some_numbers_is_found() -> None:
    (one,) = adapted(config(target_modules=["conv2d"]))
    assert one.form is not None
    for tested in one.tensors().values():
        place = largest(tested)
        (measure,) = one.form.measure([moved(tested, place, 16)])
        assert measure.ratio is not None
        assert measure.ratio > 1
        assert measure.worst_index == place


@pytest.mark.parametrize(
    "wrong",
    [
        lambda first, second, scale=1.0: torch.kron(second, first) * scale,
        lambda first, second, scale=1.0: torch.kron(first, second) * scale**0,
        lambda first, second, scale=1.0: torch.kron(first, second.flip(0)) * scale,
    ],
    ids=["factors-swapped", "scaling-missing", "rows-reversed"],
)
def test_a_wrong_formula_in_every_precision_is_found(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    monkeypatch.setattr(lokr, "make_kron", wrong)
    (one,) = adapted(config(target_modules=["linear"]))
    assert all(share > 10 for share in one.shares().values())
