"""The roads that an adapter's bytes can take to a device, and their names.

A road is four choices: whether other devices are visible, which device PEFT is told to read the file onto, whether the
parameters are made on the meta device first, and whose loader it is. `isolated` and `shared` are PEFT's default road,
alone and among other devices; every other road is a side road of one of these, and its name says what is different.
"""

from __future__ import annotations

import enum
from typing import Literal

TorchDevice = Literal["cpu", "target"]


class LoadPath(enum.StrEnum):
    """How the adapter's bytes reach the device.

    With one visible device per worker (`isolated`) no copy between devices can happen, which hides a broken one; with
    all of them visible (`shared`) PEFT's default loading goes through device 0. `+cpu` and `+target` are PEFT's
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
        """Return PEFT's default road with the same devices visible: the one that a worker's other stages stand on."""
        return LoadPath(self.value.partition("+")[0])

    @property
    def side(self) -> str:
        """Return what is different from the default road, without the leading `+`; empty for the default road."""
        return self.value.partition("+")[2]

    @property
    def is_main(self) -> bool:
        return not self.side

    @property
    def torch_device(self) -> TorchDevice | None:
        """Return what PEFT is told to read the file onto; None leaves it to PEFT."""
        parts = self.side.split("+")
        return "cpu" if "cpu" in parts else "target" if "target" in parts else None

    @property
    def low_memory(self) -> bool:
        return "low-memory" in self.side.split("+")

    @property
    def by_transformers(self) -> bool:
        return "transformers" in self.side.split("+")

    @property
    def chooses_device(self) -> bool:
        """Tell whether PEFT chooses where to read the file onto: device 0, whatever the model's own."""
        return self.torch_device is None and not self.by_transformers

    @property
    def without_low_memory(self) -> LoadPath:
        return LoadPath(self.value.removesuffix("+low-memory"))

    def beside(self, main: LoadPath) -> LoadPath:
        """Return the same road with other devices visible, or without."""
        return LoadPath(f"{main.main.value}+{self.side}") if self.side else main.main


GRAMMAR = "isolated or shared, with +cpu, +target or +transformers, with +low-memory; or all"
"""What the name of a road can be, in words."""

SIDES: tuple[str, ...] = tuple(
    load_path.side for load_path in LoadPath if load_path.main is LoadPath.ISOLATED and load_path.side
)
"""What can be different from the default road, whichever devices are visible."""


def main_path(name: str) -> str:
    """Return the default road of a road that a capture names, whatever it holds."""
    return name.partition("+")[0]


def is_alternative(name: str) -> bool:
    """Tell whether a road that a capture names is beside a default road."""
    return "+" in name
