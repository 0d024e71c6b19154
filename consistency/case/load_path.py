"""The load paths: the ways in which an adapter's bytes can reach a device, and their names.

A load path is four choices: whether other devices are visible, the device that PEFT reads the file onto, whether the
parameters are created on the meta device first, and whose loader it is. `isolated` and `shared` are PEFT's default
path with one visible device and with all of them; every other path is an alternative to one of these, and its name
gives the difference.
"""

from __future__ import annotations

import enum
from typing import Literal

TorchDevice = Literal["cpu", "target"]


class LoadPath(enum.StrEnum):
    """How the adapter's bytes reach the device.

    With one visible device per worker (`isolated`) there is no copy between devices, which hides a broken one; with all
    of them visible (`shared`) PEFT's default loading goes through device 0. `+cpu` and `+target` are PEFT's
    `torch_device`, `+low-memory` is `low_cpu_mem_usage=True`, `+transformers` the `load_adapter` of a transformers
    model, which has no `torch_device`.
    """

    ISOLATED = "isolated"
    ISOLATED_CPU = "isolated+cpu"
    ISOLATED_TARGET = "isolated+target"
    ISOLATED_LOW_MEMORY = "isolated+low-memory"
    ISOLATED_CPU_LOW_MEMORY = "isolated+cpu+low-memory"
    ISOLATED_TARGET_LOW_MEMORY = "isolated+target+low-memory"
    ISOLATED_TRANSFORMERS = "isolated+transformers"
    ISOLATED_TRANSFORMERS_LOW_MEMORY = "isolated+transformers+low-memory"
    SHARED = "shared"
    SHARED_CPU = "shared+cpu"
    SHARED_TARGET = "shared+target"
    SHARED_LOW_MEMORY = "shared+low-memory"
    SHARED_CPU_LOW_MEMORY = "shared+cpu+low-memory"
    SHARED_TARGET_LOW_MEMORY = "shared+target+low-memory"
    SHARED_TRANSFORMERS = "shared+transformers"
    SHARED_TRANSFORMERS_LOW_MEMORY = "shared+transformers+low-memory"

    @property
    def main(self) -> LoadPath:
        """Return PEFT's default path with the same devices visible, which the other stages of a worker use."""
        return LoadPath(self.value.partition("+")[0])

    @property
    def side(self) -> str:
        """Return the part of the name after the first `+`, such as `cpu+low-memory`; empty for the default path."""
        return self.value.partition("+")[2]

    @property
    def is_main(self) -> bool:
        return not self.side

    @property
    def torch_device(self) -> TorchDevice | None:
        """Return the device that PEFT reads the file onto; None leaves it to PEFT."""
        if "+cpu" in self:
            return "cpu"
        return "target" if "+target" in self else None

    @property
    def low_memory(self) -> bool:
        return "+low-memory" in self

    @property
    def by_transformers(self) -> bool:
        return "+transformers" in self

    @property
    def chooses_device(self) -> bool:
        """Return whether PEFT chooses the device that it reads the file onto: device 0, wherever the model is."""
        return self.torch_device is None and not self.by_transformers

    @property
    def without_low_memory(self) -> LoadPath:
        return LoadPath(self.value.removesuffix("+low-memory"))

    def beside(self, main: LoadPath) -> LoadPath:
        """Return the load path with the same side as this one, and the same visible devices as `main`."""
        return LoadPath(f"{main.main.value}+{self.side}") if self.side else main.main


GRAMMAR = "isolated or shared, with +cpu, +target or +transformers, with +low-memory; or all"
"""The names of load paths, in words."""

SIDES: tuple[str, ...] = tuple(
    load_path.side for load_path in LoadPath if load_path.main is LoadPath.ISOLATED and load_path.side
)
"""The sides of all alternatives; they are the same for both choices of visible devices."""


def main_path(name: str) -> str:
    """Return the name of the default path of a load path that a capture names, even one that is unknown here."""
    return name.partition("+")[0]


def is_alternative(name: str) -> bool:
    """Return whether a load path that a capture names is an alternative to a default one."""
    return "+" in name
