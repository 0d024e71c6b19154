"""Collect all stages, in the order of reports, and the stages of each level. No torch here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from consistency import plugins
from consistency.case import standard
from consistency.case.load_path import SIDES
from consistency.case.stage import Kind, Level, Model, Stage, StageSpec
from consistency.numerics.rules import Rule
from consistency.optional import is_there


class _Stages(dict[Stage, StageSpec]):
    """The declared stages by name; a stage that is not declared here has a general declaration.

    A capture may come from a machine with a plug-in that this one lacks. Its rows say themselves by which rule they are
    judged, so that they are compared nevertheless.
    """

    def __missing__(self, stage: Stage) -> StageSpec:
        return StageSpec(stage=stage, kind=Kind.COMPUTES, rule=Rule.LIMIT, worker="", levels=())


def _declared() -> Iterator[StageSpec]:
    """Yield the declarations of this package's stages, of its extras, and of other distributions.

    A stage of another distribution whose name is taken is left out and noted; the rest of the run is not affected.
    """
    names: set[Stage] = set()
    for module in plugins.modules_of("stages", "spec"):
        names.add(module.SPEC.stage)
        yield module.SPEC
    for reference, spec in plugins.offered("stages"):
        problem = _problem(spec, names)
        if not problem:
            names.add(spec.stage)
            yield spec
        elif plugins.is_own(reference):
            raise TypeError(f"{reference}: {problem}")
        else:
            plugins.note_failure(f"the stage {reference}", TypeError(problem))


def _problem(spec: object, names: set[Stage]) -> str:
    """Return why a plug-in's stage cannot be used; empty where it can. `names` are those of the stages before it."""
    if not isinstance(spec, StageSpec):
        return f"not a {StageSpec.__module__}.StageSpec, but {type(spec).__name__}"
    return f"there is a stage {spec.stage} already" if spec.stage in names else ""


def _report_place(spec: StageSpec) -> float:
    """Return the place of a stage in reports, for sorting; stages without one come last."""
    return math.inf if spec.place is None else spec.place


SPECS: dict[Stage, StageSpec] = _Stages(
    (spec.stage, spec) for spec in sorted(_declared(), key=_report_place) if is_there(spec.worker)
)
"""Every stage by name, in the order of reports; a stage whose code was deleted is left out."""


def registered(name: str) -> Stage:
    """Return a name as a `Stage`.

    Raises
    ------
    ValueError
        No stage of this name is declared here.
    """
    if name not in SPECS:
        raise ValueError(f"no stage of this name is declared: {name}")
    return Stage(name)


_ORDER = {stage: place for place, stage in enumerate(SPECS)}


def stage_order(name: str) -> int:
    """Return the place of a stage among all, for sorting; an unknown stage comes behind them."""
    return _ORDER.get(Stage(name), len(_ORDER))


def stages_of(choose: Callable[[StageSpec], bool]) -> tuple[Stage, ...]:
    """Return the stages whose declarations `choose` accepts, in the order of reports."""
    return tuple(stage for stage, spec in SPECS.items() if choose(spec))


def requested(level: Level, options: Any) -> tuple[Stage, ...]:
    """Return the stages that a level runs, and those that an option asks for.

    `options` is an `Options`, or a `Case` with fields of the same names.
    """
    return stages_of(lambda spec: level in spec.levels or bool(spec.option and getattr(options, spec.option)))


def with_judges(asked: Sequence[Stage]) -> tuple[Stage, ...]:
    """Return the stages, and after them those whose results judge them, each once."""
    judges: dict[Stage, None] = {}
    for stage in asked:
        # SPECS declares an unknown stage too, so a missing one has to be looked for by its name
        if stage in SPECS:
            judges.update(dict.fromkeys(judge for judge in SPECS[stage].by if judge in SPECS))
    return (*asked, *(stage for stage in judges if stage not in asked))


def run_order(stages: Iterable[Stage], *, sees_others: bool) -> list[StageSpec]:
    """Return the stages in the order in which a worker runs them.

    `transfer` opens every device that it sees and leaves correct bytes in memory that is used again: where there are
    other devices (`sees_others`) it comes last, so that loading is observed on untouched ones.
    """
    order: list[Stage] = []
    for stage, spec in SPECS.items():
        position = order.index(spec.before) if spec.before in order else len(order)
        order.insert(position, stage)
    if sees_others:
        order.sort(key=lambda stage: stage == standard.TRANSFER)
    wanted = set(stages)
    return [SPECS[stage] for stage in order if stage in wanted]


MOVES_WEIGHTS = stages_of(lambda spec: spec.kind is Kind.MOVES and spec.model is Model.REQUIRED)
"""Stages that follow the weights from their file to the device."""

COMPUTES_WITH_WEIGHTS = stages_of(lambda spec: spec.kind is Kind.COMPUTES and spec.model is Model.REQUIRED)
"""Stages in which wrong weights show too."""

MODEL_LESS: tuple[Stage, ...] = stages_of(lambda spec: spec.model is not Model.REQUIRED)
"""Stages that check the machine alone; `memory` is one of them, and checks the model too where there is one."""

HOST_STAGES: tuple[Stage, ...] = stages_of(lambda spec: spec.model is Model.UNUSED and bool(spec.levels))
"""Stages of a level that never check a model: they are the same for every case of a suite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A check that a level leaves out, and when a report does not name it."""

    text: str
    part_of: Stage | None = None
    """The stage that the check belongs to: where the whole stage is left out, its parts are not named too."""
    made_by_repeat: bool = False
    """Whether `--repeat` makes the check nevertheless."""
    made_by_soak: bool = False
    """Whether a soak makes the check nevertheless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelPlan:
    """The work that a level stands for."""

    stages: tuple[Stage, ...]
    safe_merge: bool
    """Whether adapters are also merged with PEFT's `safe_merge`."""
    reload: bool
    """Whether the adapter is loaded again over NaN."""
    sides: tuple[str, ...]
    """The load paths that are checked besides each default one, by `LoadPath.side`."""
    sequences: int
    """Sequences of the inputs that are made."""
    tokens: int
    """Tokens of each sequence, at most."""
    long_tokens: int
    """Tokens of the long text, at most; 0 without one."""
    repeat: int
    """Runs of each stage that computes."""
    float64_merges: int
    """Elements of all matrices of the largest model that is merged in float64, and whose blocks are compared with the
    adapter off and merged too."""
    left_out: tuple[LeftOut, ...]
    """The checks of the level's own stages that it leaves out."""

    @property
    def not_checked(self) -> tuple[str, ...]:
        """Return the checks that the level leaves out, in words."""
        return tuple(check.text for check in self.left_out)

    def is_large(self, matrix_elements: int) -> bool:
        """Return whether a model of this size gets half of the sequences, and of the passes with noise of gradients."""
        return _LARGE < matrix_elements > self.float64_merges


_LARGE = 1 << 28
"""Elements of matrices: four passes with gradients take a minute of a core then."""

MOST_MERGED = 1 << 28
"""Elements of the largest layer that is merged in float64, at any level: three arrays of it take 6 GiB."""

_LONG, _LONGEST = 515, 4099
"""Tokens of the long texts: three more than 512 and 4,096, so that kernels for more rows are met, and the last tile, or
block of keys, is not whole."""

_ANY_SIZE = 1 << 62
_IN_SECONDS = 1 << 27
"""Four merges and passes in float64 of one sequence take 28 ns per element on one core (a Llama of 0.17 B): 4 s."""

_LARGE_COPIES = LeftOut(text="copies of 256 MiB and more or with pinned memory", part_of=standard.TRANSFER)
_MOST_OPERATORS = LeftOut(text="most operators", part_of=standard.OPERATORS)
_LARGE_OPERATORS = LeftOut(text="large operators", part_of=standard.OPERATORS)
_SAFE_MERGE = LeftOut(text="safe_merge")
_LOADED_AGAIN = LeftOut(text="the adapter loaded again over NaN", made_by_repeat=True)
_SECOND_RUN = LeftOut(text="a second run on the same device", made_by_repeat=True, made_by_soak=True)

LEVELS: dict[Level, LevelPlan] = {
    Level.QUICK: LevelPlan(
        stages=stages_of(lambda spec: Level.QUICK in spec.levels),
        safe_merge=False, reload=False, sides=(), sequences=1, tokens=16, long_tokens=0, repeat=1,
        float64_merges=0,
        left_out=(
            _LARGE_COPIES, _MOST_OPERATORS, _LARGE_OPERATORS, _SAFE_MERGE, _LOADED_AGAIN, _SECOND_RUN,
        ),
    ),
    # `reload` takes some tenths of a second; with the default load path, these sides separate copy path, device and
    # dtype; a classifier answers once per sequence, and few answers allow a wide factor: `error_factor`
    Level.STANDARD: LevelPlan(
        stages=stages_of(lambda spec: Level.STANDARD in spec.levels),
        safe_merge=True, reload=True, sides=("cpu", "low-memory"), sequences=8, tokens=16,
        long_tokens=_LONG, repeat=1, float64_merges=_IN_SECONDS,
        left_out=(_LARGE_COPIES, _LARGE_OPERATORS, _SECOND_RUN),
    ),
    Level.THOROUGH: LevelPlan(
        stages=stages_of(lambda spec: Level.THOROUGH in spec.levels),
        safe_merge=True, reload=True, sides=SIDES, sequences=16, tokens=64, long_tokens=_LONGEST,
        repeat=2, float64_merges=_ANY_SIZE, left_out=(),
    ),
}  # fmt: skip
