"""WHERE a case is checked: device specs, kernel variants, and what a worker's environment must hold.

A spec is `type[:index][@variant]`: `cpu`, `cuda:0`, `xpu:1`, `cpu@avx2`, `cuda:0@tf32`. A *variant* is a named set of
environment variables and torch settings that is in place before torch is imported, so that one chip can stand for
several numerical devices. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from consistency.errors import UsageError

_SPEC = re.compile(r"^(?P<type>[a-z][a-z0-9_]*)(?::(?P<index>\d{1,4}))?(?:@(?P<variant>[a-z0-9][a-z0-9_+-]*))?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A named numerical variant of a device type.

    Attributes
    ----------
    environment : mapping of str to str
        Variables set before torch is imported: kernel choices are read when torch first runs an operation.
    settings : mapping of str to object
        Settings of `consistency.worker.determinism` that differ from the pinned ones.
    architecture : str or None
        Name of the architecture group this variant forms on a CPU, None where it does not form its own.
    """

    name: str
    device_type: str
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    architecture: str | None = None


# ATen, MKL and oneDNN each choose kernels by instruction set from a variable of their own, so a variant sets all three
# together: with ATEN_CPU_CAPABILITY alone a float32 matmul, and so a merge, keeps its bits.
_VARIANTS = (
    Variant(
        name="baseline",
        device_type="cpu",
        environment={"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"},
        architecture="baseline",
    ),
    Variant(
        name="avx2",
        device_type="cpu",
        environment={"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
        architecture="AVX2",
    ),
    # The native choice on a processor that has AVX-512: nothing is set, the name only asks that it be there.
    Variant(name="avx512", device_type="cpu", architecture="AVX-512"),
    Variant(
        name="tf32",
        device_type="cuda",
        settings={"matmul_allow_tf32": True, "cudnn_allow_tf32": True, "float32_matmul_precision": "high"},
    ),
)

KERNEL_VARIABLES = frozenset(name for variant in _VARIANTS for name in variant.environment)
"""Every variable that chooses CPU kernels: removed from a worker's environment unless its variant sets it."""


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
        return self.type == "cpu"

    def numerical_variant(self) -> Variant | None:
        """Return the variant's definition, None for the native device."""
        if self.variant is None:
            return None
        for variant in _VARIANTS:
            if (variant.device_type, variant.name) == (self.type, self.variant):
                return variant
        raise UsageError(
            f"unknown variant of {self.type}: {self.variant}",
            where=f"device {self.name}",
            wanted="one of " + (", ".join(v.name for v in _VARIANTS if v.device_type == self.type) or "none"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """What is known of a device before any worker starts.

    Attributes
    ----------
    spec : DeviceSpec
    architecture : str
        Vendor's name and capability: `Ampere sm_86`, `x86-64 AVX-512`.
    model : str
        Product name of the chip.
    uuid, pci_bus_id, driver, capability : str or None
        Identity that no environment variable renumbers; None where the backend does not tell.
    memory_bytes : int or None
    visible_id : str or None
        What the backend's visibility variable takes to show this device alone.
    simulated : bool
        True for a software double, which is never told as a real device.
    """

    spec: DeviceSpec
    architecture: str
    model: str
    uuid: str | None = None
    pci_bus_id: str | None = None
    driver: str | None = None
    capability: str | None = None
    memory_bytes: int | None = None
    visible_id: str | None = None
    simulated: bool = False


# NVIDIA's architecture names by compute capability: CUDA C++ programming guide, "Compute Capabilities".
_NVIDIA = {
    (5, 0): "Maxwell", (5, 2): "Maxwell", (5, 3): "Maxwell",
    (6, 0): "Pascal", (6, 1): "Pascal", (6, 2): "Pascal",
    (7, 0): "Volta", (7, 2): "Volta", (7, 5): "Turing",
    (8, 0): "Ampere", (8, 6): "Ampere", (8, 7): "Ampere", (8, 9): "Ada Lovelace",
    (9, 0): "Hopper",
    (10, 0): "Blackwell", (10, 3): "Blackwell", (11, 0): "Blackwell", (12, 0): "Blackwell", (12, 1): "Blackwell",
}  # fmt: skip


def nvidia_architecture(capability: tuple[int, int]) -> str:
    """Name an NVIDIA architecture: `(8, 6)` gives `Ampere sm_86`."""
    major, minor = capability
    return f"{_NVIDIA.get((major, minor), 'NVIDIA')} sm_{major}{minor}"


def parse_device(text: str) -> DeviceSpec:
    """Read `type[:index][@variant]`.

    Raises
    ------
    UsageError
        The text is not a spec, or names an unknown variant.
    """
    match = _SPEC.match(text.strip())
    if match is None:
        raise UsageError(
            f"not a device: {text!r}", wanted="type[:index][@variant], such as cpu, cuda:0, cpu@avx2", where="--devices"
        )
    index = match["index"]
    kind = match["type"]
    if kind == "cpu" and index is not None:
        raise UsageError(f"the CPU has no index: {text!r}", where="--devices", wanted="cpu")
    if kind != "cpu" and index is None:
        index = "0"
    spec = DeviceSpec(type=kind, index=None if index is None else int(index), variant=match["variant"])
    spec.numerical_variant()
    return spec


def parse_devices(text: str | Iterable[str]) -> tuple[str, ...]:
    """Split a comma-separated list of specs, `auto` left as it is, without duplicates."""
    parts = text.split(",") if isinstance(text, str) else list(text)
    names: dict[str, None] = {}
    for part in (p.strip() for p in parts):
        if part:
            names[part if part == "auto" else parse_device(part).name] = None
    if not names:
        raise UsageError("no device given", where="--devices", wanted="auto, or a list such as cpu,cuda:0")
    return tuple(names)


def cpu_variants(flags: frozenset[str]) -> tuple[Variant, ...]:
    """Return the kernel variants that a CPU with these `/proc/cpuinfo` flags can run.

    AVX-512 for ATen means the F, DQ, BW and VL sets together; AVX2 for ATen needs FMA3 too.
    """
    needs = {
        "baseline": frozenset({"sse4_1"}),
        "avx2": frozenset({"avx2", "fma"}),
        "avx512": frozenset({"avx512f", "avx512dq", "avx512bw", "avx512vl", "fma"}),
    }
    return tuple(v for v in _VARIANTS if v.device_type == "cpu" and needs[v.name] <= flags)
