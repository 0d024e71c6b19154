"""Values of settings as a user writes them, without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from consistency.devices.settings import AS_FOUND, SETTINGS, SettingSpec, parse_setting, with_implied
from consistency.errors import UsageError


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("cudnn_enabled", "false", False),
        ("cudnn-enabled", " ON ", True),
        ("CUDNN_BENCHMARK", "1", True),
        ("sdpa_flash", True, True),
        ("sdpa_flash", "no", False),
        ("float32_matmul_precision", "Medium", "medium"),
        ("mkldnn_conv_fp32_precision", "none", "none"),
        ("deterministic_algorithms", "off", "off"),
        ("cublas_workspace_config", ":16:8", ":16:8"),
        ("cublas_workspace_config", "none", None),
        ("nvidia_tf32_override", 1, "1"),
        ("nvidia_tf32_override", "none", None),
        ("blas_library", "cublasLt", "cublaslt"),
    ],
)
def test_a_value_has_its_setting_s_type(name: str, given: object, value: object) -> None:
    found, parsed = parse_setting(name, given, where="--set")
    assert found in SETTINGS
    assert (type(parsed), parsed) == (type(value), value)


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("cudnn_enabled", "maybe", "true or false"),
        ("cudnn_enabled", None, "true or false"),
        ("float32_matmul_precision", "low", "one of highest, high, medium"),
        ("cublas_workspace_config", "4096", ":4096:8, :16:8 or none"),
        ("nvidia_tf32_override", "2", "0, 1 or none"),
        ("mkldnn_conv_fp32_precision", "", "one of none, ieee, tf32, bf16"),
    ],
)
def test_a_value_that_a_setting_does_not_take_is_refused(name: str, given: object, wanted: str) -> None:
    with pytest.raises(UsageError, match=f"{name} takes no such value") as caught:
        parse_setting(name, given, where="--set")
    assert caught.value.wanted == wanted


def test_an_unknown_setting_is_refused_with_all_that_there_are_and_the_closest() -> None:
    with pytest.raises(UsageError, match="unknown setting: cudn_enabled") as caught:
        parse_setting("cudn_enabled", "1", where="--set")
    assert caught.value.hint == "did you mean cudnn_enabled?"
    assert caught.value.wanted == "one of " + ", ".join(SETTINGS)
    with pytest.raises(UsageError) as caught:
        parse_setting("zzz", "1", where="--set")
    assert caught.value.hint is None


def test_threads_have_an_option_of_their_own() -> None:
    with pytest.raises(UsageError, match="an option of their own") as caught:
        parse_setting("threads", "4", where="--set")
    assert caught.value.wanted == "--threads 4"


@pytest.mark.parametrize("spec", SETTINGS.values(), ids=lambda spec: spec.name)
def test_the_pinned_value_is_one_that_the_setting_takes(spec: SettingSpec) -> None:
    if spec.pinned != AS_FOUND:
        text = "none" if spec.pinned is None else str(spec.pinned)
        assert spec.parse(text, where="") == spec.pinned


def test_switches_that_torch_moves_together_are_chosen_together_unless_chosen_apart() -> None:
    assert with_implied({"float32_matmul_precision": "medium"}) == {
        "float32_matmul_precision": "medium", "matmul_allow_tf32": True, "cuda_matmul_fp32_precision": "tf32",
        "mkldnn_matmul_fp32_precision": "bf16",
    }  # fmt: skip
    apart = {"float32_matmul_precision": "medium", "mkldnn_matmul_fp32_precision": "ieee"}
    assert with_implied(apart) == apart | {"matmul_allow_tf32": True, "cuda_matmul_fp32_precision": "tf32"}
    assert with_implied({"cudnn_enabled": False}) == {"cudnn_enabled": False}


@pytest.mark.process
def test_settings_are_known_without_torch() -> None:
    script = "import sys, consistency.case.profile, consistency.devices.products; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
