from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

from consistency.devices.backend import Backend, Variant
from consistency.devices.backends import BACKENDS
from consistency.devices.settings import SETTINGS, THREADS
from consistency.devices.spec import parse_device
from consistency.errors import UsageError
from consistency.worker import determinism
from consistency.worker.determinism import (
    changed,
    deterministic,
    restore,
    seed_all,
    switched,
)
from consistency.worker.environment import release

# what each setting is turned to behind our back
OTHER: dict[str, Any] = {
    "float32_matmul_precision": "high",
    "matmul_allow_tf32": True,
    "cudnn_allow_tf32": True,
    "fp32_precision": "tf32",
    "cuda_fp32_precision": "tf32",
    "cuda_matmul_fp32_precision": "tf32",
    "cudnn_conv_fp32_precision": "tf32",
    "cudnn_rnn_fp32_precision": "tf32",
    "mkldnn_matmul_fp32_precision": "bf16",
    "mkldnn_conv_fp32_precision": "bf16",
    "mkldnn_rnn_fp32_precision": "bf16",
    "nvidia_tf32_override": "1",
    "fp16_accumulation": True,
    "fp16_bf16_reduction_math_sdp": True,
    "rocm_fa_library": "ck",
    "fp16_reduced_precision_reduction": True,
    "bf16_reduced_precision_reduction": True,
    "cudnn_enabled": False,
    "cudnn_deterministic": False,
    "cudnn_benchmark": True,
    "deterministic_algorithms": "off",
    "cublas_workspace_config": ":16:8",
    "sdpa_math": False,
    "sdpa_flash": True,
    "sdpa_mem_efficient": True,
    "sdpa_cudnn": True,
    "threads": 2,
}

LACKED = {name for name in SETTINGS if not determinism._exists(name)}
"""What an older torch has no switch for: torch 2.8 none of a part's own precision of float32."""

HERE = [name for name in OTHER if name not in LACKED]
if release("torch") < (2, 9) and torch.version.hip is None:
    HERE.remove("rocm_fa_library")  # torch 2.8 refuses it in a build for CUDA; a later one takes it
needs_onednn_switches = pytest.mark.skipif(
    "mkldnn_matmul_fp32_precision" in LACKED, reason="torch 2.9 is the first with precisions of oneDNN's own"
)


def in_force() -> dict[str, Any]:
    """Return the value of every setting that this torch has."""
    return {name: value for name, value in determinism.in_force().items() if name not in LACKED}


def pinned() -> dict[str, Any]:
    """Return what is pinned of the settings that this torch has."""
    return {name: value for name, value in determinism.pinned().items() if name not in LACKED}


@pytest.fixture(autouse=True)
def _settings_as_they_were() -> Iterator[None]:
    before, environment = in_force(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    torch.set_num_threads(1)
    yield
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == environment
    torch.set_num_threads(before["threads"])
    assert in_force() == before


BACKENDS_OF_TORCH: Any = torch.backends  # whose newest parts have no types
NEWER: dict[str, Any] = {
    "fp32_precision": torch.backends,
    "cuda_fp32_precision": torch.backends.cudnn,
    "cuda_matmul_fp32_precision": torch.backends.cuda.matmul,
    "cudnn_conv_fp32_precision": getattr(BACKENDS_OF_TORCH.cudnn, "conv", None),
    "cudnn_rnn_fp32_precision": getattr(BACKENDS_OF_TORCH.cudnn, "rnn", None),
}
"""What has torch's newer switch of TF32."""


MOVED_TOGETHER = (
    {
        "float32_matmul_precision", "matmul_allow_tf32", "cuda_matmul_fp32_precision", "mkldnn_matmul_fp32_precision"
    },
    {"cudnn_allow_tf32", "cudnn_conv_fp32_precision", "cudnn_rnn_fp32_precision"},
    {"fp32_precision", "cuda_fp32_precision"},
)  # fmt: skip


def turn_by_hand(name: str) -> None:
    """Change a setting by torch's own function, as a library would."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    value = OTHER[name]
    if name == "float32_matmul_precision":
        torch.set_float32_matmul_precision(value)
    elif name == "matmul_allow_tf32":
        cuda.matmul.allow_tf32 = value
    elif name == "fp16_reduced_precision_reduction":
        cuda.matmul.allow_fp16_reduced_precision_reduction = value
    elif name == "bf16_reduced_precision_reduction":
        cuda.matmul.allow_bf16_reduced_precision_reduction = value
    elif name in NEWER:
        NEWER[name].fp32_precision = value
    elif name.startswith("mkldnn_"):
        getattr(torch.backends.mkldnn, name.split("_")[1]).fp32_precision = value
    elif name == "fp16_accumulation":
        cuda.matmul.allow_fp16_accumulation = value
    elif name == "fp16_bf16_reduction_math_sdp":
        cuda.allow_fp16_bf16_reduction_math_sdp(value)
    elif name == "rocm_fa_library":
        cuda.preferred_rocm_fa_library(value)
    elif name == "nvidia_tf32_override":
        os.environ["NVIDIA_TF32_OVERRIDE"] = value
    elif name == "deterministic_algorithms":
        torch.use_deterministic_algorithms(False)
    elif name == "cublas_workspace_config":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = value
    elif name == "threads":
        torch.set_num_threads(value)
    elif name.startswith("cudnn_"):
        setattr(cudnn, name.removeprefix("cudnn_"), value)
    else:
        getattr(cuda, f"enable_{name.removeprefix('sdpa_')}_sdp")(value)


def test_every_setting_is_pinned_and_in_force() -> None:
    with deterministic(threads=1) as asked:
        assert in_force() == asked
        assert asked == in_force() | pinned()
        assert changed(asked) == {}
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.get_float32_matmul_precision() == "highest"
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert not torch.backends.cudnn.allow_tf32
        assert not torch.backends.cuda.flash_sdp_enabled()


def test_the_list_of_settings_is_whole() -> None:
    not_in_a_cpu_build = {"blas_library", "linalg_library"}
    assert set(OTHER) | not_in_a_cpu_build == set(SETTINGS) | {THREADS} == set(determinism.in_force())
    assert set(SETTINGS) - set(determinism.pinned()) == not_in_a_cpu_build | {
        "rocm_fa_library", "fp32_precision", "cuda_fp32_precision"
    }  # fmt: skip


def test_every_setting_is_put_back_after_an_error() -> None:
    before = in_force()
    with pytest.raises(ZeroDivisionError), deterministic(threads=2):
        raise ZeroDivisionError
    assert in_force() == before


@pytest.mark.parametrize("name", [name for name in HERE if name != "matmul_allow_tf32"])
def test_settings_that_were_changed_before_are_put_back_too(name: str) -> None:
    plain = in_force()
    with deterministic(threads=1):
        turn_by_hand(name)
        before = in_force()
        with deterministic(threads=1) as asked:
            assert in_force() == asked == before | pinned() | {"threads": 1}
        assert in_force() == before
    assert in_force() == plain


@pytest.mark.parametrize("name", HERE)
def test_a_setting_that_is_flipped_in_mid_run_is_seen_and_restored(name: str) -> None:
    before = in_force()
    with deterministic(threads=1) as asked:
        turn_by_hand(name)
        seen = changed(asked)
        assert name in seen
        if name != "matmul_allow_tf32":  # set alone, torch calls its own precision unreadable
            assert seen[name] == OTHER[name]
            # torch moves some switches together, and refuses to tell of others what they contradict
            moved = next((group for group in MOVED_TOGETHER if name in group), set())
            assert set(seen) <= {name, "float32_matmul_precision"} | moved
        assert restore(asked) == seen
        assert changed(asked) == {}
        turn_by_hand(name)
    assert in_force() == before


def test_a_variant_s_settings_are_asked_for() -> None:
    variant = parse_device("cuda:0@tf32").numerical_variant()
    assert variant is not None
    overrides: dict[str, Any] = dict(variant.settings)
    before = in_force()
    with deterministic(threads=1, **overrides) as asked:
        moved = {name: "tf32" for name in pinned() if name.endswith("_fp32_precision")}
        for_onednn = {"mkldnn_conv_fp32_precision", "mkldnn_rnn_fp32_precision"} - LACKED
        moved |= dict.fromkeys(for_onednn, "ieee")
        assert asked.items() >= (pinned() | moved | overrides).items()
        assert changed(asked) == {}
        assert torch.backends.cuda.matmul.allow_tf32
    assert in_force() == before


VARIANTS = [(kind, variant) for kind, backend in BACKENDS.items() for variant in backend.variants]
VARIANTS += [("fpga", variant) for variant in Backend(type="fpga").variants]


@pytest.mark.parametrize(("kind", "variant"), VARIANTS, ids=lambda given: getattr(given, "name", given))
def test_every_variant_can_be_set_or_this_torch_says_why_not(kind: str, variant: Variant) -> None:
    assert set(variant.settings) <= set(SETTINGS), f"{kind}@{variant.name} sets what no --set could name"
    before = in_force()
    settings: dict[str, Any] = dict(variant.settings)
    if {"cublaslt", "magma"} & set(settings.values()) and not torch.backends.cuda.is_built():
        with pytest.raises(UsageError, match="this torch cannot set") as refused, deterministic(**settings):
            pytest.fail("was entered")
        assert "has not been compiled with" in str(refused.value.hint)
    else:
        with deterministic(threads=1, **settings) as asked:
            assert in_force().items() >= settings.items()
            assert changed(asked) == {}
    assert in_force() == before


@pytest.mark.parametrize("name", [name for name in HERE if name != "threads"])
def test_a_setting_that_is_chosen_is_in_force_on_both_profiles_and_put_back(name: str) -> None:
    before, value = in_force(), OTHER[name]
    for pins in (True, False):
        with deterministic(pins=pins, **{name: value}) as asked:
            assert asked[name] == value == in_force()[name]
            assert changed(asked) == {}
        assert in_force() == before


def test_a_profile_that_pins_nothing_changes_and_asks_for_nothing() -> None:
    torch.backends.cudnn.benchmark = True
    before = in_force()
    with deterministic(threads=2, pins=False) as asked:
        assert asked == {}
        assert in_force() == before
        torch.backends.cudnn.benchmark = False
        assert restore(asked) == {}
        assert not torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False


@needs_onednn_switches
def test_settings_are_switched_for_a_while() -> None:
    before = in_force()
    with switched(float32_matmul_precision="medium"):
        assert in_force()["mkldnn_matmul_fp32_precision"] == "bf16"
    assert in_force() == before


@needs_onednn_switches
def test_a_torch_without_a_setting_pins_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.8 has no precision of oneDNN's products."""
    with monkeypatch.context() as patch:
        patch.setitem(determinism._ACCESS, "mkldnn_matmul_fp32_precision", determinism._attribute("backends.no", "no"))
        before = in_force()
        assert before["mkldnn_matmul_fp32_precision"].startswith("unreadable: ")
        with deterministic(threads=1, float32_matmul_precision="highest") as asked:
            assert changed(asked) == {}
            assert "mkldnn_conv_fp32_precision" in asked
        with (
            pytest.raises(UsageError, match="this torch cannot set mkldnn_matmul_fp32_precision"),
            deterministic(mkldnn_matmul_fp32_precision="ieee"),
        ):
            pytest.fail("was entered")
        assert in_force() == before


@pytest.mark.slow
@pytest.mark.process
def test_products_of_the_cpu_are_pinned_whatever_a_library_set_before() -> None:
    """A global switch of torch reaches oneDNN's convolutions, which the matmul precision does not."""
    script = """
import torch
from consistency.worker.determinism import deterministic
torch.set_num_threads(1)
torch.backends.fp32_precision = "bf16"
x, w = torch.rand(2, 64, 32, 32), torch.rand(24, 64, 3, 3)
exact = torch.nn.functional.conv2d(x.double(), w.double())
def error(): return float(((torch.nn.functional.conv2d(x, w) - exact).abs() / exact).max())
left, native = error(), torch.ops.mkldnn._is_mkldnn_bf16_supported() and torch.cpu._is_amx_tile_supported()
assert left > 1e-5 or not native, left
with deterministic(threads=1):
    assert error() < 1e-5, error()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_an_unknown_setting_is_refused_before_anything_is_changed() -> None:
    before = in_force()
    with pytest.raises(TypeError, match="unknown settings: cudnn_fast, speed"), deterministic(speed=1, cudnn_fast=True):
        pytest.fail("was entered")
    assert in_force() == before


def test_threads_stay_where_none_are_asked_for() -> None:
    torch.set_num_threads(2)
    with deterministic() as asked:
        assert asked["threads"] == torch.get_num_threads() == 2
    with deterministic(threads=1) as asked:
        assert asked["threads"] == torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


def test_settings_that_nobody_asked_about_are_no_change() -> None:
    assert changed({"threads": 1, "no_such_setting": 7}) == {}


# --- generators -----------------------------------------------------------------------------------------------------


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(1))  # noqa: NPY002 - the global generator


def test_every_generator_is_seeded() -> None:
    with deterministic():
        first = draw()
    draw()
    with deterministic():
        assert draw() == first
        seed_all()
        assert draw() == first
    with deterministic(seed=1):
        other = draw()
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_the_seed_is_none_that_models_and_inputs_are_drawn_from() -> None:
    with deterministic():
        drawn = torch.randn(8)
    for habitual in (*range(1000), 1234, 1337, 2024, 2025, 2026, 3407, 12345):
        assert not torch.equal(drawn, torch.randn(8, generator=torch.Generator().manual_seed(habitual)))


@pytest.mark.parametrize("fails", [False, True])
def test_the_state_of_every_generator_is_put_back(fails: bool) -> None:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    expected = draw()
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])
    with suppress(ZeroDivisionError), deterministic(seed=5):
        draw()
        _ = 1 // (not fails)
    assert draw() == expected


# --- torch's two ways to say TF32 -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.process
def test_a_process_that_mixed_torch_s_old_and_new_switches_is_put_back_as_far_as_it_can_be() -> None:
    # torch then refuses to read some of its own settings; in a process of its own, for this cannot be undone
    script = """
import torch
from consistency.worker.determinism import changed, deterministic, in_force
torch.set_num_threads(1)
torch.backends.fp32_precision = "tf32"
before = in_force()
assert any(str(value).startswith("unreadable") for value in before.values()), before
with deterministic(threads=2) as asked:
    assert changed(asked) == {}, changed(asked)
    assert asked["fp32_precision"] == "tf32", "it is the user's, and reaches nothing"
    assert not torch._C._get_cudnn_allow_tf32() and not torch._C._get_cublas_allow_tf32()
readable = {name: value for name, value in before.items() if not str(value).startswith("unreadable")}
assert changed(readable) == {}, changed(readable)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.process
def test_a_newer_switch_that_is_set_in_mid_run_leaves_torch_able_to_read_its_older_ones() -> None:
    """Every product and every convolution on a GPU reads them, and raises where both contradict each other."""
    script = f"""
import os
import torch
from tests.worker.test_determinism import turn_by_hand
from consistency.worker.determinism import changed, deterministic, in_force, restore
for name in {[*NEWER]!r}:  # each in a process that has imported torch and set nothing
    child = os.fork()
    if child == 0:
        break
    assert os.waitpid(child, 0)[1] == 0, name
else:
    raise SystemExit
torch.set_num_threads(1)
before = in_force()
with deterministic(threads=1) as asked:
    turn_by_hand(name)
    assert name in restore(asked)
    assert changed(asked) == {{}}, changed(asked)
    assert torch._C._get_cublas_allow_tf32() is False
    assert torch._C._get_cudnn_allow_tf32() is False
    torch.nn.functional.conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 2, 2))
assert in_force() == before | {{"threads": 1}}, {{n: (v, before[n]) for n, v in in_force().items() if v != before[n]}}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["blas_library", "linalg_library", "rocm_fa_library"])
def test_the_library_that_torch_chooses_is_the_one_that_was_asked_for(name: str) -> None:
    """torch reads back `cublas` where `default` was set: that is no setting that was refused."""
    chosen: dict[str, Any] = {name: "default"}
    with determinism.deterministic(**chosen) as asked:
        assert determinism.changed(asked) == {}
        assert asked[name] == determinism.in_force()[name]
