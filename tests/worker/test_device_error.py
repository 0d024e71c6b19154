"""What is an error of a device: the words of its runtime, its memory, and a device that computes no more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from consistency.errors import InputError
from consistency.worker.device_error import (
    Trouble,
    device_error,
    ends_the_worker,
    is_of_the_device,
    is_out_of_memory,
)
from consistency.worker.stage_failure import stated

MORE = "\nCUDA kernel errors might be asynchronously reported at some other API call"


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a device that computes no more."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("it does not answer")

    monkeypatch.setattr(torch, "ones", fail)
    return "cuda:0"


@pytest.fixture
def well(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a device that computes."""
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.tensor([1.0, 1.0]))
    return "cuda:0"


def test_the_host_ran_out() -> None:
    with pytest.raises(RuntimeError) as ran_out:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(ran_out.value)
    assert is_out_of_memory(MemoryError())


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        torch.OutOfMemoryError("Allocation on device 0 would exceed allowed memory."),
        torch.AcceleratorError(f"CUDA error: out of memory{MORE}"),
        torch.AcceleratorError("HIP error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
        RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
        RuntimeError("MPS backend out of memory (MPS allocated: 9.06 GB, max allowed: 9.07 GB)."),
        RuntimeError("Invalid buffer size: 24.00 GiB"),
        RuntimeError("XPU out of memory. Tried to allocate 20.00 MiB."),
        RuntimeError("UR backend failed. UR backend returns:39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
        RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB"),
    ],
    ids=lambda error: str(error)[:40],
)
def test_a_device_ran_out(error: Exception) -> None:
    assert is_out_of_memory(error)
    found = ends_the_worker(error)
    assert found is not None
    assert found.meaning


@pytest.mark.parametrize(
    "error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("not enough memory"), OSError()]
)
def test_other_errors_are_of_no_device(error: Exception) -> None:
    assert not is_out_of_memory(error)
    assert device_error(error) is None
    assert not is_of_the_device(error, "cpu")
    assert ends_the_worker(error, "cpu") is None


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (torch.AcceleratorError(f"CUDA error: uncorrectable ECC error encountered{MORE}"), "ECC,ROW_REMAPPER"),
        (torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device"), "arch_list"),
        (torch.AcceleratorError("HIP error: invalid device function"), "arch_list"),
        (torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), "COMPUTE"),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), "Xid"),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), "CUDA_LAUNCH_BLOCKING"),
        (torch.AcceleratorError("CUDA error: system not yet initialized"), "fabricmanager"),
        (RuntimeError("The NVIDIA driver on your system is too old (found version 11040)."), "update it"),
        (RuntimeError("No CUDA GPUs are available"), "nvidia-smi"),
        (RuntimeError("CUDA unknown error - this may be due to an incorrectly set up environment"), "nvidia_uvm"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"), "nvidia-smi"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), "nvidia-smi"),
        (RuntimeError("CUDA error: HIPBLAS_STATUS_INTERNAL_ERROR when calling `hipblasSgemm`"), "amd-smi"),
        (RuntimeError("miopenStatusInternalError"), "amd-smi"),
        (RuntimeError("level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)"), "bus"),
        (RuntimeError("NPU function error: aclrtSynchronizeStream, error code is 507018"), "npu-smi"),
        (torch.AcceleratorError("words that nobody knows"), "dmesg"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_a_runtime_says_ends_the_worker(error: Exception, meaning: str, well: str) -> None:
    found = ends_the_worker(error, well)
    assert found is not None
    assert found.trouble is Trouble.DEVICE
    assert found.words == str(error).partition("\n")[0]
    assert meaning in found.meaning
    assert "{" not in found.meaning
    assert is_of_the_device(error)


@pytest.mark.parametrize(
    "text",
    [
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\n"
        "Last error:\nError while creating shared memory segment /dev/shm/nccl-kQ2 (size 9637888)",
        "ncclInvalidUsage: This usually reflects invalid usage of the library.\nLast error:\nno socket found",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    ],
    ids=lambda text: text.partition(":")[0],
)
def test_devices_that_cannot_talk_are_no_broken_devices(text: str, well: str) -> None:
    """A container with 64 MB of shared memory fails all ranks at once; their cards compute as before."""
    head = (
        "NCCL error in: NCCLUtils.cpp:77, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2"
    )
    error = RuntimeError("all_reduce failed")
    error.__cause__ = torch.distributed.DistBackendError(f"{head}\n{text}")
    assert ends_the_worker(error, well) is None
    assert "`df -h /dev/shm`" in stated(error)


def test_a_device_that_fails_while_it_talks_is_one_that_fails(well: str) -> None:
    text = (
        "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed."
    )
    assert ends_the_worker(torch.distributed.DistBackendError(text), well) is not None


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx(...)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
        torch.AcceleratorError("CUDA error: invalid configuration argument"),
    ],
    ids=str,
)
def test_one_refused_call_is_no_models_and_ends_no_worker(error: Exception, well: str) -> None:
    assert is_of_the_device(error, well)
    assert ends_the_worker(error, well) is None


def test_a_refused_call_ends_the_worker_where_nothing_computes_any_more(gone: str) -> None:
    assert ends_the_worker(RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"), gone) is not None


def test_the_device_is_asked_where_words_do_not_tell(gone: str) -> None:
    error = RuntimeError("shapes, or so it seems")
    assert is_of_the_device(error, gone)
    found = ends_the_worker(error, gone)
    assert found is not None
    assert found.words == str(error)
    assert "cuda:0 no longer adds up" in found.meaning
    for other in (ValueError("of Python"), NotImplementedError("no such operator")):
        assert not is_of_the_device(other, gone)


def test_a_device_that_computes_is_not_blamed(well: str) -> None:
    assert not is_of_the_device(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), well)


def raised(act: Callable[[], None]) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of which kind is not what is asked
        act()
    return caught.value


def test_what_led_to_an_error_counts() -> None:
    lost = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")

    def cause() -> None:
        try:
            raise lost
        except RuntimeError as error:
            raise InputError("transformers cannot load this base") from error

    def while_handling() -> None:
        try:
            raise lost
        finally:
            raise KeyError("weight")

    def hidden() -> None:
        try:
            raise lost
        except RuntimeError:
            raise KeyError("weight") from None

    for act in (cause, while_handling):
        found = ends_the_worker(raised(act))
        assert found is not None
        assert "ECC" in found.words
    assert ends_the_worker(raised(hidden)) is None


def test_bad_input_stays_bad_input(well: str) -> None:
    error = InputError("no such file", where="adapter")
    error.__cause__ = RuntimeError("size mismatch for weight")
    assert ends_the_worker(error, well) is None
    assert ends_the_worker(error, "cpu") is None
