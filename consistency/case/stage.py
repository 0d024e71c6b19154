"""What a stage declares of itself. No torch here.

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
"""Name of a stage that is declared; `consistency.case.stages.registered` checks one that is given."""


class Level(enum.StrEnum):
    """How much is checked: quick, standard, or overnight."""

    QUICK = "quick"
    STANDARD = "standard"
    THOROUGH = "thorough"


class Kind(enum.Enum):
    """What a stage's rows are about."""

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
    """What a user is told who asks for a stage, and does not give what it checks."""

    sentence: str
    wanted: str
    hint: str | None = None


EVERY_LEVEL: tuple[Level, ...] = tuple(Level)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One stage."""

    stage: Stage
    place: int | None = None
    """Its place in reports: each stage depends on those before it. One without stands behind all that have one."""
    kind: Kind
    """A user's tolerance applies to stages that compute."""
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
    """`module:function` that estimates its memory from a `Setting`: as a forward pass, unless it says more."""
    words: tuple[Word, ...] = ()
    """The words of a diagnosis that are its own."""
    model: Model = Model.REQUIRED
    needs_adapter: bool = False
    levels: tuple[Level, ...] = EVERY_LEVEL
    """The levels that run it without being asked."""
    on_base: bool = False
    """Whether it runs on the base alone, before the adapter is loaded."""
    after_adapter: str = ""
    """`module:function` that looks again once the adapter is loaded: takes a `Context`, and the digests of what loading
    it changed in the base, by name."""
    option: str = ""
    """Field of `Options` that asks for it; empty where `--stages` and the level alone do."""
    feeds_inputs: bool = False
    """Whether it runs the model on the case's inputs and is compared only with workers that had the same."""
    opens_devices: bool = False
    """Whether it uses other devices on purpose."""
    together: bool = False
    """Whether its workers form a group with those beside them."""
    by: tuple[Stage, ...] = ()
    """The stages whose float64 results judge it: they run too where it is asked for."""
    before: Stage | None = None
    """The stage before which it runs, if not in the order of reports."""
    whole: str = "everything"
    """Tensor of the row that stands for it as a whole."""
    passes: str = ""
    """`module:function` that tells the passes that it makes of the model from a `Setting`
    (`consistency.case.budget.passes`); empty where it makes none."""
    weight: float = 1.0
    """About how many seconds it takes of a small model, or each of its passes: for the progress."""
    needs: Needs | None = None
    """What a user is told who asks for it without its option; None where it runs without."""
    reads: tuple[Stage, ...] = ()
    """The stages whose float64 results it reads if they are there; they do not run for it."""
    reference_file: str = ""
    """The file of its float64 results in the scratch folder, for the other workers; empty where it keeps none."""
    with_equal_cards: bool = False
    """Whether level `thorough` runs it too where two cards are equal."""
    adapters: Adapters = Adapters.FIRST
    other_rows: bool = False
    """Whether each worker may have rows of its own, that no other one lacks: copies into its own device."""
    own_noise: bool = False
    """Whether passes with noise of a worker's own judge it and no other's do: it computes from its own numbers."""
    multiplies: bool = True
    """Whether it computes matrix products or attention, whose precision and kernels can be chosen."""
    leaves_out: tuple[str, ...] = ()
    """The checks of its kind that it never makes, for *not checked*."""
    named_where_left_out: bool = True
    """Whether *not checked* names it where it did not run."""
    short: str = ""
    """Its name in a table where there is no room for the whole one; empty where that is short."""
