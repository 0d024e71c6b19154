"""What is computed and measured once for a layer, and that the records are those of one tensor after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import peft
import pytest
import torch
import transformers
from peft.tuners.ia3.layer import Linear as IA3Linear
from peft.tuners.lora.layer import Embedding, Linear, ParamWrapper
from safetensors.torch import load_file, save_file

from consistency.capture.records import TensorRecord
from consistency.case import standard
from consistency.numerics.chunks import LowRankProduct, LowRankTensor
from consistency.numerics.error import measure_low_rank
from consistency.numerics.measure import Measure
from consistency.stages.merged import judging
from consistency.stages.merged import worker as stage
from tests.versions import loads_onto_mixtures, needs_method
from tests.worker.conftest import Look
from tests.worker.model.made_models import SIZES, adapter_on, on_llama, saved

pytestmark = [pytest.mark.filterwarnings("ignore")]  # PEFT and transformers warn while saving


@pytest.fixture
def merged(llama: Path, look: Look) -> Callable[..., list[TensorRecord]]:
    """Return the records of the stage, of a LoRA in float32 on a base in bfloat16, whose safe merge rounds twice."""
    adapter = on_llama(llama, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))

    def run(**changes: Any) -> list[TensorRecord]:
        found = look(llama, adapter, **{"dtype": "bfloat16", "stages": (standard.MERGED,), **changes})
        return [msgspec.structs.replace(record, order=0) for record in found]

    return run


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many tensors each pass over a layer's exact values measures."""
    seen = []

    def measure(tensors: Sequence[LowRankTensor], product: LowRankProduct) -> list[Measure]:
        seen.append(len(tensors))
        return measure_low_rank(tensors, product)

    monkeypatch.setattr(judging, "measure_low_rank", measure)
    return seen


@pytest.fixture
def deltas(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Return the deltas that PEFT computes."""
    seen: list[torch.Tensor] = []
    real = Linear.get_delta_weight

    def get_delta_weight(layer: Any, adapter: str) -> torch.Tensor:
        seen.append(real(layer, adapter))
        return seen[-1]

    monkeypatch.setattr(Linear, "get_delta_weight", get_delta_weight)
    return seen


def test_the_tensors_of_a_layer_are_measured_in_one_pass(
    merged: Callable[..., list[TensorRecord]], passes: list[int], deltas: list[torch.Tensor]
) -> None:
    records = merged()
    assert [(r.tensor, r.status) for r in records] == 2 * [
        ("delta", "within"), ("weight", "within"), ("weight_safe_merge", "within"),
    ]  # fmt: skip
    assert passes == [3, 3]
    assert len(deltas) == 2


def test_a_large_layers_tensors_are_held_one_at_a_time_and_measured_as_well(
    merged: Callable[..., list[TensorRecord]], passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    together = merged()
    passes.clear()
    monkeypatch.setattr(stage, "_TOGETHER_BYTES", 0)
    assert merged() == together
    assert passes == [1] * 6


def test_the_same_bits_are_measured_once(merged: Callable[..., list[TensorRecord]], passes: list[int]) -> None:
    records = merged(dtype="float32")  # neither merge rounds the delta
    assert passes == [2, 2]
    for _, plain, safe in zip(*[iter(records)] * 3, strict=True):
        assert (plain.digest, plain.measure) == (safe.digest, safe.measure)
        assert safe.measure is not None


def test_runs_that_are_compared_compute_the_delta_anew(
    merged: Callable[..., list[TensorRecord]], deltas: list[torch.Tensor]
) -> None:
    assert all(r.repeats == (r.digest,) for r in merged(repeat=2))
    assert len(deltas) == 2 * 2 * 3


def test_a_merge_that_writes_into_its_delta_spoils_nothing(
    merged: Callable[..., list[TensorRecord]], deltas: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = merged()
    real = Linear.merge

    def merge(layer: Any, **options: Any) -> None:
        real(layer, **options)
        deltas[-1].mul_(2)

    monkeypatch.setattr(Linear, "merge", merge)
    assert merged() == healthy


@needs_method("ShadowConfig")
def test_pefts_own_reason_is_given_where_a_whole_block_is_not_merged(llama: Path, look: Look) -> None:
    config = peft.ShadowConfig(r=2, shadow_num_hidden_layers=1, task_type="CAUSAL_LM")
    found = look(llama, on_llama(llama, config), stages=(standard.MERGED,))
    assert [one.status for one in found] == ["skipped"] * 2, "merged, and merged safely"
    expected = "PEFT does not merge this layer: NotImplementedError: ShadowPEFT cannot be merged"
    assert all(one.reason is not None and one.reason.startswith(expected) for one in found)


LYCORIS = {"r": 2, "alpha": 3, "target_modules": ["q_proj", "down_proj"]}
METHODS: dict[str, tuple[Callable[[], Any], str, Callable[..., Any]]] = {
    "loha": (
        lambda: peft.LoHaConfig(**LYCORIS),
        "peft.tuners.loha.layer.make_weight",
        lambda a, b, c, d, scale: ((a @ d) * (c @ b)) * scale,
    ),
    "lokr": (
        lambda: peft.LoKrConfig(**LYCORIS),
        "peft.tuners.lokr.layer.make_kron",
        lambda first, second, scale: torch.kron(second.flip(0), first) * scale,
    ),
    "ia3": (
        lambda: peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]),
        "peft.tuners.ia3.layer.transpose",
        lambda vector, *_: vector.flip(0, 1),
    ),
    "dora": (
        lambda: peft.LoraConfig(r=2, use_dora=True, target_modules=["q_proj", "down_proj"]),
        "peft.tuners.lora.dora.DoraLinearLayer.get_weight_norm",
        lambda _layer, weight, *_lora, **_scaling: torch.linalg.norm(weight, dim=1),
    ),
}
"""Methods with a closed form, and what of PEFT's code is replaced by something wrong, in float64 as elsewhere."""


@pytest.mark.parametrize("method", METHODS)
def test_an_error_in_pefts_own_code_is_found_where_a_form_is_known(
    llama: Path, look: Look, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, place, wrong = METHODS[method]
    adapter = on_llama(llama, config())
    for dtype in ("float32", "bfloat16"):
        records = [r for r in look(llama, adapter, dtype=dtype, stages=(standard.MERGED,)) if r.tensor != "delta"]
        assert {(r.rule, r.status) for r in records} == {("bound", "within")}
    monkeypatch.setattr(place, wrong)
    broken = [r for r in look(llama, adapter, stages=(standard.MERGED,)) if r.tensor != "delta"]
    assert {(r.rule, r.status) for r in broken} == {("bound", "outside")}
    assert all(r.reference_blob and set(r.ingredients) == {"allowed"} for r in broken)


def test_what_has_no_form_is_compared_with_peft_in_float64(llama: Path, look: Look) -> None:
    adapter = on_llama(llama, peft.VeraConfig(r=4, target_modules=["q_proj"]))
    assert [(r.tensor, r.rule, r.status) for r in look(llama, adapter, stages=(standard.MERGED,))] == [
        ("delta", "peer", "skipped"), ("weight", "relative", "measured"), ("weight_safe_merge", "relative", "measured"),
    ]  # fmt: skip


def test_a_bias_that_a_merge_changes_is_judged(masked_bert: Path, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    config = peft.IA3Config(target_modules=["query", "output.dense"], feedforward_modules=["output.dense"])
    model = transformers.BertForMaskedLM.from_pretrained(masked_bert)
    adapter = adapter_on(model, config, masked_bert.parent / "adapter")

    def biases() -> set[tuple[str, str, str]]:
        records = look(masked_bert, adapter, stages=(standard.MERGED,))
        return {(r.layer.rpartition(".")[2], r.tensor, r.status) for r in records if r.tensor.startswith("bias")}

    assert biases() == {("query", "bias", "within"), ("query", "bias_safe_merge", "within")}
    real = IA3Linear.merge

    def merge(layer: Any, **options: Any) -> None:
        before = layer.get_base_layer().bias.data.clone()
        real(layer, **options)
        layer.get_base_layer().bias.data = before

    monkeypatch.setattr(IA3Linear, "merge", merge)
    assert biases() == {("query", "bias", "outside"), ("query", "bias_safe_merge", "outside")}


@loads_onto_mixtures
def test_experts_are_judged_by_their_own_factors(tmp_path: Path, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    base = saved(transformers.MixtralForCausalLM(config), tmp_path / "mixtral")
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = peft.LoraConfig(r=2, target_modules=[], target_parameters=parameters)
    adapter = adapter_on(transformers.MixtralForCausalLM.from_pretrained(base), lora, tmp_path / "adapter")

    def statuses() -> set[tuple[str, str, str]]:
        return {(r.tensor, r.rule, r.status) for r in look(base, adapter, stages=(standard.MERGED,))}

    tensors = ("delta", "weight", "weight_safe_merge")
    assert statuses() == {(tensor, "bound", "within") for tensor in tensors}
    real = ParamWrapper.get_delta_weight
    monkeypatch.setattr(ParamWrapper, "get_delta_weight", lambda layer, adapter: real(layer, adapter).roll(1, 0))
    assert statuses() == {(tensor, "bound", "outside") for tensor in tensors}


def test_a_layer_whose_tensor_is_not_in_the_file_is_said_to_lack_it(llama: Path, look: Look) -> None:
    adapter = on_llama(llama, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    lost = next(name for name in sorted(tensors) if "lora_B" in name)
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, file, metadata={"format": "pt"})
    found = [
        r for r in look(llama, adapter, stages=(standard.MERGED,)) if r.tensor == "delta" and r.status == "skipped"
    ]
    assert [r.reason for r in found] == ["the adapter's file has no lora_B of this layer: its merged weight is judged"]


def test_a_scaling_that_is_not_the_files_is_found_and_so_is_the_merge_by_it(
    llama: Path, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exact value took the scaling of the loaded layer, and weights with twice the delta were right."""
    adapter = on_llama(
        llama, peft.LoraConfig(r=4, lora_alpha=8, use_rslora=True, target_modules=["q_proj", "embed_tokens"])
    )

    def statuses() -> set[tuple[str, str]]:
        found = look(llama, adapter, stages=(standard.ADAPTER, standard.MERGED))
        return {(r.tensor, r.status) for r in found if r.stage == "merged" or r.tensor == "rank_and_scaling"}

    merged = ("delta", "weight", "weight_safe_merge")
    assert statuses() == {("rank_and_scaling", "measured"), *((tensor, "within") for tensor in merged)}
    for kind in (Linear, Embedding):

        def update(layer: Any, name: str, *args: Any, real: Any = kind.update_layer, **options: Any) -> None:
            real(layer, name, *args, **options)
            layer.scaling[name] *= 2

        monkeypatch.setattr(kind, "update_layer", update)
    assert statuses() == {(tensor, "outside") for tensor in ("rank_and_scaling", *merged)}
