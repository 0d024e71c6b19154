"""Tell errors that a device's runtime reports from all others, and explain them.

The one place that decides it: an error of a device is never the user's input, a layer that PEFT does not merge, a pass
that the model refuses, or a tensor that is missing. No torch at import: `__main__` asks before torch is there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from consistency.errors import first_line

if TYPE_CHECKING:
    import torch


class Trouble(Enum):
    """How much of a device an error is about.

    `MEMORY`: none is left, on the device or the host. `DEVICE`: the device, its driver or its context. `OPERATION`: one
    call that a library of the device refuses, after which the device computes as before.
    """

    MEMORY = auto()
    DEVICE = auto()
    OPERATION = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceError:
    """An error that a device's runtime reports.

    Attributes
    ----------
    words : str
        The first line of the runtime's own message.
    meaning : str
        A sentence on what it means and what to do; empty where there is none.
    """

    trouble: Trouble
    words: str
    meaning: str = ""


@dataclass(frozen=True, slots=True)
class _Saying:
    """A pattern of a runtime's messages, and their meaning, in which `{tool}` stands for the vendor's command."""

    pattern: str
    trouble: Trouble
    meaning: str = ""


_LESS_MEMORY = (
    "another process may hold the rest ({tool} lists them); a base that does not fit is streamed by --placement offload"
)
_KERNEL_FAULT = (
    "a kernel left its memory or its instructions, and took the process's context on the device with it: the kernel "
    "log (dmesg) names the cause; if other devices of this model run the same program, have this one tested"
)
_GONE = (
    "the driver does not show the device to this process: compare {tool} with the kernel log (dmesg; Xid 79 is a GPU "
    "that has fallen off the bus), check permissions of its device file, and power or reseat the card"
)
_OLD_DRIVER = "the driver is older than this torch was built for, or two of its parts differ: update it and reboot"

# Texts: cudaGetErrorString of CUDA 13 (hipGetErrorString says most of them in the same words), the names of statuses
# that torch prints of its libraries, and torch's own. The first that fits decides. Xid numbers: NVIDIA's "Xid Errors".
_SAYINGS = (
    # ---- memory
    _Saying(r"out of memory", Trouble.MEMORY, _LESS_MEMORY),
    _Saying(
        # of a full card, the first product or convolution cannot make its library's handle
        r"(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS)_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)|CUDNN_STATUS_\w*ALLOC\w*"
        r"|CUFFT_ALLOC_FAILED|CURAND_STATUS_ALLOCATION_FAILED|rocblas_status_memory_error|miopenStatusAllocFailed",
        Trouble.MEMORY,
        "a library of the device found no memory for its own use: " + _LESS_MEMORY,
    ),
    _Saying(
        r"(?:UR|ZE|PI)_(?:RESULT_)?ERROR_OUT_OF_(?:DEVICE_MEMORY|HOST_MEMORY|RESOURCES)|RESOURCE_EXHAUSTED"
        r"|^Invalid buffer size:|ACL_ERROR_RT_MEMORY_ALLOCATION",
        Trouble.MEMORY,
        _LESS_MEMORY,
    ),
    # torch's allocator of host memory raises a plain RuntimeError (c10/core/impl/alloc_cpu.cpp)
    _Saying(r"not enough memory|can't allocate memory", Trouble.MEMORY),
    # ---- the card
    _Saying(
        r"uncorrectable ECC error",
        Trouble.DEVICE,
        "memory of this card is damaged: take it out of use, read `nvidia-smi -q -d ECC,ROW_REMAPPER` and its Xid in "
        "dmesg (48, 63, 64, 94, 95), and reset it, which remaps rows (`nvidia-smi --gpu-reset`; AMD: `amd-smi metric "
        "--ecc`, `amd-smi reset --gpureset`); if a remapping has failed or errors come back, have it replaced",
    ),
    _Saying(
        r"uncorrectable NVLink error|over nvlink or a hardware error",
        Trouble.DEVICE,
        "an NVLink of this card or of its neighbour fails: `nvidia-smi nvlink -e` counts errors by link; reseat or "
        "replace what is at the ends of the one that counts",
    ),
    _Saying(r"fallen off the bus|DEVICE_LOST|device is lost", Trouble.DEVICE, _GONE),
    _Saying(
        r"no kernel image is available|device kernel image is invalid|invalid device function",
        Trouble.DEVICE,
        "this torch has no kernels for this device's architecture: compare torch.cuda.get_arch_list() with "
        "torch.cuda.get_device_capability() (AMD: gcnArchName), and install a torch that is built for it",
    ),
    _Saying(
        r"busy or unavailable",
        Trouble.DEVICE,
        "another process has the card to itself, or the driver refuses it: `nvidia-smi -q -d COMPUTE` shows the mode "
        "(exclusive lets one process in, prohibited none; `nvidia-smi -c DEFAULT` lets all), `nvidia-smi` who is there",
    ),
    _Saying(
        r"device-side assert",
        Trouble.DEVICE,
        "a kernel was asked for an index that its table has not, and its assertion took the process's context on the "
        "device with it: CUDA_LAUNCH_BLOCKING=1 names the call",
    ),
    _Saying(
        r"illegal memory access|misaligned address|illegal instruction|invalid program counter|hardware stack error"
        r"|unspecified launch failure|operation not supported on global/shared address space",
        Trouble.DEVICE,
        _KERNEL_FAULT + " (Xid 13 and 31 are the program's, 48, 63, 64, 79, 94 and 95 the card's)",
    ),
    _Saying(
        r"launch timed out",
        Trouble.DEVICE,
        "the driver ended a kernel that took too long, as it does on a card that draws a screen: use one that does not",
    ),
    # ---- the driver
    _Saying(
        r"system not yet initialized",
        Trouble.DEVICE,
        "GPUs that are joined by NVSwitch start only with the fabric manager of their driver's version: "
        "`systemctl status nvidia-fabricmanager`",
    ),
    _Saying(
        r"driver version is insufficient|unsupported display driver|driver on your system is too old"
        r"|unsupported toolchain|Driver/library version mismatch",
        Trouble.DEVICE,
        _OLD_DRIVER,
    ),
    _Saying(
        r"no CUDA-capable device|No (?:CUDA|HIP) GPUs are available|No XPU devices are available"
        r"|CUDA driver initialization failed|(?:CUDA|HIP) error: (?:invalid device ordinal|initialization error)",
        Trouble.DEVICE,
        _GONE,
    ),
    _Saying(
        r"(?:CUDA|HIP) (?:error: )?unknown error",
        Trouble.DEVICE,
        "the driver does not say why: read the kernel log (dmesg); after the machine was suspended, loading the module "
        "nvidia_uvm anew helps",
    ),
    # ---- one call: the argument of one launch, or what a library has no kernel for
    _Saying(
        r"CU(?:BLAS|SPARSE|SOLVER)_STATUS_(?:NOT_SUPPORTED|INVALID_VALUE|ARCH_MISMATCH|MATRIX_TYPE_NOT_SUPPORTED)"
        r"|HIPBLAS_STATUS_(?:NOT_SUPPORTED|INVALID_VALUE|INVALID_ENUM|ARCH_MISMATCH)"
        r"|CUDNN_STATUS_(?:NOT_SUPPORTED|BAD_PARAM|ARCH_MISMATCH)|miopenStatus(?:NotImplemented|BadParm)"
        r"|(?:CUDA|HIP) error: (?:invalid argument|invalid configuration argument|invalid value"
        r"|too many resources requested for launch|operation not supported)",
        Trouble.OPERATION,
    ),
    # ---- what devices talk by, before any of them computes
    _Saying(
        r"nccl(?:System|Internal|Remote)Error|nccl(?:InvalidUsage|InvalidArgument)|unhandled system error|/dev/shm/",
        Trouble.OPERATION,
        "the library by which devices talk could not be set up, or lost a process, which says nothing of a card: look "
        "at `df -h /dev/shm` (64 MB in a container without --shm-size or --ipc=host), at NCCL_SOCKET_IFNAME, and at "
        "what NCCL_DEBUG=WARN prints",
    ),
    # ---- whatever else a runtime says
    _Saying(
        r"(?:CUDA|HIP|MIOpen|cuDNN|cuBLAS|cuSOLVER|cuSPARSE|cuFFT|NPU function|NCCL|CUDA driver|hipBLAS) error\b"
        r"|(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS|HIPSOLVER|HIPSPARSE|CURAND|NVRTC)_(?:STATUS|ERROR)_\w+|CUFFT_\w+"
        r"|rocblas_status_\w+|miopenStatus\w+|Triton Error \[|(?:UR|ZE|PI)_(?:RESULT_)?ERROR_\w+"
        r"|(?:UR|level_zero|OpenCL) backend failed|Native API failed|ACL_ERROR_\w+|acl api failed"
        r"|command buffer exited with error status",
        Trouble.DEVICE,
        "the device or its driver refuses to go on: {tool} and the kernel log (dmesg) say more",
    ),
)

_OF_A_RUNTIME = ("AcceleratorError", "DeferredCudaCallError")
"""Names of torch's classes that only errors of a device have, whatever their message is."""

# patterns of messages by vendor, and the vendor's command; nvidia-smi where none fits
_TOOLS = (
    (r"HIP|hip|MIOpen|miopen|rocblas|\bROC", "amd-smi"),
    (r"XPU|UR_|ZE_|PI_|SYCL|level_zero|Native API|UR backend", "xpu-smi"),
    (r"NPU|ACL|acl api", "npu-smi"),
    (r"MPS|command buffer|Invalid buffer size", "the Activity Monitor"),
)

_NUMBER = re.compile(r"\b(?:GPU|[Dd]evice) (\d+)\b")
"""The number of the device whose memory ran out, in a message."""

_SMALL = 1 << 28
"""Free bytes up to which a device has no room: half a context of CUDA."""

_LONGEST = 300
"""Characters of a message that are shown."""


def device_error(error: BaseException) -> DeviceError | None:
    """Return the report of a device's runtime in an error, or in one that led to it; None where there is none."""
    for link in _chain(error):
        reported = _read_message(link)
        if reported is not None:
            return reported
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Report whether an error means that memory ran out, on the host or on a device."""
    reported = device_error(error)
    return reported is not None and reported.trouble is Trouble.MEMORY


def is_of_the_device(error: BaseException, device: torch.device | str | None = None) -> bool:
    """Report whether an error is of the device or its memory, so that no code but the stage's end may take it.

    Torch raises `RuntimeError` for a device that is gone as for a wrong shape: where the words do not tell, the device
    is asked, if one is given.
    """
    return device_error(error) is not None or _is_unexplained(error, device)


def ends_the_worker(error: BaseException, device: torch.device | str | None = None) -> DeviceError | None:
    """Return the error of a device on which this process can compute no more; None where it still can."""
    reported = device_error(error)
    if reported is not None and reported.trouble is not Trouble.OPERATION:
        return None if of_another(error, device, by_way=False) else reported
    if not _is_unexplained(error, device):
        return None
    meaning = f"{device} no longer adds up two numbers in this process: the kernel log (dmesg) says more"
    return DeviceError(trouble=Trouble.DEVICE, words=_words(error), meaning=meaning)


def of_another(error: BaseException, device: torch.device | str | None, *, by_way: bool = True) -> DeviceError | None:
    """Return the error of another accelerator of this process, where the worker's own one still computes.

    Errors of exhausted memory may name their device, other errors do not. Where all devices compute, an error is of the
    worker's own device, unless the code goes by way of the first one.

    Parameters
    ----------
    device : torch.device or str or None
        The worker's own device; without one, and on the CPU, no error is of another device.
    by_way : bool
        Whether the code may use the first device on the way, as PEFT's loading does without being asked.
    """
    reported, (kind, _, number) = device_error(error), str(device).partition(":")
    if reported is None or reported.trouble is Trouble.OPERATION or device is None or kind == "cpu":
        return None
    own, count = int(number or 0), _count(kind)
    if count < 2:
        return None
    if reported.trouble is Trouble.MEMORY:
        is_own = _is_own_memory(error, kind, own, by_way=by_way)
        return None if is_own else reported
    if not computes(device):
        return None
    if by_way and own > 0:
        return reported
    others_compute = all(computes(f"{kind}:{other}") for other in range(count) if other != own)
    return None if others_compute else reported


def _is_own_memory(error: BaseException, kind: str, own: int, *, by_way: bool) -> bool:
    """Report whether it is the memory of the worker's own device that ran out."""
    for link in _chain(error):
        match = _NUMBER.search(str(link))
        if match:
            return int(match[1]) == own
    # no device is named: another one's memory is in question only where the code may use the first device on the way
    return not by_way or own == 0 or not _has_room(kind, own)


def _count(kind: str) -> int:
    """Return the number of devices of a type in this process."""
    import torch

    return int(getattr(getattr(torch, kind, None), "device_count", int)())


def _has_room(kind: str, number: int) -> bool:
    """Report whether a device has memory for requests that name no size: a context, a library's handle."""
    import torch

    mem_get_info = getattr(getattr(torch, kind, None), "mem_get_info", None)
    try:
        return mem_get_info is not None and int(mem_get_info(number)[0]) > _SMALL
    except Exception:  # whatever it says, it tells nothing
        return False


def computes(device: torch.device | str) -> bool:
    """Report whether a device still adds up two numbers."""
    import torch

    try:
        return float(torch.ones(2, device=device).sum()) == 2  # read back, so that it waits for all that is queued
    except Exception:  # whatever it says, it does not compute
        return False


def _is_unexplained(error: BaseException, device: torch.device | str | None) -> bool:
    """Report whether an error came with a device that computes no more."""
    if device is None or str(device).partition(":")[0] == "cpu":
        return False
    is_runtime_error = any(
        isinstance(link, RuntimeError) and not isinstance(link, NotImplementedError) for link in _chain(error)
    )
    return is_runtime_error and not computes(device)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those it was raised from, or while they were handled."""
    visited: set[int] = set()  # a chain may be a ring
    link: BaseException | None = error
    while link is not None and id(link) not in visited:
        visited.add(id(link))
        yield link
        # as Python shows a traceback: `raise ... from None` hides the context
        hides_context = link.__cause__ is not None or link.__suppress_context__
        link = link.__cause__ if hides_context else link.__context__


def _read_message(error: BaseException) -> DeviceError | None:
    """Return the report of a device's runtime in one error, None where it has none."""
    if isinstance(error, MemoryError):
        return DeviceError(trouble=Trouble.MEMORY, words=_words(error))
    if not isinstance(error, RuntimeError):
        return None
    message, kind = str(error), type(error).__name__
    saying = next((saying for saying in _SAYINGS if re.search(saying.pattern, message)), None)
    if kind == "OutOfMemoryError" and (saying is None or saying.trouble is not Trouble.MEMORY):
        saying = _Saying("", Trouble.MEMORY, _LESS_MEMORY)
    elif saying is None and kind in _OF_A_RUNTIME:
        saying = _SAYINGS[-1]
    if saying is None:
        return None
    tool = next((tool for pattern, tool in _TOOLS if re.search(pattern, message)), "nvidia-smi")
    return DeviceError(trouble=saying.trouble, words=_words(error), meaning=saying.meaning.format(tool=tool))


def _words(error: BaseException) -> str:
    """Return the first line of an error's message, or a text on an error without a message."""
    return (str(error).strip().splitlines() or [first_line(error)])[0][:_LONGEST]
