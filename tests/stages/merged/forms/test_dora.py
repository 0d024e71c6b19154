"""DoRA: the norm is common to an output's elements, so one of them is judged as if it were known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft.tuners.lora.dora import DoraLinearLayer

from consistency.numerics.bound import UserAllowance
from consistency.stages.merged.forms import form as form_module
from consistency.stages.merged.forms.form import Judged
from tests.stages.merged.forms.made_layers import Adapted, adapted, dora


@pytest.fixture(params=["linear", "embedding", "conv2d", "transposed"])
def one(request: pytest.FixtureRequest) -> Adapted:
    """Return a layer whose outputs are rows of its weight, or columns."""
    (found,) = adapted(dora(request.param, fan_in_fan_out=request.param == "transposed"))
    return found


def test_an_output_that_is_off_as_a_whole_is_found(one: Adapted) -> None:
    columns = one.name in ("embedding", "transposed")
    for name, tested in one.tensors().items():
        if name != "delta":
            actual = tested.actual.clone()
            actual[(slice(None), 7) if columns else 7] *= 1 + 3e-5
            assert one.worst(Judged(actual=actual, safe=tested.safe))[0] > 1


def test_an_element_that_is_no_number_is_found_alone(one: Adapted) -> None:
    assert one.form is not None
    place = (3, 5, 1, 1)[: len(one.form.shape)]
    for value in (torch.nan, torch.inf):
        for tested in one.tensors().values():
            actual = tested.actual.clone()
            actual[place] = value
            again = Judged(actual=actual, safe=tested.safe)
            over = [chunk.start for chunk in one.form.chunks(again) if (~torch.isfinite(chunk.actual)).any()]
            assert one.worst(again)[1] == place
            assert len(over) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda norm, weight, lora: norm(weight, lora) ** 0,
        lambda norm, weight, lora: norm(weight, 0 * lora),
        lambda norm, weight, lora: norm(weight, lora) ** 2,
    ],
    ids=["norm-missing", "norm-without-delta", "norm-squared"],
)
def test_a_wrong_formula_in_every_precision_is_found(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    real = DoraLinearLayer.get_weight_norm

    def get_weight_norm(layer: Any, weight: Any, lora_weight: Any, scaling: Any, adapter_name: Any = None) -> Any:
        return wrong(lambda *parts: real(layer, *parts, scaling), weight, lora_weight)

    monkeypatch.setattr(DoraLinearLayer, "get_weight_norm", get_weight_norm)
    for target in ("linear", "embedding"):
        (one,) = adapted(dora(target))
        shares = one.shares()
        assert shares["delta"] <= 1
        assert shares["plain"] > 10
        assert shares["safe"] > 10


def test_a_magnitude_that_is_not_the_files_is_found(one: Adapted) -> None:
    magnitude = one.layer.lora_magnitude_vector["default"].weight
    with torch.no_grad():
        magnitude.copy_(magnitude.flatten().flip(0).reshape(magnitude.shape))
    shares = one.shares()
    assert shares["delta"] <= 1
    assert shares["plain"] > 10


def test_blocks_do_not_change_what_is_measured(one: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = one.shares()
    monkeypatch.setattr(form_module, "_BLOCK", 256)
    assert one.shares() == pytest.approx(whole, rel=1e-6)


def test_a_users_tolerance_replaces_the_bound(one: Adapted) -> None:
    tested = one.tensors()["plain"]
    shares = []
    for rtol in (1e-3, 1e-9):
        tolerance = UserAllowance(atol=0.0, rtol=rtol)
        shares.append(one.worst(Judged(actual=tested.actual, safe=False, tolerance=tolerance))[0])
    assert shares[0] < 1 < shares[1]
    assert shares[1] == pytest.approx(shares[0] * 1e6)
