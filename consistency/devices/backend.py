"""The declaration of a device type: how a worker is confined to one device, how devices are counted and observed.

Everything that depends on the type of a device, other than the operations themselves, is a field here. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A named numerical variant of a device type: one chip stands for several numerical devices."""

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables set before the first operation, when kernels are chosen."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Settings of `consistency.worker.determinism` that differ from the pinned ones."""
    architecture: str | None = None
    """Name of the architecture group that this variant forms on a CPU."""
    needs: frozenset[str] = frozenset()
    """Flags of `/proc/cpuinfo` without which the variant does not run."""


FUSED_ATTENTION = ("flash", "mem_efficient", "cudnn")
"""Kernels of scaled dot product attention; each has a setting that turns it on, such as `sdpa_flash`."""

OWN_CHOICE = "sdpa"
"""The variant in which torch chooses between these kernels for each call, as it does where nobody pins anything."""


def attention_variant(name: str) -> Variant:
    """Return the variant that uses one kernel of scaled dot product attention where that takes the inputs.

    `OWN_CHOICE` may use any of them, and `math` none of the fused ones.
    """
    # `math` stays on beside it: it takes what the other does not, such as flash attention in float32, and rows say so
    settings = {"sdpa_math": True, **{f"sdpa_{kernel}": name in (kernel, OWN_CHOICE) for kernel in FUSED_ATTENTION}}
    return Variant(name=name, settings=settings)


_GENERIC_VARIANTS = (
    Variant(name="high", settings={"float32_matmul_precision": "high"}),
    Variant(name="medium", settings={"float32_matmul_precision": "medium"}),
    attention_variant("math"),
    attention_variant("flash"),
    attention_variant("mem_efficient"),
    attention_variant(OWN_CHOICE),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One type of device. The defaults suit any backend that implements `torch.accelerator`."""

    type: str
    """Its name in torch's device strings."""
    has_index: bool = True
    """Whether devices of this type are numbered."""
    visibility: str | None = None
    """Variable that lists the devices a process may see; None where a process cannot be confined to one device."""
    also_masked_by: tuple[str, ...] = ()
    """Further variables that show a part of its devices."""
    empty_hides_all: bool = True
    """Whether an empty list in `visibility` hides every device; for some backends it shows every device."""
    mask_is_ordered: bool = True
    """Whether `visibility` numbers the devices in its own order."""
    builds: tuple[str, ...] = ()
    """Names in torch's `version.py`, or a `sys.platform`, that show that the installed torch supports this backend.
    Backends that plug in through the entry point `torch.backends` need none."""
    by_nvml: bool = False
    """Whether NVML lists its devices and their identity; otherwise `torch.accelerator` is asked in a separate
    process."""
    shows_contexts: bool = False
    """Whether a context of this process on a device can be observed without creating one."""
    synchronizes_one: bool = True
    """Whether `synchronize` takes a device."""
    package: str | None = None
    """The package without which torch cannot use the type, for one that `torch.accelerator` does not list."""
    interface: str | None = None
    """The module that has the functions of `torch.<type>`, where torch has no such module."""
    asked_by: str | None = None
    """The variable by which a user says that this backend is to be used; without it none of its devices is found."""
    rounds_each_step: bool = False
    """Whether each step of an operation on half types gives a half type: a compiler is handed single steps."""
    computes_on_host: bool = False
    """Whether its kernels may run on the host's processor: its instruction set and the number of threads are then part
    of what decides their bits."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that every worker needs, on any device: libraries read them before the worker could set them."""
    pinned_environment: Mapping[str, str] = field(default_factory=dict)
    """Further variables that every worker needs, in the profile `pinned` alone."""
    inherited: tuple[str, ...] = ()
    """Variables that choose kernels or their precision: only the profile `deployed` passes the user's on."""
    recorded: tuple[str, ...] = ()
    """Further variables that influence the values computed, or where they are computed."""
    variants: tuple[Variant, ...] = _GENERIC_VARIANTS
    """The kernel variants that the backend offers; by default, those that torch switches alike on every device."""
    alternatives: Mapping[str, tuple[object, str]] = field(default_factory=dict)
    """For a bisection: pinned settings that apply to this backend, the value to switch to, and what that is called."""
    of_collectives: Mapping[str, str] = field(default_factory=dict)
    """For a bisection of what ranks do together: variables of the library of collectives, and the value to try."""

    def variant(self, name: str) -> Variant | None:
        """Return the variant of a name; None where there is none."""
        return next((variant for variant in self.variants if variant.name == name), None)
