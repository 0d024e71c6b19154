"""`torch.npu` in a process that has the double: the functions that other code asks of an accelerator's module."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import torch

from . import NAME, _native
from .settings import PIECES, Settings

simulated = True
"""By this mark a report says that the devices are none."""

MULTIPROCESSORS = 16


@dataclass(frozen=True, kw_only=True)
class DeviceProperties:
    """What a device says of itself."""

    name: str
    architecture: str
    uuid: str
    total_memory: int
    reclaimable_memory: int
    is_integrated: int
    multi_processor_count: int = MULTIPROCESSORS


_properties: list[DeviceProperties] = []


def install(settings: Settings) -> None:
    """Make the devices that this process sees."""
    kinds = [settings.architecture(physical) for physical in settings.visible]
    for physical, kind in zip(settings.visible, kinds, strict=True):
        _properties.append(
            DeviceProperties(
                name=f"Software accelerator {kind}",
                architecture=kind,
                # by what the device is and not by how this process numbers it
                uuid=f"SIM-{uuid.uuid5(uuid.NAMESPACE_OID, f'simulated accelerator {physical}')}",
                total_memory=settings.memory_bytes,
                reclaimable_memory=settings.reclaimable_bytes,
                is_integrated=int(settings.shares_memory),
            )
        )
    _native.set_devices([(PIECES[kind], settings.memory_bytes) for kind in kinds])


Device = int | str | torch.device | None


def _index(device: Device) -> int:
    if device is None:
        return _native.current_device()
    if isinstance(device, int):
        return device
    found = torch.device(device)
    if found.type != NAME:
        raise ValueError(f"{found} is no {NAME} device")
    return _native.current_device() if found.index is None else found.index


def is_available() -> bool:
    """Tell whether this process sees any device."""
    return bool(_properties)


def is_initialized() -> bool:
    """Tell whether the devices may be asked for anything."""
    return bool(_properties)


def device_count() -> int:
    """Return how many devices this process sees."""
    return len(_properties)


def current_device() -> int:
    """Return the index of the device that this thread is on."""
    return _native.current_device()


def set_device(device: Device) -> None:
    """Put this thread on a device."""
    _native.set_device(_index(device))


class device:  # noqa: N801 - the name that torch asks for
    """Be on a device for as long as a `with` block takes."""

    def __init__(self, device: Device) -> None:
        self.index = -1 if device is None else _index(device)
        self.before = -1

    def __enter__(self) -> None:
        self.before = _native.current_device()
        if self.index >= 0:
            _native.set_device(self.index)

    def __exit__(self, *_: object) -> None:
        _native.set_device(self.before)


def synchronize(device: Device = None) -> None:
    """Wait for all work of a device; its delayed copies arrive."""
    _native.synchronize(_index(device))


def get_device_properties(device: Device = None) -> DeviceProperties:
    """Return what a device says of itself."""
    index = _index(device)
    if not 0 <= index < len(_properties):
        raise AssertionError("Invalid device id")  # as torch.cuda does
    return _properties[index]


def get_device_name(device: Device = None) -> str:
    """Return a device's name."""
    return get_device_properties(device).name


def can_device_access_peer(device: Device, peer: Device) -> bool:
    """Tell whether a device can copy straight to another."""
    return _index(device) != _index(peer)


def memory_allocated(device: Device = None) -> int:
    """Return the bytes that live tensors hold on a device."""
    return _native.usage(_index(device))[0]


def max_memory_allocated(device: Device = None) -> int:
    """Return the most bytes that live tensors have held since `reset_peak_memory_stats`."""
    return _native.usage(_index(device))[1]


def memory_reserved(device: Device = None) -> int:
    """Return the bytes that the allocator holds, those without a tensor too."""
    return _native.usage(_index(device))[2]


def max_memory_reserved(device: Device = None) -> int:
    """Return the most bytes that the allocator has held since `reset_peak_memory_stats`."""
    return _native.usage(_index(device))[3]


def reset_peak_memory_stats(device: Device = None) -> None:
    """Begin to look for the peaks anew."""
    _native.reset_peak(_index(device))


def empty_cache() -> None:
    """Give back what no tensor holds."""
    _native.empty_cache()


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Return the free and the total bytes of a device."""
    index = _index(device)
    total, reclaimable = _properties[index].total_memory, _properties[index].reclaimable_memory
    return max(0, total - reclaimable - _native.usage(index)[2]), total


Stream = torch.Stream
Event = torch.Event


def current_stream(device: Device = None) -> torch.Stream:
    """Return the stream that this thread puts work on."""
    return torch.accelerator.current_stream(_index(device))


def manual_seed(seed: int) -> None:
    """Seed the device's generator, which is the CPU's own."""


def manual_seed_all(seed: int) -> None:
    """Seed the devices' generators, which are the CPU's own."""


def get_rng_state(device: Any = None) -> torch.Tensor:
    """Return the state of the CPU's generator, which is every device's."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    """Set the state of the CPU's generator, which is every device's."""
    torch.set_rng_state(state)


def is_bf16_supported() -> bool:
    """Tell that bfloat16 is computed in."""
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes that autocast may choose."""
    return [torch.float16, torch.bfloat16]


def _is_in_bad_fork() -> bool:
    return False
