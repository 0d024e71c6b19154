"""A CASE: the base, the adapter and how they are checked, complete and immutable."""

from __future__ import annotations

import msgspec

from consistency.case.load_path import LoadPath
from consistency.case.options import Dtype
from consistency.case.stages import LARGE_COPIES, LEVELS, Level, LevelPlan, Stage
from consistency.case.tolerance import Override


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"load_paths": "roads"}):
    """One base model and one adapter, and how they are looked at.

    Attributes
    ----------
    name : str
        Short name for titles and test items.
    base : str
        A folder, or `python:package.module:function`, a factory without arguments that returns a module. Empty where
        the machine alone is looked at: every stage is then one of `MODEL_LESS`.
    adapter : str or None
        A folder saved by PEFT; None looks at the base alone.
    dtype : str
        What the base is loaded as; `auto` is what its file declares.
    roads : tuple of Road or None
        None leaves the choice to the level and the devices at hand: isolated, and shared too where there are several
        accelerators, each with the level's side roads. A side road brings the default road that it is beside with it.
    inputs : str or None
        A safetensors file with the model's keyword arguments; None makes them from the model's config.
    repeat : int
        How often each computed stage is run on each device.
    only : tuple of str
        `stage::layer` prefixes to look at; empty looks at everything.
    keep : bool
        Keep every computed tensor in full, not only where something is to be said.
    tolerance : tuple of Override
        What the user allows instead of the derived bounds; the last one that matches a tensor wins.
    wrapper : str or None
        `python:package.module:function`, which takes the plain base and returns it wrapped.
    device_map : str or None
        How the base is sharded beside the ways that the devices at hand suggest: `auto`, `balanced`, `sequential`, or a
        JSON file of module names to devices.
    allow_pickle, trust_remote_code : bool
        Off unless asked for.
    """

    name: str
    base: str
    adapter: str | None = None
    dtype: Dtype = "auto"
    stages: tuple[Stage, ...] = LEVELS[Level.STANDARD].stages
    load_paths: tuple[LoadPath, ...] | None = None
    level: Level = Level.STANDARD
    inputs: str | None = None
    repeat: int = 1
    only: tuple[str, ...] = ()
    keep: bool = False
    tolerance: tuple[Override, ...] = ()
    wrapper: str | None = None
    device_map: str | None = None
    allow_pickle: bool = False
    trust_remote_code: bool = False

    @property
    def plan(self) -> LevelPlan:
        return LEVELS[self.level]

    @property
    def factory(self) -> str | None:
        """Return `package.module:function` of a base that is made by a function, None for a folder."""
        return self.base.removeprefix("python:") if self.base.startswith("python:") else None

    @property
    def needs_model(self) -> bool:
        """Tell whether any stage looks at the model; else it is not even loaded."""
        return bool(self.base) and any(stage not in (Stage.TRANSFER, Stage.OPERATORS) for stage in self.stages)

    @property
    def reloads(self) -> bool:
        """Tell whether the adapter is loaded again over poison."""
        return self.plan.reload or self.repeat > 1

    def not_looked_at(self) -> tuple[str, ...]:
        """Name what this run left out, for the report."""
        skipped = [f"stage {s}" for s in Stage if s not in self.stages]
        rest = [text for text in self.plan.not_looked_at if text not in list(Stage)]
        if Stage.OPERATORS not in self.stages:
            rest = [text for text in rest if "operators" not in text]
        if Stage.TRANSFER not in self.stages:
            rest = [text for text in rest if text != LARGE_COPIES]
        if self.repeat > 1:
            rest = [text for text in rest if "again" not in text and "second run" not in text]
        return (*skipped, *rest)
