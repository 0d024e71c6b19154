"""The stage `base` on quantized weights: each stored part, the weight that they stand for, and what a pass leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from consistency.capture.names import AFTER_A_PASS, DEQUANTIZED, SETTINGS
from consistency.capture.records import TensorRecord
from consistency.case import standard
from consistency.case.named_adapters import NamedAdapter
from consistency.extras.peft_api.adapters.spec import ADAPTERS
from consistency.worker.faults import plant
from consistency.worker.faults.catalogue import FAULTS
from consistency.worker.faults.fault import Need
from consistency.worker.model import loading
from tests.worker.conftest import Look
from tests.worker.model.made_quantized import BITSANDBYTES, LAYER, TORCHAO, quantized

pytestmark = [pytest.mark.filterwarnings("ignore")]

Change = Callable[[Any], None]


def of_layer(records: list[TensorRecord]) -> dict[str, str]:
    return {record.tensor: record.status for record in records if record.layer == LAYER}


@pytest.mark.parametrize("kind", [*BITSANDBYTES, *TORCHAO])
def test_every_part_and_the_weight_equal_the_file(kind: str, tmp_path: Path, look: Look) -> None:
    base, adapter = quantized(kind, tmp_path)
    found = look(base, adapter, dtype="auto", stages=(standard.BASE,))
    statuses = of_layer(found)
    parts = {
        "nf4": {"weight", "weight_absmax", "weight_quant_map", SETTINGS, AFTER_A_PASS},
        "fp4": {"weight", "weight_absmax", "weight_quant_map", SETTINGS, AFTER_A_PASS},
        "int8": {"weight", "SCB"},
        "torchao-float8": {"weight_qdata", "weight_scale"},
    }
    parts["nf4-nested"] = parts["nf4"] | {"weight_nested_absmax", "weight_nested_quant_map"}
    parts["torchao-int8"] = parts["torchao-int4"] = parts["torchao-float8"] | {"weight_zero_point"}
    assert statuses.keys() == parts[kind] | {DEQUANTIZED}
    # a CPU with AVX512-BF16 leaves other weights, which is a warning
    assert {status for tensor, status in statuses.items() if tensor not in (AFTER_A_PASS, DEQUANTIZED)} == {"equal"}
    # bitsandbytes dequantizes fp4 with another rounding where a CPU has AVX2 alone
    assert statuses[DEQUANTIZED] in (("equal", "within") if kind == "fp4" else ("equal",))
    assert not [record for record in found if record.status == "outside"]


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], None]:
    """Change the quantized layer of a model after it was loaded, as a device might that lost bytes."""

    def plant(change: Change) -> None:
        real = loading._from_folder

        def load(*arguments: Any) -> Any:
            model, missing = real(*arguments)
            with torch.no_grad():
                change(model.get_submodule(LAYER))
            return model, missing

        monkeypatch.setattr(loading, "_from_folder", load)

    return plant


def flip_a_code(layer: Any) -> None:
    weight = getattr(layer.weight, "qdata", layer.weight)
    weight.data = weight.data.clone()
    weight.data.view(torch.uint8).reshape(-1)[7] ^= 1


def change_a_scale(layer: Any) -> None:
    if hasattr(layer.weight, "scale"):
        layer.weight.scale = layer.weight.scale.clone()
        layer.weight.scale[1] *= 1 + 2**-20
    elif hasattr(layer.weight, "SCB"):
        layer.weight.SCB = layer.weight.SCB.clone()
        layer.weight.SCB[1] *= 1 + 2**-20
    else:
        state = layer.weight.quant_state.state2 if layer.weight.quant_state.nested else layer.weight.quant_state
        state.absmax = state.absmax.clone()
        state.absmax[0] *= 1 + 2**-20


@pytest.mark.parametrize("kind", [*BITSANDBYTES, *TORCHAO])
def test_one_flipped_bit_of_a_code_is_found(
    kind: str, tmp_path: Path, look: Look, planted: Callable[[Change], None]
) -> None:
    base, adapter = quantized(kind, tmp_path)
    healthy = look(base, adapter, dtype="auto", stages=(standard.BASE,))
    (whole,) = (r.measure for r in healthy if (r.layer, r.tensor) == (LAYER, DEQUANTIZED))
    planted(flip_a_code)
    found = look(base, adapter, dtype="auto", stages=(standard.BASE,))
    wrong = {(r.layer, r.tensor): r for r in found if r.status == "outside"}
    codes = "weight_qdata" if kind in TORCHAO else "weight"
    assert wrong.keys() == {(LAYER, codes), (LAYER, DEQUANTIZED)}
    assert wrong[LAYER, codes].word == "bit-flip"
    measure = wrong[LAYER, DEQUANTIZED].measure
    assert measure is not None
    assert measure.mismatched == (0 if whole is None else whole.mismatched) + 1


@pytest.mark.parametrize("kind", [*BITSANDBYTES, *TORCHAO])
def test_one_scale_that_is_off_by_a_millionth_is_found(
    kind: str, tmp_path: Path, look: Look, planted: Callable[[Change], None]
) -> None:
    base, adapter = quantized(kind, tmp_path)
    planted(change_a_scale)
    found = look(base, adapter, dtype="auto", stages=(standard.BASE,))
    wrong = {r.tensor for r in found if r.status == "outside"}
    names = {"nf4-nested": "weight_nested_absmax", "int8": "SCB"}
    assert names.get(kind, "weight_scale" if kind in TORCHAO else "weight_absmax") in wrong


@pytest.mark.parametrize("kind", ["nf4", "int8", "torchao-int8"])
@pytest.mark.parametrize("fault", [fault.name for fault in FAULTS.values() if Need.QUANTIZED in fault.needs])
def test_what_the_drill_plants_is_found_and_named(kind: str, fault: str, tmp_path: Path, look: Look) -> None:
    base, adapter = quantized(kind, tmp_path)
    with plant(fault):
        found = look(base, adapter, dtype="auto", stages=(standard.BASE,))
    wrong = {r.tensor: r for r in found if r.status == "outside"}
    assert {r.layer for r in found if r.status == "outside"} == {LAYER}
    assert FAULTS[fault].expected in {r.word for name, r in wrong.items() if name != DEQUANTIZED}


@pytest.mark.parametrize("kind", ["nf4", "torchao-int8"])
def test_several_adapters_are_not_merged_into_quantized_weights(kind: str, tmp_path: Path, look: Look) -> None:
    base, adapter = quantized(kind, tmp_path)
    two = tuple(NamedAdapter(name=name, path=str(adapter)) for name in ("one", "two"))
    found = look(base, adapter, dtype="auto", adapters=two, stages=(ADAPTERS,))
    assert not [(r.layer, r.tensor, r.reason) for r in found if r.status in ("outside", "missing", "blocked")]
    (skipped,) = [r.reason or "" for r in found if r.tensor == "quantized weights"]
    assert skipped.startswith("several adapters are not merged into the quantized weights of ")
    assert {r.status for r in found if r.tensor in ("linear.lora_A", "dare_linear.lora_B")} == {"within"}


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_another_table_is_found(kind: str, tmp_path: Path, look: Look, planted: Callable[[Change], None]) -> None:
    base, adapter = quantized(kind, tmp_path)

    def swap(layer: Any) -> None:
        state = layer.weight.quant_state
        state.code = state.code.roll(1)

    planted(swap)
    found = look(base, adapter, dtype="auto", stages=(standard.BASE,))
    assert "weight_quant_map" in {r.tensor for r in found if r.status == "outside"}


def test_other_settings_are_found(tmp_path: Path, look: Look, planted: Callable[[Change], None]) -> None:
    base, adapter = quantized("nf4-nested", tmp_path)

    def move(layer: Any) -> None:
        layer.weight.quant_state.offset = layer.weight.quant_state.offset * 1.01

    planted(move)
    wrong = {r.tensor: r for r in look(base, adapter, dtype="auto", stages=(standard.BASE,)) if r.status == "outside"}
    assert wrong.keys() == {SETTINGS, DEQUANTIZED}
    assert wrong[SETTINGS].evidence.keys() == {"nested_offset"}


def test_a_kernel_that_reads_right_bytes_wrongly_is_found(
    tmp_path: Path, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = quantized("nf4", tmp_path)
    from bitsandbytes import functional

    real = functional.dequantize_4bit

    def swapped(packed: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        return real((packed << 4) | (packed >> 4), *arguments, **options)

    monkeypatch.setattr(functional, "dequantize_4bit", swapped)
    found = look(base, adapter, dtype="auto", stages=(standard.BASE,))
    assert {r.tensor for r in found if r.status == "outside"} == {DEQUANTIZED}


def test_weights_that_a_pass_leaves_in_another_form_are_recorded(
    tmp_path: Path, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a CPU with AVX512-BF16, where the first pass packs the codes anew."""
    base, adapter = quantized("nf4", tmp_path)
    from bitsandbytes.nn import Linear4bit

    real = Linear4bit.forward

    def forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = real(layer, x)
        layer.weight.data = layer.weight.data.flip(0)
        return found

    monkeypatch.setattr(Linear4bit, "forward", forward)
    found = look(base, adapter, dtype="auto", stages=(standard.BASE, standard.MERGED))
    (after,) = [r for r in found if r.tensor == AFTER_A_PASS]
    assert after.status == "within"
    assert "off by up to" in after.evidence["read"]
    assert not [r for r in found if r.status == "outside"], "the stages start from the weights as they were loaded"


def test_a_kind_without_formula_is_compared_between_devices(
    tmp_path: Path, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = quantized("torchao-int8", tmp_path)
    monkeypatch.setattr("consistency.worker.judging.quantized_base.weight_of_layer", lambda _: None)
    found = look(base, adapter, dtype="auto", stages=(standard.BASE,))
    (weight,) = [r for r in found if r.layer == LAYER and r.tensor == DEQUANTIZED]
    assert weight.status == "measured"
    assert weight.digest is not None
    assert weight.reason is not None
    assert "no formula for Int8Tensor" in weight.reason


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_gradients_through_quantized_layers_are_compared(kind: str, tmp_path: Path, look: Look) -> None:
    """What a forward pass leaves in an 8-bit layer is what its backward pass reads: it was taken away in between."""
    base, adapter = quantized(kind, tmp_path)
    found = look(base, adapter, dtype="auto", stages=(standard.FORWARD, standard.GRADIENT))
    rows = [r for r in found if r.stage == standard.GRADIENT and r.tensor.endswith(".gradient")]
    assert len(rows) > 4
    assert {r.status for r in rows} == {"within"}
