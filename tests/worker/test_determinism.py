from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from consistency.devices.spec import parse_device
from consistency.worker.determinism import (
    changed,
    deterministic,
    in_force,
    pinned,
    restore,
    seed_all,
)

# what each setting is turned to behind our back
OTHER: dict[str, Any] = {
    "float32_matmul_precision": "high",
    "matmul_allow_tf32": True,
    "cudnn_allow_tf32": True,
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


@pytest.fixture(autouse=True)
def _settings_as_they_were() -> Iterator[None]:
    before, environment = in_force(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    torch.set_num_threads(1)
    yield
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == environment
    torch.set_num_threads(before["threads"])
    assert in_force() == before


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
        assert in_force() == asked == pinned()
        assert changed(asked) == {}
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.get_float32_matmul_precision() == "highest"
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert not torch.backends.cudnn.allow_tf32
        assert not torch.backends.cuda.flash_sdp_enabled()


def test_the_list_of_settings_is_whole() -> None:
    assert set(OTHER) == set(pinned()) == set(in_force())


def test_every_setting_is_put_back() -> None:
    before = in_force()
    with deterministic(threads=2):
        assert in_force() != before
    assert in_force() == before


def test_every_setting_is_put_back_after_an_error() -> None:
    before = in_force()
    with pytest.raises(ZeroDivisionError), deterministic(threads=2):
        raise ZeroDivisionError
    assert in_force() == before


@pytest.mark.parametrize("name", [name for name in OTHER if name != "matmul_allow_tf32"])
def test_settings_that_were_changed_before_are_put_back_too(name: str) -> None:
    plain = in_force()
    with deterministic(threads=1):
        turn_by_hand(name)
        before = in_force()
        with deterministic(threads=1):
            assert in_force() == pinned()
        assert in_force() == before
    assert in_force() == plain


@pytest.mark.parametrize("name", OTHER)
def test_a_setting_that_is_flipped_in_mid_run_is_seen_and_restored(name: str) -> None:
    before = in_force()
    with deterministic(threads=1) as asked:
        turn_by_hand(name)
        seen = changed(asked)
        assert name in seen
        if name != "matmul_allow_tf32":  # set alone, torch calls its own precision unreadable
            assert seen[name] == OTHER[name]
            assert set(seen) <= {name, "matmul_allow_tf32"}  # the precision moves that switch with it
        assert restore(asked) == seen
        assert changed(asked) == {}
        turn_by_hand(name)
    assert in_force() == before


@pytest.mark.parametrize("value", [None, ":16:8"])
def test_the_workspace_of_cublas_is_put_back_whether_it_was_set_or_not(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        if value is None:
            patch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        else:
            patch.setenv("CUBLAS_WORKSPACE_CONFIG", value)
        with deterministic():
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == value


def test_a_variant_s_settings_are_asked_for() -> None:
    variant = parse_device("cuda:0@tf32").numerical_variant()
    assert variant is not None
    overrides: dict[str, Any] = dict(variant.settings)
    before = in_force()
    with deterministic(threads=1, **overrides) as asked:
        assert asked == pinned() | overrides
        assert changed(asked) == {}
        assert torch.backends.cuda.matmul.allow_tf32
    assert in_force() == before


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


def test_the_state_of_every_generator_is_put_back() -> None:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    expected = draw()
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])
    with deterministic(seed=5):
        draw()
    assert draw() == expected


def test_the_state_of_every_generator_is_put_back_after_an_error() -> None:
    expected = torch.get_rng_state(), random.getstate()
    with pytest.raises(ZeroDivisionError), deterministic():
        int(draw()[0]) // 0
    assert torch.equal(torch.get_rng_state(), expected[0])
    assert random.getstate() == expected[1]


# --- torch's two ways to say TF32 -----------------------------------------------------------------------------------


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
    assert set(changed(asked)) <= {"cudnn_allow_tf32"}, changed(asked)
readable = {name: value for name, value in before.items() if not str(value).startswith("unreadable")}
assert changed(readable) == {}, changed(readable)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
