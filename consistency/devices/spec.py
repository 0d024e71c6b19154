"""The devices on which a case is checked: their specs, and the facts that are known before a worker starts.

A spec is `type[:index][@variant]`: `cpu`, `cuda:0`, `xpu:1`, `cpu@avx2`, `cuda:0@tf32`. Types and their variants are
those of `backends.py`. No torch here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from consistency.devices.backend import Variant
from consistency.devices.backends import CPU, backend_of
from consistency.errors import UsageError, did_you_mean

_DEVICE = r"(?P<type>[a-z][a-z0-9_]*)(?::(?P<index>\d{1,4}))?"
_SPEC = re.compile(rf"^{_DEVICE}(?:@(?P<variant>[a-z0-9][a-z0-9_+-]*))?$")
_LABEL = re.compile(rf"^(?:(?P<capture>.*):)?{_DEVICE}(?:@.*)?$", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One device and the numerical variant it runs as."""

    type: str
    index: int | None = None
    variant: str | None = None

    @property
    def name(self) -> str:
        """Return the spec as it is written: `cuda:0@tf32`."""
        text = self.type if self.index is None else f"{self.type}:{self.index}"
        return text if self.variant is None else f"{text}@{self.variant}"

    @property
    def is_cpu(self) -> bool:
        return self.type == CPU

    def numerical_variant(self, *, where: str = "--devices") -> Variant | None:
        """Return the variant's definition, None for the native device; `where` names the place in an error.

        Raises
        ------
        UsageError
            The device type has no such variant.
        """
        if self.variant is None:
            return None
        backend = backend_of(self.type)
        variant = backend.variant(self.variant)
        if variant is None:
            names = [each.name for each in backend.variants]
            raise UsageError(
                f"unknown variant of {self.type}: {self.variant}",
                where=where,
                got=self.name,
                wanted="one of " + (", ".join(names) or "none"),
                hint=did_you_mean(self.variant, names),
            )
        return variant


@dataclass(frozen=True, slots=True)
class WorkerLabel:
    """The parts of a worker's name: its capture, empty where only one is compared, and its device without variant."""

    capture: str
    type: str
    index: int | None

    @property
    def device(self) -> str:
        """Return the device as it is written: `cuda:0`."""
        return self.type if self.index is None else f"{self.type}:{self.index}"


@functools.cache
def label_of(worker: str) -> WorkerLabel | None:
    """Return the parts of a worker's name, such as `node-7:cuda:0@tf32`; None where it names no device."""
    match = _LABEL.match(worker)
    if match is None:
        return None
    index = None if match["index"] is None else int(match["index"])
    return WorkerLabel(match["capture"] or "", match["type"], index)


class DeviceIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What identifies a device; its number can change."""

    architecture: str
    """Vendor's name and capability: `Ampere sm_86`, `x86-64 AVX-512`."""
    model: str
    """Product name of the chip."""
    uuid: str | None = None
    pci_bus_id: str | None = None
    driver: str | None = None
    capability: str | None = None
    """`uuid`, `pci_bus_id`, `driver`, `capability`: None where the backend does not report it."""
    simulated: bool = False
    """True for a software device, which is never presented as a real one."""


class AutoChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What `auto` found of the accelerators of a host.

    Attributes
    ----------
    masks : dict of str to str
        The user's own variables that show a part of them.
    build : str
        Where there is none, and not because the user hides them: what torch is built for, of `vendors.PLATFORMS`.
        Empty where there are some, or the installed torch can have none.
    reason : str
        Why there is none.
    """

    masks: dict[str, str] = {}
    build: str = ""
    reason: str = ""


class DeviceInfo(DeviceIdentity, frozen=True, kw_only=True):
    """The facts about a device that are known before a worker starts."""

    spec: DeviceSpec
    memory_bytes: int | None = None
    """Memory of the device; None where it is not reported, as for a GPU that shares the host's memory."""
    visible_id: str | None = None
    """The entry of the backend's visibility variable that shows this device alone."""
    visible_ids: tuple[str, ...] = ()
    """The entries that show every device of the host, in the order of their numbers; empty where they are not known."""
    unusable: str = ""
    """Why no process can use the device; empty where nothing is known against it."""
    alone: str = ""
    """Why a process can use the device only where it sees no other device, and no other process uses it: a clause that
    follows the device's name; empty where there is no such limit."""
    shares_memory: bool = False
    """Whether the device's memory is that of the host."""
    not_reported: dict[str, str] = {}
    """The facts that the library did not report, by name, each with the reason."""
    asked: str = "NVML"
    """The library that was asked."""
    auto: AutoChoice | None = None
    """The choice of `auto`, in the entry of the CPU; None where devices were named."""


def parse_device(text: str, *, where: str = "--devices") -> DeviceSpec:
    """Return the spec in a text `type[:index][@variant]`; without an index it is the first device of the type.

    Raises
    ------
    UsageError
        It has another form, or the type has no such variant.
    """
    match = _SPEC.match(text.strip())
    if match is None:
        raise UsageError(
            f"not a device: {text!r}", wanted="type[:index][@variant], such as cpu, cuda:0, cpu@avx2", where=where
        )
    kind, index = match["type"], match["index"]
    if backend_of(kind).has_index:
        index = index or "0"
    elif index is not None:
        raise UsageError(f"{kind} has no index: {text!r}", where=where, wanted=kind)
    spec = DeviceSpec(type=kind, index=None if index is None else int(index), variant=match["variant"])
    spec.numerical_variant(where=where)
    return spec


def parse_devices(text: str | Iterable[str], *, where: str = "--devices") -> tuple[str, ...]:
    """Return the specs of a list, which may be written with commas, without duplicates; `auto` stays as it is."""
    items = text.split(",") if isinstance(text, str) else text
    names: dict[str, None] = {}
    for item in items:
        name = item.strip()
        if name and name != "auto":
            name = parse_device(name, where=where).name
        if name:
            names[name] = None
    if not names:
        raise UsageError("no device given", where=where, wanted="auto, or a list such as cpu,cuda:0")
    return tuple(names)
