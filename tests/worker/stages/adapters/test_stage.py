"""Several adapters in one model: what is checked of healthy ones, what PEFT refuses, and what it gets wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft.tuners.lora.model import LoraModel

from consistency.capture.records import TensorRecord
from consistency.case.named_adapters import NamedAdapter
from consistency.case.stages import Stage
from consistency.worker.stages.adapters import chance, cut
from consistency.worker.stages.adapters.combining import TYPES
from tests.worker.conftest import Look
from tests.worker.model.made_models import SIZES, adapter_on

pytestmark = [pytest.mark.filterwarnings("ignore")]  # PEFT and transformers warn while saving

Several = Callable[..., list[TensorRecord]]


@pytest.fixture
def several(llama: Path, look: Look, tmp_path: Path) -> Several:
    """Return the records of the stage for adapters with these configs, and of the stage `merged` after it."""

    def run(
        *, stages: tuple[Stage, ...] = (Stage.ADAPTERS,), dtype: str = "float32", **configs: Any
    ) -> list[TensorRecord]:
        named = []
        for number, (name, config) in enumerate(configs.items()):
            torch.manual_seed(number)
            model = transformers.LlamaForCausalLM.from_pretrained(llama)
            named.append(NamedAdapter(name=name, path=str(adapter_on(model, config, tmp_path / f"adapter-{name}"))))
        return look(llama, Path(named[0].path), adapters=tuple(named), stages=stages, dtype=dtype)

    return run


def lora(**changes: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "down_proj"], **changes})


def wrong(found: list[TensorRecord]) -> list[str]:
    bad = ("outside", "missing", "unexpected", "blocked")
    return [
        f"{one.layer}.{one.tensor}: {one.reason}"
        for one in found
        if one.status in bad or (one.reference_digest is not None and one.digest != one.reference_digest)
    ]


def skipped(found: list[TensorRecord]) -> dict[str, str]:
    return {f"{one.layer}.{one.tensor}": one.reason or "" for one in found if one.status == "skipped"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_step_of_two_loras(several: Several, dtype: str) -> None:
    """PEFT makes combinations in the dtype of the base, and loads adapters in float32."""
    found = several(dtype=dtype, one=lora(), two=lora(lora_alpha=16))
    assert (wrong(found), skipped(found)) == ([], {})
    names = {f"{one.layer}.{one.tensor}" for one in found}
    place = "model.layers.0.self_attn.q_proj"
    assert {
        f"{place}.one.lora_A", f"{place}.two.lora_B", f"{place}.hotswap.lora_A", f"{place}.linear.lora_B",
        f"{place}.cat.lora_A", f"{place}.ties.lora_B", f"{place}.magnitude_prune.lora_A",
        f"{place}.dare_linear.lora_A", f"{place}.dare_ties.lora_B", f"{place}.svd.lora_A", f"{place}.ties_svd.lora_B",
        f"{place}.magnitude_prune_svd.singular values", f"{place}.dare_linear_svd.orthonormal",
        f"{place}.dare_ties_svd.lora_B", "add_weighted_adapter(dare_linear).density",
        "add_weighted_adapter(dare_ties_svd).independence",
        f"{place}.merged_at_once", f"{place}.merged_in_turn", f"{place}.drift",
        "set_adapter(two).results of two", "all active.active adapters", "disable_adapter.results of the base",
        "hotswap(two over one).results of two", "hotswap(one back).bytes of one", "delete_adapter(one).deleted",
        "delete_adapter.results of two", "merge.bytes of the base",
    } <= names  # fmt: skip
    drift = next(one for one in found if one.tensor == "drift")
    assert drift.evidence["cycles"] == 10
    assert drift.evidence["max_ulp"] > 0
    assert float(drift.evidence["max_abs"]) > 0


def test_the_stages_after_it_find_the_model_as_it_was(several: Several) -> None:
    stages = (Stage.ADAPTERS, Stage.MERGED, Stage.FORWARD)
    found = several(stages=stages, one=lora(), two=lora())
    alone = several(stages=stages[1:], one=lora(), two=lora())
    kept = {one.key: (one.digest, one.status) for one in found if one.stage != Stage.ADAPTERS}
    assert kept == {one.key: (one.digest, one.status) for one in alone}
    assert kept


def test_another_rank_and_other_layers(several: Several) -> None:
    """Hotswap leaves zeros where the new adapter is smaller or has no layer; `linear` needs one rank."""
    found = several(one=lora(), two=lora(r=2, target_modules=["q_proj"]), three=lora(r=8))
    assert wrong(found) == []
    refused = skipped(found)
    assert refused.keys() == {
        f"add_weighted_adapter({kind}).done"
        for kind in ("linear", "magnitude_prune", "ties", "dare_linear", "dare_ties")
    }
    assert all("same r value" in reason for reason in refused.values())
    assert len([one for one in found if one.tensor == "merged_in_turn"]) == 2


def swapped_weights(real: Callable[..., Any], model: Any, kind: str, names: Any, weights: Any, *args: Any) -> Any:
    return real(model, kind, names, weights[::-1], *args)


def one_layer_left_out(real: Callable[..., Any], model: Any, *args: Any, **options: Any) -> Any:
    a, b = real(model, *args, **options)
    return (a, b * 0) if a.shape[1] == SIZES["intermediate_size"] else (a, b)


@pytest.mark.parametrize("fault", [swapped_weights, one_layer_left_out])
def test_a_wrong_combination_is_outside(
    several: Several, fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "_generalized_task_arithmetic_weighted_adapter"
    real = getattr(LoraModel, name)
    monkeypatch.setattr(LoraModel, name, lambda *args, **options: fault(real, *args, **options))
    found = several(one=lora(), two=lora())
    assert {kind for kind in TYPES if any(f".{kind}.lora_" in name for name in wrong(found))} == {
        "linear", "magnitude_prune", "ties", "dare_linear", "dare_ties",
    }  # fmt: skip


def test_a_large_model_is_cut_in_its_first_layers(several: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut, "CUT_STEPS", 1)
    found = several(one=lora(), two=lora())
    assert wrong(found) == []
    place = "model.layers.0.self_attn.q_proj"
    assert [one.layer for one in found if one.tensor == "svd.lora_A"] == [place]
    reason = skipped(found)["add_weighted_adapter(svd).further layers"]
    assert reason == "not cut in 1 further layers: level thorough cuts all"


def test_draws_in_another_order_are_not_judged(several: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chance, "_DRAWS", frozenset())
    found = several(one=lora(), two=lora())
    assert wrong(found) == []
    assert not [one for one in found if one.tensor.startswith("dare")]
    assert {name for name in skipped(found) if "dare" in name} == {
        f"add_weighted_adapter({kind}).values" for kind in TYPES if "dare" in kind
    }


def test_a_method_without_these_steps(several: Several) -> None:
    config = peft.LoHaConfig(r=2, target_modules=["q_proj"])
    found = several(one=config, two=config)
    assert wrong(found) == []
    assert skipped(found).keys() == {
        "add_weighted_adapter.everything", "merge.merged weights", "hotswap.done",
    }  # fmt: skip


def test_adapters_that_peft_does_not_load_together(several: Several) -> None:
    found = several(one=lora(), two=peft.LoHaConfig(r=2, target_modules=["q_proj"]))
    (only,) = skipped(found).values()
    assert only.startswith("PEFT does not load two beside one")


def test_hotswap_that_clears_another_adapter_is_found_once(several: Several) -> None:
    """PEFT 0.21 takes every tensor whose name contains the adapter's name for one of it."""
    found = several(first=lora(), first_b=lora())
    (only,) = wrong([one for one in found if one.status == "outside"])
    assert only.startswith("hotswap(first_b over first).bytes of first_b: ")
