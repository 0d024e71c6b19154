"""What the double is told: a JSON object in one environment variable, so that it reaches every worker."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

VARIABLE = "CONSISTENCY_DOUBLE"
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"

LATER = "later"
"""In the variable: make no device until a fork of this process asks for its own."""

DISCOVERY = "consistency.devices.probe"
"""The module whose process lists the devices."""

PIECES = {"A": 3, "B": 5, "C": 8, "S": 1, "T": 0}
"""Into how many partial sums each architecture cuts a dot product; the CPU's own kernels cut none off.

S has one accumulator for each element, as the float32 kernels of a GPU do; T has that too, and multiplies half types
in a matrix unit that cuts its accumulator.
"""

Byte = Annotated[int, msgspec.Meta(ge=0, le=255)]
Positive = Annotated[int, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class CopyFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What becomes of copies from one device to another.

    Attributes
    ----------
    source, target : str
        `from` and `to` in JSON: `cpu`, `npu:2`, or `*` for any. Devices are named as without a visibility variable.
    does : str
        `drop`: nothing arrives. `zero`: zeros arrive. `corrupt`: one bit in the middle is flipped. `delay`: the copy
        is made when one of its devices is synchronized, and not before.
    at_least_bytes, below_bytes : int, int or None
        Sizes that are hit.
    only_beside_work : bool
        Hit a copy only while another stream of one of its devices has work that nothing has waited for.
    """

    source: str = msgspec.field(name="from")
    target: str = msgspec.field(name="to")
    does: Literal["drop", "zero", "corrupt", "delay"]
    at_least_bytes: Count = 0
    below_bytes: Count | None = None
    only_under_load: bool = False

    def hits(self, source: str, target: str, size: int, *, under_load: bool) -> bool:
        """Tell whether a copy is hit."""
        return (
            self.source in ("*", source)
            and self.target in ("*", target)
            and size >= self.at_least_bytes
            and (self.below_bytes is None or size < self.below_bytes)
            and (under_load or not self.only_under_load)
        )


class DeviceFailure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device that answers a kernel, a copy or a synchronization with an error of its runtime.

    Attributes
    ----------
    device : str
        `npu:2`, as without a visibility variable.
    during : str
        What has to be on the stack of some thread: a part of `path/of/file.py:function`. Empty is any time.
    from_call : int
        Which of the device's calls at that time is the first to fail.
    raises : str
        Torch's class of the error.
    says : str
        Its words.
    sticky : bool
        Let every later call fail too, at any time, as after an error that takes a device's context with it.
    """

    device: str
    says: str
    during: str = ""
    from_call: Positive = 1
    raises: Literal["AcceleratorError", "OutOfMemoryError", "RuntimeError"] = "AcceleratorError"
    sticky: bool = False


class DeviceWait(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device whose first call at a time takes long, in the process: once per process.

    Attributes
    ----------
    device, during : str
        As of `DeviceFailure`.
    seconds : float
    reads : bool
        Let new pages of memory be touched in the meantime, as a slow disk delivers mapped weights. Without, the thread
        spins inside one call, as one does that waits for a device that never answers.
    """

    device: str
    seconds: float
    during: str = ""
    reads: bool = False


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The devices and their faults.

    Attributes
    ----------
    devices : int
    architectures : tuple of str
        One per device, names of `PIECES`; empty makes all of them A.
    copies : tuple of CopyFault
        The first that hits a copy decides.
    fill : int or None
        The byte that memory is filled with before it is handed out; None leaves what lay there, as accelerators do.
    memory_bytes : int
        Of each device.
    reclaimable_bytes : int
        Of `memory_bytes`, what `mem_get_info` counts as used although the kernel would give it back.
    shares_memory : bool
        Let the devices say that their memory is the host's, as a Jetson's is.
    as_cuda : bool
        Add the terms of `cumsum` in float32, and return those of `topk` without an order by their places, as CUDA does.
    known_to_libraries : bool
        Let PEFT and accelerate take the double for the machine's accelerator, as they take CUDA (`libraries.py`).
    unordered_mean : str or None
        Add up `mean` in an order that changes from call to call and from device to device (`unordered.py`): `warns` as
        torch does of an operation that has no deterministic version, or `silent`. None adds up as the CPU does.
    lost : tuple of int
        Devices that fell off the bus: those after them have one number less.
    lost_after_discovery : bool
        Let the process that lists the devices still see them, as NVML counts a GPU that CUDA skips.
    failures : tuple of DeviceFailure
        The first that hits a call decides.
    waits : tuple of DeviceWait
    visible : tuple of int
        Filled from the environment: the devices that this process sees, in its own order.
    """

    devices: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    architectures: tuple[Literal["A", "B", "C", "S", "T"], ...] = ()
    copies: tuple[CopyFault, ...] = ()
    fill: Byte | None = None
    memory_bytes: Positive = 8 * 2**30
    reclaimable_bytes: Count = 0
    shares_memory: bool = False
    as_cuda: bool = False
    known_to_libraries: bool = True
    unordered_mean: Literal["warns", "silent"] | None = None
    lost: tuple[Count, ...] = ()
    lost_after_discovery: bool = False
    failures: tuple[DeviceFailure, ...] = ()
    waits: tuple[DeviceWait, ...] = ()
    visible: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.architectures and len(self.architectures) != self.devices:
            raise ValueError(f"{len(self.architectures)} architectures for {self.devices} devices")

    @classmethod
    def checked(cls, text: str) -> Settings:
        """Read settings from JSON.

        Raises
        ------
        ValueError
            It does not hold what this class says.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{VARIABLE}: {error}") from error

    def architecture(self, physical: int) -> str:
        """Return the architecture of a device."""
        return self.architectures[physical] if self.architectures else "A"


def read_settings() -> Settings:
    """Read the settings of this process from its environment.

    Raises
    ------
    ValueError
        The variable does not hold what `Settings` says.
    """
    found = Settings.checked(os.environ.get(VARIABLE) or "{}")
    counted = found.lost_after_discovery and DISCOVERY in sys.orig_argv
    there = [device for device in range(found.devices) if counted or device not in found.lost]
    return msgspec.structs.replace(found, visible=_visible(there, os.environ.get(VISIBLE)))


def _visible(devices: Sequence[int], shown: str | None) -> tuple[int, ...]:
    """Return the devices in the order in which this process numbers them; an entry that is none ends the list."""
    if shown is None:
        return tuple(devices)
    found: list[int] = []
    for entry in shown.split(","):
        if not entry.strip().isdigit() or int(entry) >= len(devices) or devices[int(entry)] in found:
            break
        found.append(devices[int(entry)])
    return tuple(found)
