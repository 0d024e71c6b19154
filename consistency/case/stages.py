"""The stages, one row each, and which of them a level runs.

Everything that the tool has to know of a stage, apart from how it works, is its `StageSpec`. A new stage is a row here
and a module under `consistency.worker.stages`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from consistency.case.load_path import SIDES
from consistency.numerics.rules import Rule
from consistency.optional import is_there


class Stage(enum.StrEnum):
    """What is checked, in the order of reports: each depends on those before it."""

    TRANSFER = "transfer"
    OPERATORS = "operators"
    BASE = "base"
    ADAPTER = "adapter"
    MERGED = "merged"
    FORWARD = "forward"
    GRADIENT = "gradient"
    TRAJECTORY = "trajectory"
    ADAPTERS = "adapters"
    MEMORY = "memory"
    SHARDING = "sharding"
    GENERATION = "generation"
    COLLECTIVES = "collectives"
    REPLICAS = "replicas"
    SHARDS = "shards"
    TENSOR_PARALLEL = "tensor-parallel"
    WRAPPING = "wrapping"


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


EVERY_LEVEL: tuple[Level, ...] = tuple(Level)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One stage."""

    stage: Stage
    kind: Kind
    """A user's tolerance applies to stages that compute."""
    rule: Rule
    """Of most of its rows, and of the row that explains why there are none."""
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
    model: Model = Model.REQUIRED
    needs_adapter: bool = False
    levels: tuple[Level, ...] = EVERY_LEVEL
    """That run it without being asked."""
    option: str = ""
    """Field of `Options` that asks for it; empty where `--stages` and the level alone do."""
    feeds_inputs: bool = False
    """Whether it runs the model on the case's inputs and is compared only with workers that had the same."""
    opens_devices: bool = False
    """Whether it uses other devices on purpose."""
    together: bool = False
    """Whether its workers form a group with those beside them."""
    by: tuple[Stage, ...] = ()
    """Whose float64 results judge it: they run too where it is asked for."""
    before: Stage | None = None
    """Where it runs, if not in the order of `Stage`."""
    whole: str = "everything"
    """Tensor of the row that stands for it as a whole."""
    short: str = ""
    """Its name in a table where there is no room for the whole one; empty where that is short."""


_STAGES = "consistency.worker.stages"
_SOAK = "consistency.worker.soak"
_ITEMS = "consistency.pytest_plugin.item_names"
_COSTS = "consistency.case.budget.costs"
_FROM_STANDARD = (Level.STANDARD, Level.THOROUGH)

SPECS: dict[Stage, StageSpec] = {
    spec.stage: spec
    for spec in (
        StageSpec(
            stage=Stage.TRANSFER, kind=Kind.MOVES, rule=Rule.BITWISE, worker=f"{_STAGES}.transfer.stage:run",
            cost=f"{_COSTS}:without_model",
            short="trans",
            again=f"{_SOAK}.machine:transfer",
            model=Model.UNUSED, opens_devices=True,
        ),
        StageSpec(
            stage=Stage.OPERATORS, kind=Kind.COMPUTES, rule=Rule.BOUND, worker=f"{_STAGES}.operators.stage:run",
            cost=f"{_COSTS}:without_model",
            short="ops",
            again=f"{_SOAK}.machine:operators",
            model=Model.UNUSED,
        ),
        StageSpec(
            stage=Stage.BASE, kind=Kind.MOVES, rule=Rule.BITWISE, worker=f"{_STAGES}.base:run",
            cost=f"{_COSTS}:base",
            again=f"{_SOAK}.weights:base",
            items=f"{_ITEMS}:base_items",
        ),
        StageSpec(
            stage=Stage.ADAPTER, kind=Kind.MOVES, rule=Rule.BITWISE, worker=f"{_STAGES}.adapter.stage:run",
            cost=f"{_COSTS}:adapter",
            short="adapt",
            again=f"{_SOAK}.weights:adapter",
            items=f"{_ITEMS}:adapter_items", needs_adapter=True,
        ),
        StageSpec(
            stage=Stage.MERGED, kind=Kind.COMPUTES, rule=Rule.BOUND, worker=f"{_STAGES}.merged.stage:run",
            cost=f"{_COSTS}:merged",
            short="merge",
            again=f"{_SOAK}.weights:merged",
            items=f"{_ITEMS}:merged_items", needs_adapter=True,
        ),
        StageSpec(
            stage=Stage.FORWARD, kind=Kind.COMPUTES, rule=Rule.BLOCK, worker=f"{_STAGES}.forward:run",
            short="fwd",
            again=f"{_SOAK}.computed:forward",
            items=f"{_ITEMS}:forward_items", levels=_FROM_STANDARD, feeds_inputs=True, option="engine_outputs",
        ),
        StageSpec(
            stage=Stage.GRADIENT, kind=Kind.COMPUTES, rule=Rule.BLOCK, worker=f"{_STAGES}.gradient.stage:run",
            cost=f"{_COSTS}:gradient",
            short="grad",
            again=f"{_SOAK}.computed:gradient",
            needs_adapter=True, levels=_FROM_STANDARD, feeds_inputs=True, whole="adapter_on",
            before=Stage.FORWARD,  # whose merge leaves a tied weight's pages private: less memory is held here
        ),
        StageSpec(  # on request alone: every step takes some passes on the CPU
            stage=Stage.TRAJECTORY, kind=Kind.COMPUTES, rule=Rule.BLOCK, worker=f"{_STAGES}.trajectory.stage:run",
            cost=f"{_COSTS}:trajectory",
            short="traj",
            needs_adapter=True, levels=(), feeds_inputs=True, option="steps", before=Stage.FORWARD, whole="curve",
        ),
        StageSpec(  # with several adapters alone
            stage=Stage.ADAPTERS, kind=Kind.COMPUTES, rule=Rule.BITWISE, worker=f"{_STAGES}.adapters.stage:run",
            cost=f"{_COSTS}:adapters",
            short="multi",
            needs_adapter=True, levels=(), option="adapters",
        ),
        StageSpec(
            stage=Stage.MEMORY, kind=Kind.FACTS, rule=Rule.LIMIT, worker=f"{_STAGES}.memory:run",
            cost=f"{_COSTS}:memory",
            short="mem",
            model=Model.OPTIONAL, levels=_FROM_STANDARD,
        ),
        StageSpec(  # it loads the base twice more, which takes too long for the level `standard`
            stage=Stage.SHARDING, kind=Kind.FACTS, rule=Rule.LIMIT, worker=f"{_STAGES}.sharding.stage:run",
            cost=f"{_COSTS}:nothing",
            short="shard",
            levels=(Level.THOROUGH,), option="device_map", opens_devices=True,
        ),
        StageSpec(  # several passes of one token at a time, so not of the level `standard`
            stage=Stage.GENERATION, kind=Kind.FACTS, rule=Rule.LIMIT, worker=f"{_STAGES}.generation.stage:run",
            cost=f"{_COSTS}:nothing",
            short="gen", items=f"{_ITEMS}:generation_items",
            levels=(Level.THOROUGH,), feeds_inputs=True, by=(Stage.FORWARD,),
        ),
        StageSpec(  # at level `thorough` too, where two cards are equal: `workflows/planning.py`
            stage=Stage.COLLECTIVES, kind=Kind.COMPUTES, rule=Rule.BOUND, worker=f"{_STAGES}.collectives.stage:run",
            cost=f"{_COSTS}:collectives",
            short="coll",
            model=Model.UNUSED, levels=(), opens_devices=True, together=True,
        ),
        StageSpec(
            stage=Stage.REPLICAS, kind=Kind.COMPUTES, rule=Rule.BOUND, worker=f"{_STAGES}.replicas.stage:run",
            cost=f"{_COSTS}:replicas",
            short="repl",
            needs_adapter=True, levels=(), feeds_inputs=True, opens_devices=True, together=True,
        ),
        StageSpec(
            stage=Stage.SHARDS, kind=Kind.COMPUTES, rule=Rule.BOUND, worker=f"{_STAGES}.shards.stage:run",
            cost=f"{_COSTS}:shards",
            short="fsdp",
            needs_adapter=True, levels=(), feeds_inputs=True, opens_devices=True, together=True,
        ),
        StageSpec(
            stage=Stage.TENSOR_PARALLEL, kind=Kind.COMPUTES, rule=Rule.BLOCK,
            worker=f"{_STAGES}.tensor_parallel.stage:run",
            cost=f"{_COSTS}:tensor_parallel",
            short="tp",
            needs_adapter=True, levels=(), feeds_inputs=True, opens_devices=True, together=True,
            by=(Stage.FORWARD, Stage.GRADIENT),
        ),
        StageSpec(
            stage=Stage.WRAPPING, kind=Kind.FACTS, rule=Rule.LIMIT,
            worker="consistency.extras.peft_api.wrapping.stage:run",
            cost=f"{_COSTS}:nothing",
            short="wrap",
            levels=(), option="wrapper",
        ),
    )
    if is_there(spec.worker)
}  # fmt: skip
SPECS = {stage: SPECS[stage] for stage in Stage if stage in SPECS}
"""Every stage, in the order of `Stage`; one whose code was deleted is none."""

_ORDER = {stage.value: place for place, stage in enumerate(Stage)}


def stage_order(name: str) -> int:
    """Return the place of a stage among all, behind them where it is unknown."""
    return _ORDER.get(name, len(_ORDER))


def stages_of(choose: Callable[[StageSpec], bool]) -> tuple[Stage, ...]:
    """Return the stages whose rows are chosen."""
    return tuple(stage for stage, spec in SPECS.items() if choose(spec))


def requested(level: Level, options: Any) -> tuple[Stage, ...]:
    """Return the stages that a level runs, with those that an option or a case's field of that name asks for."""
    return stages_of(lambda spec: level in spec.levels or bool(spec.option and getattr(options, spec.option)))


def with_judges(asked: Sequence[Stage]) -> tuple[Stage, ...]:
    """Return stages, and after them those whose results judge them."""
    judges = dict.fromkeys(other for stage in asked if stage in SPECS for other in SPECS[stage].by if other in SPECS)
    return (*asked, *(stage for stage in judges if stage not in asked))


def run_order(stages: Iterable[Stage], *, sees_others: bool) -> list[StageSpec]:
    """Return the stages in the order in which a worker runs them.

    `transfer` opens every device that it sees and leaves correct bytes in memory that is used again: where there are
    other devices it comes last, so that loading is observed on untouched ones.
    """
    order: list[Stage] = []
    for stage, spec in SPECS.items():
        order.insert(order.index(spec.before) if spec.before in order else len(order), stage)
    wanted = set(stages)
    return [SPECS[s] for s in sorted(order, key=lambda s: sees_others and s is Stage.TRANSFER) if s in wanted]


MOVES_WEIGHTS = stages_of(lambda spec: spec.kind is Kind.MOVES and spec.model is Model.REQUIRED)
"""Stages that follow the weights from their file to the device."""

COMPUTES_WITH_WEIGHTS = stages_of(lambda spec: spec.kind is Kind.COMPUTES and spec.model is Model.REQUIRED)
"""Stages in which wrong weights show too."""

MODEL_LESS: tuple[Stage, ...] = stages_of(lambda spec: spec.model is not Model.REQUIRED)
"""Stages that check the machine alone. Of these `memory` checks the model too, where there is one."""

HOST_STAGES: tuple[Stage, ...] = stages_of(lambda spec: spec.model is Model.UNUSED and bool(spec.levels))
"""Of these the stages of a level that never check a model: they are the same for every case of a suite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A check that a level leaves out, and when a report does not name it."""

    text: str
    part_of: Stage | None = None
    """The stage that it belongs to: where the whole stage is left out, its parts are not named too."""
    made_by_repeat: bool = False
    """Whether `--repeat` makes it nevertheless."""
    made_by_soak: bool = False
    """Whether a soak makes it nevertheless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelPlan:
    """What a level means."""

    stages: tuple[Stage, ...]
    safe_merge: bool
    reload: bool
    sides: tuple[str, ...]
    """The load paths that it checks besides each default one."""
    sequences: int
    tokens: int
    repeat: int
    float64_merges: int
    """Elements of all matrices of the largest model that is merged in float64, and whose blocks are compared with the
    adapter off and merged too."""
    left_out: tuple[LeftOut, ...]
    """The checks of its own stages that it leaves out."""

    @property
    def not_checked(self) -> tuple[str, ...]:
        """Return what it leaves out, in words."""
        return tuple(check.text for check in self.left_out)

    def is_large(self, matrix_elements: int) -> bool:
        """Return whether a model of this size gets half of the sequences, and of the passes with noise of gradients."""
        return _LARGE < matrix_elements > self.float64_merges


_LARGE = 1 << 28
"""Elements of matrices: four passes with gradients take a minute of a core then."""

MOST_MERGED = 1 << 28
"""Elements of the largest layer that is merged in float64, at any level: three arrays of it take 6 GiB."""

_ANY_SIZE = 1 << 62
_IN_SECONDS = 1 << 27
"""Four merges and passes in float64 of one sequence take 28 ns per element on one core (a Llama of 0.17 B): 4 s."""

_LARGE_COPIES = LeftOut(text="copies of 256 MiB and more or with pinned memory", part_of=Stage.TRANSFER)
_MOST_OPERATORS = LeftOut(text="most operators", part_of=Stage.OPERATORS)
_LARGE_OPERATORS = LeftOut(text="large operators", part_of=Stage.OPERATORS)
_SAFE_MERGE = LeftOut(text="safe_merge")
_LOADED_AGAIN = LeftOut(text="the adapter loaded again over NaN", made_by_repeat=True)
_SECOND_RUN = LeftOut(text="a second run on the same device", made_by_repeat=True, made_by_soak=True)

LEVELS: dict[Level, LevelPlan] = {
    Level.QUICK: LevelPlan(
        stages=stages_of(lambda spec: Level.QUICK in spec.levels),
        safe_merge=False, reload=False, sides=(), sequences=1, tokens=16, repeat=1,
        float64_merges=0,
        left_out=(
            _LARGE_COPIES, _MOST_OPERATORS, _LARGE_OPERATORS, _SAFE_MERGE, _LOADED_AGAIN, _SECOND_RUN,
        ),
    ),
    # `reload` takes some tenths of a second; with the default load path, these sides separate copy path, device and
    # dtype; a classifier answers once per sequence, and few answers allow a wide factor: `error_factor`
    Level.STANDARD: LevelPlan(
        stages=stages_of(lambda spec: Level.STANDARD in spec.levels),
        safe_merge=True, reload=True, sides=("cpu", "low-memory"), sequences=8, tokens=16, repeat=1,
        float64_merges=_IN_SECONDS,
        left_out=(_LARGE_COPIES, _LARGE_OPERATORS, _SECOND_RUN),
    ),
    Level.THOROUGH: LevelPlan(
        stages=stages_of(lambda spec: Level.THOROUGH in spec.levels),
        safe_merge=True, reload=True, sides=SIDES, sequences=16, tokens=64, repeat=2,
        float64_merges=_ANY_SIZE, left_out=(),
    ),
}  # fmt: skip
