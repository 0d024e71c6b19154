"""Several adapters in one model: what is checked of healthy ones, what PEFT refuses, and what it gets wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft.tuners.lora.model import LoraModel
from safetensors.torch import load_file, save_file

from consistency.capture.records import TensorRecord
from consistency.case import standard
from consistency.case.named_adapters import NamedAdapter
from consistency.case.stage import Stage
from consistency.extras.peft_api.adapters import chance, combining, cut
from consistency.extras.peft_api.adapters import worker as stage
from consistency.extras.peft_api.adapters.combining import TYPES, WITH_FORM
from consistency.extras.peft_api.adapters.pruned import PRUNED
from consistency.extras.peft_api.adapters.spec import ADAPTERS
from consistency.extras.peft_api.adapters.truncated import TRUNCATED
from consistency.numerics.rules import Rule, judge_relative
from consistency.worker.environment import release
from tests.worker.conftest import Look
from tests.worker.model.made_models import SIZES, adapter_on

pytestmark = [pytest.mark.filterwarnings("ignore")]  # PEFT and transformers warn while saving

Several = Callable[..., list[TensorRecord]]


@pytest.fixture
def several(llama: Path, look: Look, tmp_path: Path) -> Several:
    """Return the records of the stage for adapters with these configs, and of the stage `merged` after it."""

    def run(
        *,
        stages: tuple[Stage, ...] = (ADAPTERS,),
        dtype: str = "float32",
        digits: int | None = None,
        **configs: Any,
    ) -> list[TensorRecord]:
        named = []
        for number, (name, config) in enumerate(configs.items()):
            torch.manual_seed(number)
            model = transformers.LlamaForCausalLM.from_pretrained(llama)
            folder = adapter_on(model, config, tmp_path / f"adapter-{name}")
            if digits is not None:
                file = folder / "adapter_model.safetensors"
                save_file({name: tensor.round(decimals=digits) for name, tensor in load_file(file).items()}, file)
            named.append(NamedAdapter(name=name, path=str(folder)))
        return look(llama, Path(named[0].path), adapters=tuple(named), stages=stages, dtype=dtype)

    return run


def lora(**changes: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "down_proj"], **changes})


def wrong(found: list[TensorRecord]) -> list[str]:
    bad = ("outside", "missing", "unexpected", "blocked")
    return [
        f"{one.layer}.{one.tensor}: {one.reason}"
        for one in found
        if one.status in bad
        or (one.reference_digest is not None and one.digest != one.reference_digest)
        or is_outside(one)
    ]


def is_outside(one: TensorRecord) -> bool:
    """Report whether a comparison calls a tensor wrong by the error that rounding makes."""
    if one.rule != Rule.RELATIVE:
        return False
    assert one.measure is not None
    assert one.rounding is not None
    return judge_relative(one.measure, one.dtype, one.rounding).status == "outside"


def skipped(found: list[TensorRecord]) -> dict[str, str]:
    return {f"{one.layer}.{one.tensor}": one.reason or "" for one in found if one.status == "skipped"}


def computed_otherwise() -> set[str]:
    """Return the types of combinations that the installed PEFT does not compute by their definitions."""
    return {kind for kind in TYPES if combining._why_defined_otherwise(kind, [2.0])}


def rows_of(kinds: Iterable[str]) -> set[str]:
    return {f"add_weighted_adapter({kind}).factors" for kind in kinds}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_step_of_two_loras(several: Several, dtype: str) -> None:
    """PEFT makes combinations in the dtype of the base, and loads adapters in float32."""
    found = several(dtype=dtype, one=lora(), two=lora(lora_alpha=16))
    otherwise = computed_otherwise()
    rounded = {"load_adapter.values"} if dtype == "bfloat16" and release("peft") < (0, 19) else set()
    assert (wrong(found), set(skipped(found))) == ([], rows_of(otherwise) | rounded)
    names = {f"{one.layer}.{one.tensor}" for one in found}
    place = "model.layers.0.self_attn.q_proj"
    expected = {
        f"{place}.one.lora_A", f"{place}.two.lora_B", f"{place}.hotswap.lora_A", f"{place}.linear.lora_B",
        f"{place}.cat.lora_A", f"{place}.ties.lora_B", f"{place}.magnitude_prune.lora_A",
        f"{place}.dare_linear.lora_A", f"{place}.dare_ties.lora_B", f"{place}.svd.lora_A", f"{place}.ties_svd.lora_B",
        f"{place}.svd.singular values", f"{place}.magnitude_prune_svd.lora_A", f"{place}.dare_linear_svd.orthonormal",
        f"{place}.dare_ties_svd.lora_B", "add_weighted_adapter(dare_linear).density",
        "add_weighted_adapter(dare_ties_svd).independence",
        f"{place}.merged_at_once", f"{place}.merged_in_turn", f"{place}.drift",
        "set_adapter(two).results of two", "all active.active adapters", "disable_adapter.results of the base",
        "hotswap(two over one).results of two", "hotswap(one back).bytes of one", "delete_adapter(one).deleted",
        "delete_adapter.results of two", "merge.bytes of the base",
    }  # fmt: skip
    assert {name for name in expected if name.split(".")[-2] not in otherwise} <= names
    rules = {one.tensor: one.rule for one in found if one.layer == place}
    assert {rules[f"{kind}.lora_A"] for kind in WITH_FORM if kind not in otherwise} == {Rule.BOUND}
    assert {rules[f"{kind}.lora_A"] for kind in PRUNED} == {Rule.RELATIVE}
    assert {rules[f"{kind}.lora_A"] for kind in TRUNCATED if kind not in WITH_FORM} == {Rule.PEER}
    drift = next(one for one in found if one.tensor == "drift")
    assert drift.evidence["cycles"] == 10
    assert drift.evidence["max_ulp"] > 0
    assert float(drift.evidence["max_abs"]) > 0


def test_the_stages_after_it_find_the_model_as_it_was(several: Several) -> None:
    stages = (ADAPTERS, standard.MERGED, standard.FORWARD)
    found = several(stages=stages, one=lora(), two=lora())
    alone = several(stages=stages[1:], one=lora(), two=lora())
    kept = {one.key: (one.digest, one.status) for one in found if one.stage != ADAPTERS}
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
    } | rows_of(computed_otherwise() & {"svd"})
    assert all("same r value" in reason for row, reason in refused.items() if row.endswith(".done"))
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
    } - computed_otherwise()  # fmt: skip


def test_what_float64_may_choose_otherwise_is_compared_between_workers(several: Several) -> None:
    """Where elements are equally large, as of adapters in a half type, a device may leave out any of them."""
    found = several(one=lora(), two=lora(), digits=2)
    assert wrong(found) == []
    factors = [one for one in found if one.tensor.split(".")[0] in PRUNED]
    alone = [one for one in factors if one.rule == Rule.PEER]
    assert {one.tensor.split(".")[0] for one in alone} == set(PRUNED)
    assert all("equally large" in (one.reason or "") for one in alone)
    assert {one.rule for one in factors} <= {Rule.PEER, Rule.RELATIVE}


def test_a_large_model_is_cut_in_its_first_layers(several: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut, "CUT_STEPS", 1)
    found = several(one=lora(lora_alpha=4), two=lora(lora_alpha=4))
    assert wrong(found) == []
    place = "model.layers.0.self_attn.q_proj"
    assert [one.layer for one in found if one.tensor == "svd.lora_A"] == [place]
    reason = skipped(found)["add_weighted_adapter(svd).further layers"]
    assert reason == "not cut in 1 further layers: level thorough cuts all"


def test_draws_in_another_order_are_not_judged(several: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chance, "_DRAWS", frozenset())
    found = several(one=lora(), two=lora())
    assert wrong(found) == []
    assert not [one for one in found if one.tensor.startswith("dare") and one.rule == Rule.BOUND]
    assert {name for name in skipped(found) if "dare" in name} - rows_of(TYPES) == {
        f"add_weighted_adapter({kind}).values" for kind in TYPES if "dare" in kind
    }


def test_what_an_older_peft_computes_otherwise_is_not_judged(several: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combining, "release", lambda _: (0, 18))
    found = several(one=lora(), two=lora(lora_alpha=4))
    assert wrong(found) == []
    kinds = {"dare_linear", "dare_ties", "svd"}
    reasons = skipped(found)
    assert reasons.keys() == rows_of(kinds)
    assert (
        "does not divide the elements that it keeps by the density"
        in reasons["add_weighted_adapter(dare_ties).factors"]
    )
    assert "multiplies a delta by its scaling twice" in reasons["add_weighted_adapter(svd).factors"]
    assert not [one.tensor for one in found if one.tensor.partition(".")[0] in kinds]
    assert {"linear.lora_A", "ties.lora_B", "cat.lora_A"} <= {one.tensor for one in found}
    draws = {one.layer for one in found if one.tensor == "density"}
    assert draws == {f"add_weighted_adapter({kind})" for kind in TYPES if "dare" in kind}


def test_adapters_that_an_older_peft_rounds_are_loaded_again(several: Several, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "release", lambda _: (0, 18))
    found = several(dtype="bfloat16", one=lora(), two=lora())
    assert wrong(found) == []
    assert "rounds an adapter that it loads beside another to bfloat16" in skipped(found)["load_adapter.values"]
    assert "load_adapter.values" not in skipped(several(one=lora(), two=lora()))


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


def test_an_adapter_that_peft_does_not_load_again_beside_others(several: Several) -> None:
    """It asks the file of each for the trained tokens that another one has."""
    tokens = lora(trainable_token_indices={"embed_tokens": [1, 2]})
    found = several(one=lora(), two=tokens)
    (only,) = skipped(found).values()
    assert only.startswith("PEFT does not load one again beside the others: KeyError: ")


def test_hotswap_that_clears_another_adapter_is_found_once(several: Several) -> None:
    """PEFT 0.21 takes every tensor whose name contains the adapter's name for one of it."""
    found = several(first=lora(), first_b=lora())
    (only,) = wrong([one for one in found if one.status == "outside"])
    assert only.startswith("hotswap(first_b over first).bytes of first_b: ")


@pytest.mark.parametrize("names", [("plain", "pissa"), ("pissa", "plain")])
def test_an_adapter_that_rewrites_the_base_is_named(several: Several, names: tuple[str, str]) -> None:
    """The other's answers change beside it, and no function of PEFT that switches adapters is to blame."""
    configs = {"plain": lora(init_lora_weights=False), "pissa": lora(init_lora_weights="pissa")}
    found = several(**{name: configs[name] for name in names})
    (text,) = wrong(found)
    assert text.startswith("loading pissa.bytes of the base: loading pissa rewrites 2 weights of the base")
    (evidence,) = [one.evidence for one in found if one.status == "outside"]
    assert evidence["to_do"].startswith("convert pissa to an adapter of the unchanged base")
