"""What a worker's process is given before it starts."""

from __future__ import annotations

import os
from typing import Any

import pytest

from consistency.case.case import Case
from consistency.case.load_path import LoadPath
from consistency.devices import cores as devices_cores
from consistency.devices.backends import kernel_variables, recorded_variables
from consistency.devices.spec import DeviceInfo, parse_device
from consistency.launch import environment
from consistency.launch.environment import shared_out, torch_device, worker_environment, worker_threads
from consistency.launch.plan import plan_waves


def device(name: str, **fields: Any) -> DeviceInfo:
    return DeviceInfo(spec=parse_device(name), architecture="a", model="m", **fields)


def test_kernel_variables_of_the_user_do_not_reach_a_native_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in kernel_variables():
        monkeypatch.setenv(name, "user")
    native = worker_environment(device("cpu"), LoadPath.ISOLATED, threads=1)
    assert not kernel_variables() & set(native)
    baseline = worker_environment(device("cpu@baseline"), LoadPath.ISOLATED, threads=1)
    assert baseline["ATEN_CPU_CAPABILITY"] == "default"
    assert baseline["MKL_CBWR"] == "COMPATIBLE"
    assert baseline["ONEDNN_MAX_CPU_ISA"] == "SSE41"


EMULATION = ("CUBLAS_EMULATE_SINGLE_PRECISION", "CUBLAS_EMULATE_DOUBLE_PRECISION", "CUBLAS_EMULATION_STRATEGY")
HALF_OPERANDS = ("ROCBLAS_INTERNAL_FP16_ALT_IMPL", "MIOPEN_DEBUG_CONVOLUTION_ATTRIB_FP16_ALT_IMPL")


def test_no_variable_lowers_the_precision_of_a_pinned_product(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*EMULATION, *HALF_OPERANDS):
        monkeypatch.setenv(name, "1")
    found = worker_environment(device("cuda:0"), LoadPath.ISOLATED, threads=1)
    assert not set(EMULATION) & found.keys()
    assert [found[name] for name in HALF_OPERANDS] == ["0", "0"], "MI200 takes bfloat16 where they are not set"
    found = worker_environment(device("cuda:0"), LoadPath.ISOLATED, threads=1, pinned=False)
    assert {found[name] for name in (*EMULATION, *HALF_OPERANDS)} == {"1"}
    assert {*EMULATION, *HALF_OPERANDS, "PYTORCH_ALLOC_CONF"} <= recorded_variables()


def test_as_deployed_the_user_s_own_environment_reaches_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*kernel_variables(), "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "user")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    found = worker_environment(device("cpu"), LoadPath.ISOLATED, threads=None, pinned=False)
    assert {found[name] for name in kernel_variables()} == {"user"}
    assert "CUBLAS_WORKSPACE_CONFIG" not in found
    assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID", "devices are still told apart by their place"
    assert (found["OMP_NUM_THREADS"], "MKL_NUM_THREADS" in found) == ("user", "MKL_NUM_THREADS" in os.environ)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    found = worker_environment(device("cpu@avx2"), LoadPath.ISOLATED, threads=3, pinned=False)
    assert (found["CUBLAS_WORKSPACE_CONFIG"], found["OMP_NUM_THREADS"]) == (":16:8", "3")
    assert found["ONEDNN_MAX_CPU_ISA"] == "AVX2", "a variant is the user's choice too"


@pytest.mark.parametrize(
    ("asked", "pinned", "user", "threads"),
    [
        (5, True, "1", 5),
        (None, True, "3", 2),
        (None, True, "1", 1),
        (None, True, "1,4", 1),
        (None, True, "0", 2),
        (None, True, "many", 2),
        (5, False, "3", 5),
        (None, False, "3", None),
        (None, False, "", 2),
    ],
)
def test_threads_are_a_share_within_those_of_the_user_and_the_user_s_as_deployed(
    asked: int | None, pinned: bool, user: str, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", user)
    assert worker_threads(asked, 2, pinned=pinned) == threads


def test_threads_that_wait_sleep_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spinning, OpenMP's default, takes the cores from other workers and from the comparing side."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(environment, "is_host_busy", lambda: False)
    found = worker_environment(device("cpu"), LoadPath.ISOLATED, threads=2)
    assert (found["OMP_WAIT_POLICY"], found["GOMP_SPINCOUNT"]) == ("PASSIVE", "10000")
    assert found["OPENBLAS_NUM_THREADS"] == "1", "threads that measure would wait for those of NumPy's products"
    assert "OMP_WAIT_POLICY" not in worker_environment(device("cpu"), LoadPath.ISOLATED, threads=2, pinned=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    found = worker_environment(device("cpu"), LoadPath.ISOLATED, threads=2)
    assert found["OMP_WAIT_POLICY"] == "ACTIVE"
    assert "GOMP_SPINCOUNT" not in found


def test_threads_that_wait_sleep_sooner_where_other_processes_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setattr(environment, "is_host_busy", lambda: True)
    found = worker_environment(device("cpu"), LoadPath.ISOLATED, threads=2)
    assert (found["OMP_WAIT_POLICY"], found["GOMP_SPINCOUNT"]) == ("PASSIVE", "1000")
    monkeypatch.setenv("GOMP_SPINCOUNT", "77")
    assert worker_environment(device("cpu"), LoadPath.ISOLATED, threads=2)["GOMP_SPINCOUNT"] == "77"


def test_every_worker_is_offline_and_has_its_threads() -> None:
    found = worker_environment(device("cpu"), LoadPath.ISOLATED, threads=3)
    assert found["HF_HUB_OFFLINE"] == "1"
    assert found["OMP_NUM_THREADS"] == found["MKL_NUM_THREADS"] == "3"
    assert found["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


KNOWN = device("cuda:1", visible_id="GPU-5")
LISTED = device("cuda:1", visible_id="GPU-5", visible_ids=("GPU-3", "GPU-5"))


@pytest.mark.parametrize(
    ("info", "load_path", "user", "visible", "of_torch"),
    [
        # PEFT asks for the accelerator by itself, and would send the reference's adapter through it
        (device("cpu"), LoadPath.ISOLATED, None, "", "cpu"),
        (KNOWN, LoadPath.ISOLATED, None, "GPU-5", "cuda:0"),
        (KNOWN, LoadPath.ISOLATED, "3,5", "GPU-5", "cuda:0"),
        (KNOWN, LoadPath.SHARED, "3,5", "3,5", "cuda:1"),
        (KNOWN, LoadPath.SHARED, None, None, "cuda:1"),
        # by number a card that CUDA skips would give each later one the number of its neighbour
        (LISTED, LoadPath.SHARED, "3,5", "GPU-3,GPU-5", "cuda:1"),
        (LISTED, LoadPath.ISOLATED, "3,5", "GPU-5", "cuda:0"),
        # without an identity it keeps its place in what is visible
        (device("cuda:1"), LoadPath.ISOLATED, "3,5", "5", "cuda:0"),
    ],
)
def test_a_worker_sees_its_device_alone_or_what_the_user_sees(
    info: DeviceInfo,
    load_path: LoadPath,
    user: str | None,
    visible: str | None,
    of_torch: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if user is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", user)
    assert worker_environment(info, load_path, threads=1).get("CUDA_VISIBLE_DEVICES") == visible
    assert torch_device(info, load_path) == of_torch


def test_other_backends_count_by_their_own_variables_or_hide_nothing() -> None:
    assert worker_environment(device("npu:1"), LoadPath.ISOLATED, threads=1)["ASCEND_RT_VISIBLE_DEVICES"] == "1"
    assert torch_device(device("mps"), LoadPath.ISOLATED) == "mps:0"


def test_a_worker_on_the_cpu_keeps_freed_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapping them anew for each product in float64 takes a third of the time of a merge."""
    name = "MALLOC_MMAP_THRESHOLD_"
    monkeypatch.delenv(name, raising=False)
    assert int(worker_environment(device("cpu"), LoadPath.ISOLATED, threads=2)[name]) >= 1 << 30
    assert name not in worker_environment(device("cuda:0"), LoadPath.ISOLATED, threads=2)
    assert name not in worker_environment(device("cpu"), LoadPath.ISOLATED, threads=2, pinned=False)
    monkeypatch.setenv(name, "4096")
    assert worker_environment(device("cpu"), LoadPath.ISOLATED, threads=2)[name] == "4096"


@pytest.mark.parametrize(
    ("cores", "names", "waits", "threads"),
    [
        (16, ("cpu", *(f"cuda:{i}" for i in range(8))), True, [8] + [1] * 8),
        (96, ("cpu", *(f"cuda:{i}" for i in range(8))), True, [64] + [4] * 8),
        (96, ("cpu", *(f"cuda:{i}" for i in range(8))), False, [10] * 9),
        (2, ("cpu", "cuda:0", "cuda:1"), True, [1, 1, 1]),
        (12, ("cpu", "cpu@avx2", "cuda:0"), True, [4, 4, 4]),
        (24, ("cpu", "cpu@avx2", "cuda:0"), True, [12, 8, 4]),
        (16, ("cpu", "cpu@avx2"), True, [8, 8]),
        (17, ("cpu", "cpu@avx2"), True, [8, 8]),
        (16, ("cuda:0", "cuda:1"), True, [8, 8]),
    ],
)
def test_the_worker_that_others_wait_for_has_the_cores_that_they_do_not_need(
    monkeypatch: pytest.MonkeyPatch, cores: int, names: tuple[str, ...], waits: bool, threads: list[int]
) -> None:
    for module in (environment, devices_cores):
        monkeypatch.setattr(module, "available_cores", lambda: cores)
    case = Case(name="x", base="base", load_paths=(LoadPath.ISOLATED,))
    (wave,) = plan_waves(case, [device(name) for name in names])
    assert shared_out(wave, waits=waits) == threads
