"""What a fault needs of a case, from headers alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from consistency.case.checkpoint import TensorHeader
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.case.stages import Stage
from consistency.worker.faults.catalogue import FAULTS, Need
from consistency.workflows.plantable import Subject, subject_of, why_not


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
    "base_config": {"architectures": ["LlamaForCausalLM"], "vocab_size": 512},
    "file_dtypes": frozenset({"F32"}),
}
NO_ADAPTER = {"has_adapter": False, "config": {}, "tensors": {}}
OF_IA3 = {"config": {"peft_type": "IA3", "target_modules": ["k_proj"]}, "tensors": IA3}


def reason(fault: str, **changed: Any) -> str:
    return why_not(FAULTS[fault], Subject(**{**HEALTHY, **changed}))


def test_every_fault_can_be_planted_in_the_built_in_case() -> None:
    subject = subject_of(prepare_case(Options()), workers=2)
    assert {fault.name: why for fault in FAULTS.values() if (why := why_not(fault, subject))} == {}


@pytest.mark.parametrize(
    ("fault", "changed", "why"),
    [
        ("merge-zeros", NO_ADAPTER, "the case has no adapter"),
        ("placed-elsewhere", NO_ADAPTER, "a case without an adapter has no lora_A in two layers"),
        ("adapter-zeros", OF_IA3, "an adapter of the method IA3 has no lora_B in two layers"),
        ("adapter-bit-flip-in-a", OF_IA3, "an adapter of the method IA3 has no lora_A in two layers"),
        ("gradient-zeros", OF_IA3, "an adapter of the method IA3 has no lora_B in two layers"),
        ("merge-off", OF_IA3, "an adapter of the method IA3 has no LoRA on a linear layer, whose merge it changes"),
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
            "forward-off", {"dtype": "float16"},
            "the base is loaded in float16, whose rounding is larger than this fault",
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
            "forward-fails", {"unchecked": {Stage.FORWARD: "a mixture of experts"}},
            "stage forward checks nothing of this case: a mixture of experts",
        ),
    ],
)  # fmt: skip
def test_what_does_not_apply_has_its_reason(fault: str, changed: dict[str, Any], why: str) -> None:
    assert reason(fault) == ""
    assert reason(fault, **changed) == why


def test_faults_of_any_method_apply_to_one_without_lora_b() -> None:
    for fault in ("adapter-bit-flip", "adapter-nan", "adapter-layers-swapped", "adapter-through-bfloat16", "killed"):
        assert reason(fault, **OF_IA3) == ""


def test_every_need_has_a_case_that_lacks_it() -> None:
    nothing = Subject(has_adapter=True, dtype="bfloat16", workers=1)
    lacking = {need for fault in FAULTS.values() for need in fault.needs
               if why_not(dataclasses.replace(fault, needs=(need,)), nothing)}  # fmt: skip
    assert lacking == set(Need)
