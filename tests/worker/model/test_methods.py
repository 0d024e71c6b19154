"""Adapter methods, heads and models that once gave a false alarm, a crash, or a pass that meant nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file

from consistency.capture.records import TensorMeasure, TensorRecord
from consistency.case.tolerance import Override
from consistency.errors import InputError
from consistency.numerics.bound import independent_rows
from consistency.numerics.exact import in_float64
from consistency.numerics.real import Real
from consistency.worker.model.head_class import auto_class, labels
from consistency.worker.model.loading import expected_adapter, load_adapter, load_base
from consistency.worker.model.synthetic_head import made_up, overwrite
from consistency.worker.model.weight_files import WeightFiles
from tests.comparison.made_records import compared, computed, measured, only_row
from tests.conftest import MakeCapture
from tests.worker.conftest import Look
from tests.worker.model.made_models import SIZES, adapter_on, case_of, on_llama, saved

pytestmark = [pytest.mark.filterwarnings("ignore")]  # what PEFT and transformers say while saving is not ours to mend

U = 2.0**-24


def error_in_roundoffs(record: TensorRecord) -> float:
    assert record.measure is not None
    return float(record.measure.max_abs) / (U * float(record.measure.magnitude))


# what no file holds


def test_a_head_that_no_file_holds_has_the_same_numbers_everywhere(masked_bert: Path, look: Look) -> None:
    model = transformers.BertForSequenceClassification.from_pretrained(masked_bert, num_labels=5)
    config = peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
    adapter = adapter_on(model, config, masked_bert.parent / "adapter")
    found = {(r.stage, r.layer, r.tensor): r for r in look(masked_bert, adapter)}
    head = found["base", "classifier", "weight"]
    assert (head.rule, head.status, head.shape) == ("bitwise", "equal", (5, 32))
    assert "not_in_file" in head.evidence
    # a vector has its constant, and is not taken for a tensor of the file whose name ends alike
    pooler = found["base", "bert.pooler.dense", "bias"]
    assert (pooler.rule, pooler.reference_digest) == ("peer", None)
    assert not [r for r in found.values() if r.status in ("missing", "unexpected", "outside")]
    assert found["adapter", "classifier", "weight"].status == "equal"


def test_numbers_that_are_made_depend_on_the_name_alone(masked_bert: Path) -> None:
    model = transformers.BertForSequenceClassification.from_pretrained(masked_bert, num_labels=5)
    case = case_of(masked_bert, adapter_on(model, peft.LoraConfig(target_modules=["query"]), masked_bert / "adapter"))
    weights = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        loaded = load_base(case, "cpu")
        assert "classifier.weight" in loaded.not_in_file
        weights.append(loaded.tensors["classifier.weight"])
    assert torch.equal(*weights)
    assert torch.equal(weights[0], made_up("classifier.weight", weights[0]))
    assert not torch.equal(weights[0], made_up("score.weight", weights[0]))
    assert 0.01 < float(weights[0].detach().std()) < 0.03


def test_a_weight_that_shares_its_storage_with_a_loaded_one_is_left_alone() -> None:
    a, b, c, d = (torch.nn.Linear(4, 4, bias=False) for _ in range(4))
    b.weight, d.weight = a.weight, c.weight
    before = a.weight.detach().clone()
    model = torch.nn.ModuleDict({"a": a, "b": b, "c": c, "d": d})
    assert overwrite(model, ["d.weight", "c.weight", "b.weight"]) == {"c.weight"}
    assert torch.equal(a.weight, before)
    assert torch.equal(d.weight, made_up("c.weight", before))


# which class, and how many labels


@pytest.mark.parametrize(
    ("options", "auto"),
    [
        ({"task_type": "SEQ_CLS"}, "AutoModelForSequenceClassification"),
        ({"modules_to_save": ["classifier"]}, "AutoModelForSequenceClassification"),  # PEFT notes the class it saw
    ],
)
def test_the_head_follows_the_adapter(masked_bert: Path, options: dict[str, Any], auto: str) -> None:
    model = transformers.BertForSequenceClassification.from_pretrained(masked_bert, num_labels=5)
    adapter = adapter_on(model, peft.LoraConfig(target_modules=["query"], **options), masked_bert / "adapter")
    case, config = case_of(masked_bert, adapter), transformers.AutoConfig.from_pretrained(masked_bert)
    assert auto_class(config, case).__name__ == auto
    assert labels(config, case) == 5
    alone = case_of(masked_bert, None)
    assert (auto_class(config, alone).__name__, labels(config, alone)) == ("AutoModelForMaskedLM", None)


# methods


def test_a_prompt_is_no_tensor_without_a_place(llama: Path, look: Look) -> None:
    adapter = on_llama(llama, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    found = {r.tensor: r for r in look(llama, adapter, repeat=2) if r.stage == "adapter"}
    prompt = found.pop("tensor")
    assert set(found) == {"loaded_again", "rank_and_scaling"}
    assert (prompt.status, prompt.rule, len(prompt.repeats)) == ("equal", "bitwise", 1)


def test_looking_for_the_places_loads_nothing(llama: Path) -> None:
    adapter = on_llama(llama, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    case = case_of(llama, adapter)
    model = load_adapter(load_base(case, "cpu"), case)
    name, prompt = next((n, p) for n, p in model.named_parameters() if n.startswith("prompt_encoder"))
    with torch.no_grad():
        prompt.zero_()
    assert list(expected_adapter(model, WeightFiles.of_adapter(str(adapter), allow_pickle=False))) == [name]
    assert not prompt.any()
    assert "load_state_dict" not in vars(model)


@pytest.mark.parametrize(
    "config",
    [
        peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True),
        peft.LoHaConfig(r=2, target_modules=["q_proj"]),
        peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
    ],
    ids=["dora", "loha", "ia3"],
)
def test_a_method_without_closed_form_is_held_against_a_merge(llama: Path, look: Look, config: Any) -> None:
    """A reference that is not merged would be off by the whole delta, tens of thousands of roundings."""
    merged = [r for r in look(llama, on_llama(llama, config)) if r.stage == "merged" and r.tensor != "delta"]
    assert [r.tensor for r in merged] == ["weight", "weight_safe_merge"]
    assert all(0 < error_in_roundoffs(r) < 16 for r in merged)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (peft.BOFTConfig(boft_block_size=4, target_modules=["q_proj"]), "gives a tuple"),
        (peft.ShiraConfig(r=2, target_modules=["q_proj"]), "no closed form"),  # a sparse delta
    ],
    ids=["boft", "shira"],
)
def test_a_delta_that_is_no_plain_tensor_is_skipped(llama: Path, look: Look, config: Any, reason: str) -> None:
    found = {r.tensor: r for r in look(llama, on_llama(llama, config)) if r.stage == "merged"}
    assert found["delta"].status == "skipped"
    assert reason in (found["delta"].reason or "")
    assert error_in_roundoffs(found["weight"]) < 16


def test_a_merge_is_held_against_the_base_that_the_method_rewrote(llama: Path, look: Look) -> None:
    adapter = on_llama(llama, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa"))
    found = look(llama, adapter)
    assert [r.tensor for r in found if r.diagnosis == "recomputed"] == ["weight_after_adapter"]
    assert {r.status for r in found if r.stage == "merged"} == {"within"}
    alone = look(llama, adapter, only=("merged",))
    assert {r.status for r in alone} == {"within"}


def test_a_projection_that_no_file_holds_is_recorded(llama: Path, look: Look) -> None:
    config = peft.VeraConfig(r=4, target_modules=["q_proj"], save_projection=False)
    found = {r.tensor: r for r in look(llama, on_llama(llama, config)) if r.stage == "adapter"}
    assert {"vera_A", "vera_B"} <= set(found)
    assert (found["vera_A"].rule, found["vera_A"].diagnosis) == ("peer", "recomputed")
    assert (found["vera_lambda_b"].rule, found["vera_lambda_b"].status) == ("bitwise", "equal")


def test_wrapped_parameters_are_merged_under_their_own_name(tmp_path: Path, look: Look) -> None:
    sizes = {**SIZES, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    base = saved(transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes)), tmp_path / "mixtral")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    model = transformers.MixtralForCausalLM.from_pretrained(base)
    found = look(base, adapter_on(model, config, tmp_path / "adapter"))
    (experts,) = [r for r in found if r.stage == "merged" and r.tensor == "weight" and "experts" in r.layer]
    assert error_in_roundoffs(experts) < 16


# the forward pass


def test_a_model_that_does_not_run_on_the_inputs_is_skipped_with_its_words(llama: Path, look: Look) -> None:
    adapter = on_llama(llama, peft.PolyConfig(r=2, n_tasks=2, n_skills=2, target_modules=["q_proj"]))
    found = {r.tensor: r for r in look(llama, adapter) if r.stage == "forward"}
    assert found["adapter_on"].status == "skipped"
    assert "task_ids" in (found["adapter_on"].reason or "")
    (gradient,) = (r for r in look(llama, adapter, stages=("gradient",)))
    assert gradient.status == "skipped"
    assert "task_ids" in (gradient.reason or "")
    inputs = llama.parent / "inputs.safetensors"
    save_file({"input_ids": torch.zeros(1, 4, dtype=torch.int64)}, inputs)
    with pytest.raises(InputError, match="does not run on these inputs"):
        look(llama, adapter, inputs=str(inputs))
    with pytest.raises(InputError, match="does not run on these inputs"):
        look(llama, adapter, inputs=str(inputs), stages=("gradient",))


def test_gradients_come_before_the_merge_and_change_nothing(llama: Path, look: Look) -> None:
    adapter = on_llama(llama, peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    found = look(llama, adapter)
    gradients = {r.tensor: r for r in found if r.stage == "gradient"}
    vector = "lora_magnitude_vector"
    assert set(gradients) == {f"{t}.{what}" for t in ("lora_A", "lora_B", vector) for what in ("gradient", "updated")}
    assert {r.rule for r in gradients.values()} == {"relative", "bound"}
    assert {r.status for r in gradients.values()} == {"within"}
    without = {r.key: r.digest for r in look(llama, adapter, stages=("forward",))}
    assert {r.key: r.digest for r in found if r.stage == "forward"} == without


def test_a_tensor_that_nothing_depends_on_has_no_gradient(llama: Path, look: Look) -> None:
    adapter = on_llama(llama, peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    found = look(llama, adapter, stages=("gradient",))
    assert found
    assert {r.status for r in found} <= {"within", "skipped"}
    assert all(r.reason for r in found if r.status == "skipped")


def test_a_model_with_two_encoders_gets_both_inputs(tmp_path: Path, look: Look) -> None:
    sizes = {**SIZES, "max_position_embeddings": 32, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    config = transformers.CLIPConfig(text_config=sizes, vision_config={**SIZES, "image_size": 8, "patch_size": 4})
    found = look(saved(transformers.CLIPModel(config), tmp_path / "clip"), None)
    forward = {r.layer for r in found if r.stage == "forward"}
    assert "logits_per_image" in forward


def test_convolutions_take_float64_before_they_compare_dtypes() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 1), torch.nn.ConvTranspose2d(2, 1, 2))
    found = in_float64(model, torch.ones(1, 3, 8, 8))
    assert found.dtype == torch.float64
    assert torch.nn.functional.conv2d is torch.conv2d


# what a few numbers can tell


def test_rows_that_carry_no_error_are_no_draws() -> None:
    exact = torch.zeros(2, 4, 8, dtype=torch.float64)
    assert independent_rows(exact.float() + 1e-6, exact) == 8
    one = exact.float()
    one[1, 2] = 1e-6
    assert independent_rows(one, exact) == 1
    assert independent_rows(exact.float(), exact) == 8
    assert independent_rows(exact[0, 0].float() + 1, exact[0, 0]) == 8
    assert independent_rows(exact.float() + math.nan, exact) == 8


def relative(bits: str, error: float, own: float, dtype: str = "float32", shape: tuple[int, ...] = (2**14, 2)) -> Any:
    measure: TensorMeasure = measured(bound_ratio=None, max_abs=Real(error))
    return computed(
        bits, stage="merged", rule="relative", status="measured", measure=measure, diagnosis=None, dtype=dtype,
        shape=shape, reference_error=Real(own),
    )  # fmt: skip


def test_a_kernel_variant_is_not_excused_by_its_own_error(make_capture: MakeCapture) -> None:
    records = {"cpu": [relative("a", 1e-7, 1e-7)], "cpu@baseline": [relative("b", 1e-3, 1e-3)]}
    assert only_row(compared(make_capture("a", records)), "cpu@baseline").status == "outside"


def test_few_logits_may_be_off_by_more(make_capture: MakeCapture) -> None:
    records = {"cpu": [relative("a", 1e-7, 1e-7, shape=(4,))], "cuda:0": [relative("b", 9e-7, 1e-7, shape=(4,))]}
    assert only_row(compared(make_capture("a", records)), "cuda:0").status == "within"


@pytest.mark.parametrize(("dtype", "status"), [("float16", "skipped"), ("float32", "outside")])
def test_only_float16_may_overflow(make_capture: MakeCapture, dtype: str, status: str) -> None:
    records = {name: [relative(name, math.nan, math.nan, dtype=dtype)] for name in ("cpu", "cuda:0")}
    assert only_row(compared(make_capture("a", records)), "cuda:0").status == status


# a tolerance of the user's own


@pytest.mark.parametrize("config", [
    peft.LoraConfig(r=2, target_modules=["q_proj"]),
    peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True),
], ids=["lora", "dora"])  # fmt: skip
def test_a_tolerance_replaces_the_rule_where_a_float64_value_is_known(llama: Path, look: Look, config: Any) -> None:
    adapter = on_llama(llama, config)
    given = (Override(atol=0.0, rtol=0.0), Override(layer="*.q_proj", dtype="float32", atol=1e-4, rtol=0.0))
    found = [r for r in look(llama, adapter, tolerance=given) if r.stage in ("merged", "forward")]
    plain = {r.key: r for r in look(llama, adapter)}
    assert {r.key for r in found} == {key for key in plain if key[0] in ("merged", "forward")}
    for record in found:
        before = plain[record.key]
        if before.rule == "peer":  # the delta of DoRA has no closed form, whatever the user allows
            assert (record.rule, record.status, record.evidence) == (before.rule, before.status, before.evidence)
            continue
        assert before.rule == ("relative" if record.stage == "forward" or config.use_dora else "bound")
        assert (record.rule, record.digest) == ("user", before.digest)
        assert record.measure is not None
        assert before.measure is not None
        assert record.measure.max_abs == before.measure.max_abs
        if record.stage == "merged":
            assert record.evidence == {"tolerance": str(given[1])}
            assert float(record.measure.bound_ratio or 0) == pytest.approx(float(record.measure.max_abs) / 1e-4)
            assert record.status == "within"
        else:
            assert record.evidence == {"tolerance": str(given[0])}
            assert record.status == ("equal" if float(record.measure.max_abs) == 0 else "outside")
    assert ("peer" in {r.rule for r in found}) is bool(config.use_dora)


def test_a_tolerance_for_another_dtype_changes_nothing(llama: Path, look: Look) -> None:
    adapter = on_llama(llama, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    given = (Override(dtype="bfloat16", atol=0.0, rtol=0.0), Override(layer="*.v_proj", atol=0.0, rtol=0.0))
    found = look(llama, adapter, tolerance=given, stages=("merged",))
    assert {(r.rule, r.status) for r in found} == {("bound", "within")}
    assert not any(r.evidence for r in found)
