"""What a fault needs of a case, from headers alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from consistency.case import standard
from consistency.case.checkpoint import TensorHeader
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.comparison.result import Comparison, Outcome, TensorComparison
from consistency.extras.diagnosis.drill.plantable import Subject, expected_in, subject_of, why_not
from consistency.extras.training.tensor_parallel.spec import TENSOR_PARALLEL
from consistency.worker.faults.catalogue import FAULTS
from consistency.worker.faults.fault import Need


def headers(*names: str, shape: tuple[int, ...] = (8, 64), dtype: str = "F32") -> dict[str, TensorHeader]:
    return {
        f"base_model.model.{name}": TensorHeader(name=name, shape=shape, dtype=dtype, file=Path("f")) for name in names
    }


LORA = headers(*(f"layers.{n}.q_proj.lora_{part}.weight" for n in (0, 1) for part in "AB"))
IA3 = headers("layers.0.k_proj.ia3_l", "layers.1.k_proj.ia3_l")
HEALTHY: dict[str, Any] = {
    "has_adapter": True,
    "dtype": "float32",
    "workers": 2,
    "config": {"peft_type": "LORA", "target_modules": ["q_proj"]},
    "tensors": LORA,
    "base_config": {"architectures": ["LlamaForCausalLM"], "vocab_size": 512, "rope_theta": 1e4, "n_head": 4},
    "file_dtypes": frozenset({"F32"}),
}
NO_ADAPTER = {"has_adapter": False, "config": {}, "tensors": {}}
OF_IA3 = {"config": {"peft_type": "IA3", "target_modules": ["k_proj"]}, "tensors": IA3}


def reason(fault: str, **changed: Any) -> str:
    return why_not(FAULTS[fault], Subject(**{**HEALTHY, **changed}))


def test_every_fault_can_be_planted_in_the_built_in_case() -> None:
    subject = subject_of(prepare_case(Options()), workers=3, ranks=3)
    lacking = {fault.name: why for fault in FAULTS.values() if (why := why_not(fault, subject))}
    of_quantized = [fault.name for fault in FAULTS.values() if Need.QUANTIZED in fault.needs]
    assert lacking == dict.fromkeys(of_quantized, "the base is not quantized")


@pytest.mark.parametrize(
    ("fault", "changed", "why"),
    [
        ("merge-zeros", NO_ADAPTER, "the case has no adapter"),
        ("placed-elsewhere", NO_ADAPTER, "the case has no adapter"),
        ("adapter-bit-flip-in-a", OF_IA3, "an adapter of the method IA3 has no lora_A in two layers"),
        (
            "gradient-zeros", {"tensors": headers(*(f"layers.{n}.q_proj.lora_B.weight" for n in (1, 2)))},
            "the adapter has no lora_B in a layer of number 0",
        ),
        ("merge-in-tf32", OF_IA3, "an adapter of the method IA3 has no LoRA on a linear layer, whose merge it changes"),
        (
            "merge-off", {**OF_IA3, "dtype": "bfloat16"},
            "the base is loaded in bfloat16, whose rounding is larger than this fault",
        ),
        (
            "unmerge-off", {"judged": frozenset({"adapters::disable_adapter.results of one"})},
            "without a fault, nothing is checked in this case that would show it",
        ),
        (  # a row of another stage with that name shows nothing of it
            "unmerge-off", {"judged": frozenset({"replicas::model.drift"})},
            "without a fault, nothing is checked in this case that would show it",
        ),
        (
            "adapter-missing-key", {"config": {"peft_type": "LORA", "init_lora_weights": "pissa"}},
            "with init_lora_weights=pissa lora_B does not start at zero",
        ),
        (
            "adapter-through-tf32", {"tensors": headers("layers.0.lora_A.weight", dtype="BF16")},
            "the adapter's file holds BF16: the rounding would change nothing",
        ),
        (
            "base-through-bfloat16", {"file_dtypes": frozenset({"BF16"})},
            "the base's files hold BF16: the rounding would change nothing",
        ),
        (
            "base-through-bfloat16", {"dtype": "float16"},
            "the base is loaded in float16, whose rounding is larger than this fault",
        ),
        ("split-part-of-another", {"ranks": 2, "splits": False}, "the plan splits no tensor of the adapter"),
        (
            "split-scaled-by-ranks", {"ranks": 2, "unchecked": {TENSOR_PARALLEL: "the model has no `tp_plan`"}},
            "stage tensor-parallel checks nothing of this case: the model has no `tp_plan`",
        ),
        ("forward-fails", {"workers": 1}, "one device only: nothing to compare it with"),
        ("base-bit-flip", {"base_config": {}}, "a function makes the base, not a weight file"),
        ("adapter-layers-swapped", {"tensors": headers("only")}, "no two tensors of the adapter have the same shape"),
        ("adapter-inactive", {"tensors": headers("prompt")}, "an adapter of the method LORA changes no layer"),
        (
            "ids-past-vocabulary", {"base_config": {"architectures": ["ViTForImageClassification"]}},
            "the base answers no token ids with token ids",
        ),
        (
            "padding-counted", {"base_config": {"is_encoder_decoder": True, "max_position_embeddings": 512}},
            "`generate` gives this base no positions of the tokens",
        ),
        (  # Mamba
            "cache-key-not-written", {"base_config": {"num_heads": 8, "state_size": 16}},
            "the base keeps no keys of its tokens",
        ),
        (  # Bloom
            "padding-counted", {"base_config": {"vocab_size": 512}},
            "`generate` gives this base no positions of the tokens",
        ),
        (
            "forward-fails", {"unchecked": {standard.FORWARD: "a mixture of experts"}},
            "stage forward checks nothing of this case: a mixture of experts",
        ),
    ],
)  # fmt: skip
def test_what_does_not_apply_has_its_reason(fault: str, changed: dict[str, Any], why: str) -> None:
    assert reason(fault, ranks=3) == ""
    assert reason(fault, **changed) == why


def test_faults_of_any_method_apply_to_one_without_lora_b() -> None:
    for fault in (
        "adapter-bit-flip", "adapter-nan", "adapter-layers-swapped", "adapter-through-bfloat16", "adapter-zeros",
        "adapter-left-after-delete", "gradient-zeros", "merge-bit-flip", "merge-off", "placed-elsewhere", "killed",
    ):  # fmt: skip
        assert reason(fault, **OF_IA3) == ""


def test_a_merge_without_a_closed_form_has_no_word_for_what_is_wrong() -> None:
    known, unknown = (Subject(**{**HEALTHY, "has_form": has_form}) for has_form in (True, False))
    assert [expected_in(FAULTS["merge-zeros"], subject) for subject in (known, unknown)] == ["zeros", "differs"]
    assert [expected_in(FAULTS["merge-fails"], subject) for subject in (known, unknown)] == ["missing", "missing"]


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        (
            {"status": "skipped", "reason": "the model has no `tp_plan`"},
            "stage tensor-parallel checks nothing of this case: the model has no `tp_plan`",
        ),
        ({"status": "within", "evidence": {}}, "the plan splits no tensor of the adapter"),
        ({"status": "within", "evidence": {"split": 1}}, ""),
    ],
)
def test_a_run_without_a_fault_says_what_the_plan_splits(outcome: dict[str, Any], why: str) -> None:
    row = TensorComparison(
        stage=TENSOR_PARALLEL, load_path="isolated", layer="model.layers.0.q_proj", tensor="weight", shape=(2, 2),
        dtype="float32", rule="bitwise", classes=(), outcomes=(Outcome(workers=("cpu",), reference=None, **outcome),),
    )  # fmt: skip
    healthy = Comparison(
        case="x", dtype="float32", level="quick", load_paths=("isolated",), verdict="consistent", reference="cpu",
        workers=(), architectures=(), tensors=(row,), findings=(),
    )  # fmt: skip
    case = msgspec.structs.replace(prepare_case(Options()), stages=(TENSOR_PARALLEL,))
    subject = subject_of(case, workers=2, ranks=2, healthy=healthy)
    assert why_not(FAULTS["split-part-of-another"], subject) == why


def test_every_need_has_a_case_that_lacks_it() -> None:
    nothing = [Subject(has_adapter=has_adapter, dtype="bfloat16", workers=1) for has_adapter in (True, False)]
    nothing.append(Subject(has_adapter=True, dtype="float32", workers=2, judged=frozenset()))
    nothing.append(Subject(**{**HEALTHY, "base_config": {"quantization_config": {"load_in_4bit": True}}}))
    lacking = {need for fault in FAULTS.values() for need in fault.needs for subject in nothing
               if why_not(dataclasses.replace(fault, needs=(need,), stages=(standard.MEMORY,)), subject)}  # fmt: skip
    assert lacking == set(Need)
