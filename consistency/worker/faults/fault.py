"""Declare a planted fault: the function that plants it, and the trial that has to find it. No torch here."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from consistency.case.load_path import LoadPath
from consistency.case.stage import Level, Stage


class Need(enum.Enum):
    """What a case must have so that a fault changes something in it, and so that nothing but the fault explains it."""

    ADAPTER = enum.auto()
    ANOTHER_WORKER = enum.auto()
    RANKS = enum.auto()
    THREE_RANKS = enum.auto()
    SPLIT = enum.auto()
    WEIGHT_FILE = enum.auto()
    FLOAT32_FILE = enum.auto()
    FLOAT32_MODEL = enum.auto()
    FLOAT32_WEIGHT = enum.auto()
    FLOATING_WEIGHT = enum.auto()
    EXACT_KERNELS = enum.auto()
    FLOAT32_ADAPTER = enum.auto()
    TUNED_LAYERS = enum.auto()
    TWO_OF_A_SHAPE = enum.auto()
    LORA_A = enum.auto()
    LORA_B = enum.auto()
    ZERO_LORA_B = enum.auto()
    TRAINED = enum.auto()
    LORA_LINEAR = enum.auto()
    LORA_LINEAR_OR_FLOAT32 = enum.auto()
    TOKENS = enum.auto()
    POSITIONS = enum.auto()
    KEYS = enum.auto()
    QUANTIZED = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault and the finding it must cause."""

    name: str
    plant: str
    """`module:function` that plants it, and returns a function that removes it."""
    expected: str
    """Kind of the finding that has to name it."""
    stages: tuple[Stage, ...]
    """Stages of the trial, no more than it needs; the first one finds the fault."""
    case: str | None = None
    """The case that it stands for, of C1 to C5 of `docs/cases.md`."""
    words: str = ""
    """A regular expression that the finding's message has to match, besides its kind."""
    repeat: int = 1
    """Repetitions of the trial's computations (`--repeat`)."""
    two_devices: bool = False
    """Whether it needs a second accelerator, and a worker that sees both."""
    offloads: bool = False
    """Whether it needs an accelerator whose base is offloaded."""
    load_paths: tuple[LoadPath, ...] | None = None
    """Load paths that distinguish it from other causes, where those of the level do not."""
    wrapper: str | None = None
    """The function that wraps the base on every worker."""
    soak_s: float | None = None
    """Seconds for which its worker repeats, where one run does not meet it."""
    several: bool = False
    """Whether its case has a second adapter."""
    without_form: str = ""
    """Kind of the finding where the method's merged weights have no closed form, so that no cause is searched for."""
    shows_in: str = ""
    """Part of the name of the tensors or facts that show it; empty where any of its stage can."""
    base: str | None = None
    """A base without an adapter, where the built-in case lacks the part that the fault is in."""
    is_note: bool = False
    """Whether the finding is a note, which reports no error."""
    one_layer: bool = False
    """Whether one merged layer is enough to check."""
    level: Level | None = None
    """The level whose sizes show it, where those of the run do not."""
    steps: int | None = None
    """Steps of a training, where fewer than usual show it."""
    needs: tuple[Need, ...] = ()
    """Its needs besides a model, and an adapter where its stages need one."""

    @property
    def accelerators(self) -> int:
        """Return the number of accelerators that it needs."""
        return 2 if self.two_devices else int(self.offloads)
