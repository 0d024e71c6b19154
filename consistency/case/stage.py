"""The declaration of a stage. No torch here.

Everything that the tool has to know of a stage, apart from how it works, is its `StageSpec`. Those of the level
`standard` lie in `consistency/stages`, each in a folder whose module `spec` has it as `SPEC`; others come from plug-ins
(`consistency.plugins`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NewType

from consistency.numerics.rules import Rule
from consistency.numerics.words import Word

Stage = NewType("Stage", str)
"""Name of a declared stage; `consistency.case.stages.registered` makes one from a text, and checks it."""


class Level(enum.StrEnum):
    """How much is checked: quick, standard, or overnight."""

    QUICK = "quick"
    STANDARD = "standard"
    THOROUGH = "thorough"


class Kind(enum.Enum):
    """The kind of facts that a stage's rows state."""

    MOVES = "only moves bytes, and no byte may differ"
    COMPUTES = "computes, and so may round"
    FACTS = "checks facts against fixed limits"


class Model(enum.Enum):
    """Whether a stage needs the model."""

    UNUSED = enum.auto()
    OPTIONAL = enum.auto()
    REQUIRED = enum.auto()


class Adapters(enum.Enum):
    """Which adapters of a case with several a stage checks."""

    NONE = enum.auto()
    FIRST = enum.auto()
    ALL = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The error for a user who asks for a stage, and does not give what it checks."""

    sentence: str
    wanted: str
    hint: str | None = None


EVERY_LEVEL: tuple[Level, ...] = tuple(Level)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """The declaration of one stage."""

    stage: Stage
    place: int | None = None
    """Its place in reports: each stage depends on those before it. A stage with None stands behind all others."""
    kind: Kind
    """The kind of its rows; a user's tolerance applies to stages that compute."""
    rule: Rule
    """The rule of most of its rows, and of the row that explains why there are none."""
    worker: str
    """`module:function` that runs it: takes a `Context`, or a `Machine` where no model is loaded."""
    again: str = ""
    """`module:function` that repeats it during a soak: takes what `worker` takes, and a `Ledger`. Empty where there is
    nothing to repeat on the device."""
    items: str = ""
    """`module:function` that names its pytest items from headers alone; empty where `everything_else` is its only
    one."""
    cost: str = "consistency.case.budget.costs:forward"
    """`module:function` that estimates its memory from a `Setting`; by default, as a forward pass."""
    words: tuple[Word, ...] = ()
    """The words of a diagnosis that only this stage uses."""
    model: Model = Model.REQUIRED
    needs_adapter: bool = False
    levels: tuple[Level, ...] = EVERY_LEVEL
    """The levels that run it without being asked."""
    on_base: bool = False
    """Whether it runs on the base alone, before the adapter is loaded."""
    after_adapter: str = ""
    """`module:function` that checks again once the adapter is loaded: takes a `Context`, and the digests of the base's
    tensors that loading the adapter changed, by name."""
    option: str = ""
    """Field of `Options` that asks for the stage; empty where only `--stages` and the level do."""
    feeds_inputs: bool = False
    """Whether it runs the model on the case's inputs and is compared only with workers that had the same."""
    opens_devices: bool = False
    """Whether it uses other devices on purpose."""
    together: bool = False
    """Whether its workers form a group with those beside them."""
    by: tuple[Stage, ...] = ()
    """The stages whose float64 results judge this one: they run too where this one is asked for."""
    before: Stage | None = None
    """The stage before which it runs, if not in the order of reports."""
    whole: str = "everything"
    """Tensor name of the row that stands for the stage as a whole."""
    passes: str = ""
    """`module:function` that returns the stage's passes of the model, given a `Setting`
    (`consistency.case.budget.passes`); empty where it makes none."""
    weight: float = 1.0
    """Seconds that the stage, or each of its passes, takes of a small model, roughly: for the progress."""
    needs: Needs | None = None
    """The error for a user who asks for the stage without its option; None where it runs without."""
    reads: tuple[Stage, ...] = ()
    """The stages whose float64 results this one reads if they are there; they do not run for it."""
    reference_file: str = ""
    """The file of its float64 results in the scratch folder, for the other workers; empty where it keeps none."""
    with_equal_cards: bool = False
    """Whether level `thorough` runs it too where two cards are equal."""
    adapters: Adapters = Adapters.FIRST
    """The adapters that it checks in a case with several."""
    other_rows: bool = False
    """Whether a worker may have rows that other workers do not have, such as copies into its own device."""
    own_noise: bool = False
    """Whether a worker is judged by its own noisy passes alone, because it computes from its own numbers."""
    multiplies: bool = True
    """Whether it computes matrix products or attention, whose precision and kernels can be chosen."""
    leaves_out: tuple[str, ...] = ()
    """The checks of its kind that it never makes; a report lists them under *not checked*."""
    named_where_left_out: bool = True
    """Whether a report lists the stage under *not checked* where it did not run."""
    short: str = ""
    """Its name in a table without room for the whole name; empty where the whole name is short."""
