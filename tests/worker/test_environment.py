"""What decides the bits of a worker, besides the model of its device."""

from __future__ import annotations

from typing import Any

import pytest

from consistency.worker.environment import kernel_key

FACTS: dict[str, Any] = {
    "torch": "2.13.0",
    "cpu_capability": "AVX512",
    "threads": 3,
    "hip": "7.2",
    "device_name": "chip",
    "digest_kernel": "fused",
    "compiled_kernel": "compiled: avx2",
}
SETTINGS = {"threads": 3, "sdpa_math": True}


@pytest.mark.parametrize(
    ("kind", "fact", "value", "counts"),
    [
        ("cuda", "threads", 4, False),
        ("cuda", "cpu_capability", "DEFAULT", False),
        ("cuda", "hip", "7.0", True),
        ("cuda", "device_name", "other", True),
        ("cuda", "digest_kernel", "plain: no compiler", False),
        ("cpu", "compiled_kernel", "numpy: no", False),
        ("npu", "threads", 4, False),
        ("cpu", "threads", 4, True),
        ("cpu", "cpu_capability", "DEFAULT", True),
        ("xla", "threads", 4, True),  # its devices may be the processor
    ],
)
def test_the_host_s_processor_is_no_part_of_what_an_accelerator_runs(
    kind: str, fact: str, value: object, counts: bool
) -> None:
    usual = kernel_key(kind, FACTS, SETTINGS)
    assert (kernel_key(kind, {**FACTS, fact: value}, SETTINGS) != usual) is counts


@pytest.mark.parametrize(("kind", "counts"), [("cuda", False), ("cpu", True)])
def test_threads_in_force_count_where_the_processor_computes(kind: str, counts: bool) -> None:
    assert (kernel_key(kind, FACTS, {**SETTINGS, "threads": 4}) != kernel_key(kind, FACTS, SETTINGS)) is counts
    assert kernel_key(kind, FACTS, {**SETTINGS, "sdpa_math": False}) != kernel_key(kind, FACTS, SETTINGS)


@pytest.mark.parametrize(
    ("kind", "name", "counts"),
    [
        ("cuda", "CUBLAS_EMULATE_SINGLE_PRECISION", True),
        ("cuda", "ROCBLAS_INTERNAL_FP16_ALT_IMPL", True),
        ("cpu", "ROCBLAS_INTERNAL_FP16_ALT_IMPL", False),
        ("cuda", "PYTORCH_ALLOC_CONF", False),
    ],
)
def test_variables_that_choose_kernels_count(kind: str, name: str, counts: bool) -> None:
    usual = kernel_key(kind, FACTS, SETTINGS)
    assert (kernel_key(kind, {**FACTS, "variables": {name: "1"}}, SETTINGS) != usual) is counts
