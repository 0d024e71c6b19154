"""Merges into quantized weights: within half a step of the exact sum, and not where they are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from consistency.capture.records import TensorRecord
from consistency.case import standard
from consistency.stages.merged import requantized
from consistency.worker.model import merging
from tests.worker.conftest import Look
from tests.worker.model.made_quantized import BITSANDBYTES, TORCHAO, quantized

pytestmark = [pytest.mark.filterwarnings("ignore")]


def weights(records: list[TensorRecord]) -> list[TensorRecord]:
    found = [record for record in records if record.tensor.startswith("weight")]
    assert len(found) in (2, 4)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [*BITSANDBYTES, *TORCHAO])
def test_a_merge_is_within_what_quantizing_may_do(kind: str, dtype: str, tmp_path: Path, look: Look) -> None:
    base, adapter = quantized(kind, tmp_path, dtype=dtype)
    found = look(base, adapter, dtype="auto", stages=(standard.MERGED,))
    assert [record.status for record in found if record.tensor == "delta"] == ["within"] * 2
    for record in weights(found):
        assert record.status == "within", record.evidence
        assert record.rule == "bound"
        assert record.reference == "float64"
        if dtype == "float32":
            assert 0.25 < record.evidence["error_in_steps_rms"] < 0.31, "uniform in half a step is 0.29"
            assert 0.4 < record.evidence["error_in_steps_max"] < 0.6
        assert 0 < record.evidence["changed_share"] <= 1


def cut_down(x: torch.Tensor) -> torch.Tensor:
    return x.sign() * x.abs().floor()


def test_codes_that_are_cut_instead_of_rounded_are_found(
    tmp_path: Path, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = quantized("int8", tmp_path)
    from bitsandbytes import functional

    def quantize(weight: torch.Tensor, threshold: float = 0.0) -> Any:
        largest = weight.abs().amax(dim=1).float()
        return cut_down(weight.float() * (127 / largest[:, None])).to(torch.int8), largest, None

    monkeypatch.setattr(functional, "int8_vectorwise_quant", quantize)
    for record in weights(look(base, adapter, dtype="auto", stages=(standard.MERGED,))):
        assert record.status == "outside"
        assert record.evidence["error_in_steps_max"] > 0.9


@pytest.mark.parametrize("kind", ["nf4", "nf4-nested", "fp4"])
def test_four_bit_codes_of_another_level_are_found(
    kind: str, tmp_path: Path, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = quantized(kind, tmp_path)
    from bitsandbytes import functional

    real = functional.quantize_4bit

    def quantize(weight: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        packed, state = real(weight, *arguments, **options)
        packed.reshape(-1)[3] ^= 0x10  # one code in all
        return packed, state

    monkeypatch.setattr(functional, "quantize_4bit", quantize)
    for record in weights(look(base, adapter, dtype="auto", stages=(standard.MERGED,))):
        assert record.status == "outside"


@pytest.mark.parametrize("kind", TORCHAO)
def test_a_wrong_scale_of_torchao_is_found(
    kind: str, tmp_path: Path, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = quantized(kind, tmp_path)
    from peft.tuners.lora import torchao

    real = torchao.TorchaoLoraLinear.merge

    def merge(layer: Any, *arguments: Any, **options: Any) -> None:
        real(layer, *arguments, **options)
        weight = layer.get_base_layer().weight
        weight.scale[2] *= 1.02

    monkeypatch.setattr(torchao.TorchaoLoraLinear, "merge", merge)
    for record in weights(look(base, adapter, dtype="auto", stages=(standard.MERGED,))):
        assert record.status == "outside"


@pytest.mark.parametrize("kind", ["nf4", "int8", "torchao-int8"])
def test_a_delta_that_the_merge_leaves_out_is_found(
    kind: str, tmp_path: Path, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = quantized(kind, tmp_path)
    real = merging.merged

    def merged(layer: Any, *, safe: bool) -> Any:
        whole = layer.get_delta_weight
        monkeypatch.setattr(layer, "get_delta_weight", lambda name: whole(name) * 0)
        return real(layer, safe=safe)

    monkeypatch.setattr(requantized, "merged", merged)
    for record in weights(look(base, adapter, dtype="auto", stages=(standard.MERGED,))):
        assert record.status == "outside"
        assert record.evidence["error_in_steps_max"] > 0.75


@pytest.mark.parametrize("kind", ["nf4", "int8", "torchao-int8"])
def test_the_model_is_as_it_was_after_the_stage(kind: str, tmp_path: Path, look: Look) -> None:
    base, adapter = quantized(kind, tmp_path)
    alone, after = (
        [r for r in look(base, adapter, dtype="auto", stages=stages) if r.stage == "forward"]
        for stages in ((standard.FORWARD,), (standard.MERGED, standard.FORWARD))
    )
    assert [r.digest for r in after] == [r.digest for r in alone]
    judged = [r for r in after if not r.tensor.endswith(".given")]
    assert {r.status for r in judged} <= {"within", "equal"}
    assert all(r.reference == "float64" for r in judged if r.dtype != "int64")  # positions are compared bit by bit


def test_a_method_without_exact_value_is_compared_between_devices(tmp_path: Path, look: Look) -> None:
    import peft
    import transformers

    from tests.worker.model.made_models import adapter_on

    base, _ = quantized("nf4", tmp_path)
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "plain")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=True)
    adapter = adapter_on(plain, config, tmp_path / "dora")
    for record in weights(look(base, adapter, dtype="auto", stages=(standard.MERGED,))):
        assert record.status == "measured"
        assert record.digest is not None
        assert record.reason is not None
        assert "no exact value" in record.reason
