from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.devices.backends import BACKENDS, kernel_variables
from consistency.devices.discovery import cpu_variants
from consistency.devices.spec import (
    DeviceSpec,
    WorkerLabel,
    label_of,
    parse_device,
    parse_devices,
)
from consistency.devices.vendors import nvidia_architecture
from consistency.errors import UsageError

AVX512 = frozenset({"avx512f", "avx512dq", "avx512bw", "avx512vl"})


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("cpu", DeviceSpec(type="cpu")),
        ("cpu@avx2", DeviceSpec(type="cpu", variant="avx2")),
        ("cpu@baseline", DeviceSpec(type="cpu", variant="baseline")),
        ("cuda:0", DeviceSpec(type="cuda", index=0)),
        ("cuda:12@tf32", DeviceSpec(type="cuda", index=12, variant="tf32")),
        ("cuda", DeviceSpec(type="cuda", index=0)),
        ("cuda@tf32", DeviceSpec(type="cuda", index=0, variant="tf32")),
        ("mps", DeviceSpec(type="mps", index=0)),
        ("xpu:1", DeviceSpec(type="xpu", index=1)),
        ("  npu:3 ", DeviceSpec(type="npu", index=3)),
        ("cuda:007", DeviceSpec(type="cuda", index=7)),
    ],
)
def test_a_spec_is_read(text: str, spec: DeviceSpec) -> None:
    assert parse_device(text) == spec


@given(kind=st.sampled_from(["cuda", "xpu", "npu"]), index=st.integers(0, 9999), tf32=st.booleans())
@settings(deadline=None)
def test_a_name_is_read_back(kind: str, index: int, tf32: bool) -> None:
    spec = DeviceSpec(type=kind, index=index, variant="tf32" if tf32 and kind == "cuda" else None)
    assert parse_device(spec.name) == spec


@pytest.mark.parametrize(
    ("name", "capture", "kind", "index"),
    [
        ("cpu", "", "cpu", None),
        ("cpu@avx2", "", "cpu", None),
        ("cuda:0@tf32", "", "cuda", 0),
        ("gaudi_3:12", "", "gaudi_3", 12),
        ("node-7:cuda:1", "node-7", "cuda", 1),
        ("a:b:xpu2:1", "a:b", "xpu2", 1),
        ("rack\n1:cpu@baseline", "rack\n1", "cpu", None),
    ],
)
def test_a_workers_name_says_its_capture_and_its_device(name: str, capture: str, kind: str, index: int | None) -> None:
    assert label_of(name) == WorkerLabel(capture, kind, index)


def test_what_is_no_workers_name_says_nothing() -> None:
    assert label_of("vLLM 0.11") is None


@pytest.mark.parametrize(
    "text",
    ["", "CUDA:0", "cuda:", "cuda:-1", "cuda:0:1", "cuda 0", "cuda:0@", "@tf32", "0", "cuda:12345", "cuda\n:0"],
)
def test_what_is_no_device_is_refused_with_the_text_and_the_form(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_device(text)
    assert repr(text) in caught.value.what
    assert caught.value.wanted == "type[:index][@variant], such as cpu, cuda:0, cpu@avx2"
    assert caught.value.where == "--devices"


def test_the_cpu_has_no_index() -> None:
    with pytest.raises(UsageError, match="cpu has no index: 'cpu:0'") as caught:
        parse_device("cpu:0")
    assert caught.value.wanted == "cpu"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("cpu@tf32", "one of baseline, avx2, avx512"),
        ("cpu@avx", "one of baseline, avx2, avx512"),
        ("cuda:0@avx2", "one of " + ", ".join(v.name for v in BACKENDS["cuda"].variants)),
        ("xpu:0@tf32", "one of high, medium, math, flash, mem_efficient, sdpa"),
    ],
)
def test_an_unknown_variant_is_refused_with_those_that_there_are(text: str, wanted: str) -> None:
    with pytest.raises(UsageError, match="unknown variant of") as caught:
        parse_device(text)
    assert caught.value.wanted == wanted
    assert (caught.value.where, caught.value.got) == ("--devices", text)


def test_a_list_keeps_its_order_and_loses_duplicates() -> None:
    assert parse_devices("cpu, cuda:1,,cuda,cuda:0 , auto,cpu") == ("cpu", "cuda:1", "cuda:0", "auto")
    assert parse_devices(["cuda", "cpu@avx2"]) == ("cuda:0", "cpu@avx2")


@pytest.mark.parametrize("text", ["", " , ,", []])
def test_an_empty_list_is_refused(text: str | list[str]) -> None:
    with pytest.raises(UsageError, match="no device given"):
        parse_devices(text)


def test_one_bad_device_spoils_the_list() -> None:
    with pytest.raises(UsageError, match="not a device: 'gpu!'"):
        parse_devices("cpu,gpu!")


def test_a_variant_is_of_variables_or_of_settings() -> None:
    for name in ("baseline", "avx2"):
        variant = parse_device(f"cpu@{name}").numerical_variant()
        assert variant is not None
        assert set(variant.environment) == {"ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA"}
        assert variant.settings == {}
        assert variant.architecture
    assert parse_device("cpu").numerical_variant() is None
    native = parse_device("cpu@avx512").numerical_variant()
    assert native is not None
    assert (dict(native.environment), native.architecture) == ({}, "AVX-512")
    variant = parse_device("cuda:0@tf32").numerical_variant()
    assert variant is not None
    assert dict(variant.environment) == {}
    assert variant.settings["matmul_allow_tf32"] is True
    assert variant.settings["cudnn_allow_tf32"] is True


def test_variables_of_a_variant_and_those_that_lower_precision_are_removed_from_other_workers() -> None:
    assert kernel_variables() >= {
        "ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA",
        "NVIDIA_TF32_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (frozenset(), []),
        (frozenset({"sse4_1"}), ["baseline"]),
        (frozenset({"sse4_1", "avx2"}), ["baseline"]),
        (frozenset({"sse4_1", "avx2", "fma"}), ["baseline", "avx2"]),
        (frozenset({"sse4_1", "avx2", "fma", "avx512f"}), ["baseline", "avx2"]),
        (frozenset({"sse4_1", "avx2", "fma"}) | AVX512, ["baseline", "avx2", "avx512"]),
        (frozenset({"neon", "asimd", "fp"}), []),
    ],
)
def test_a_processor_runs_the_variants_that_its_flags_allow(flags: frozenset[str], names: list[str]) -> None:
    assert [variant.name for variant in cpu_variants(flags)] == names


@pytest.mark.parametrize("missing", sorted(AVX512))
def test_avx512_needs_all_four_sets(missing: str) -> None:
    flags = frozenset({"sse4_1", "avx2", "fma"}) | AVX512 - {missing}
    assert "avx512" not in [variant.name for variant in cpu_variants(flags)]


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((7, 0), "Volta sm_70"),
        ((7, 5), "Turing sm_75"),
        ((8, 0), "Ampere sm_80"),
        ((8, 6), "Ampere sm_86"),
        ((8, 9), "Ada Lovelace sm_89"),
        ((9, 0), "Hopper sm_90"),
        ((12, 0), "Blackwell sm_120"),
        ((99, 9), "NVIDIA sm_999"),
    ],
)
def test_an_nvidia_architecture_is_named_by_its_capability(capability: tuple[int, int], name: str) -> None:
    assert nvidia_architecture(capability) == name


@pytest.mark.process
def test_devices_are_known_without_torch() -> None:
    modules = "consistency.devices.spec, consistency.case.options, consistency.capture.names"
    script = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
