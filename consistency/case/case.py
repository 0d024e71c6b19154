"""The case: the base, the adapter and how they are checked, complete and immutable."""

from __future__ import annotations

import msgspec

from consistency.case import standard
from consistency.case.engine_file import EngineFile
from consistency.case.load_path import LoadPath
from consistency.case.named_adapters import NamedAdapter
from consistency.case.options import Dtype, Placement, Profile
from consistency.case.profile import Switch
from consistency.case.stage import Adapters, Level, Model, Stage
from consistency.case.stages import HOST_STAGES, LEVELS, SPECS, LeftOut, LevelPlan
from consistency.case.tolerance import Override


def in_other_case(stage: str, case: str) -> str:
    """Return how a report names a stage that was left to another case of the same suite."""
    return f"stage {stage} (checked in case {case})"


class Fit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The smaller inputs of a case that would not fit into memory otherwise.

    Attributes
    ----------
    sequences, tokens : int or None
        Number of sequences that are made, and of tokens in each: fewer than the level has. The inputs that are left out
        are not checked. None leaves the number to the level and to the stage.
    long_tokens : int or None
        Number of tokens of the long text; 0 leaves it out.
    """

    sequences: int | None = None
    tokens: int | None = None
    long_tokens: int | None = None


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One base model and one adapter or several, and how they are checked.

    Attributes
    ----------
    base : str
        Folder of the base model, or `python:package.module:function`, a factory without arguments that returns a
        module. Empty where only the host is checked: every stage is then one of `MODEL_LESS`.
    adapter : str or None
        Folder of the adapter; None checks the base alone.
    adapters : tuple of NamedAdapter
        The adapters of a case with several; `adapter` is then the folder of the first one. Empty with one or none.
    dtype : str
        Dtype that the base is loaded in; `auto` is the dtype that its config declares.
    profile : str
        `pinned` fixes every numerical setting, `deployed` fixes none.
    settings : tuple of Switch
        Settings that the user chose on top of the profile.
    placement : str
        Memory that holds the base of an accelerator: its own, or with `offload` the host's, from which each layer is
        brought to the device when it is needed. `auto` offloads a base that does not fit.
    load_paths : tuple of LoadPath or None
        Ways to load base and adapter. None leaves the choice to the level and the devices: isolated, and shared too
        where there are several accelerators, each with the level's alternatives. An alternative includes its default
        path.
    inputs : str or None
        File of the inputs: a `.txt` file has a text that they are made from, a `.safetensors` file has the inputs
        themselves. None makes them from the model's config and, where the base has a tokenizer, from a text that the
        package has.
    engine_outputs : tuple of EngineFile
        Outputs of inference engines, which are checked like the outputs of a device.
    repeat : int
        Number of runs of each computed stage on each device.
    steps : int or None
        Number of steps of the training in the stage `trajectory`; None where that stage was not asked for.
    soak_s : float or None
        Seconds for which every worker repeats its stages after they have run once; None for no soak.
    load : bool
        Keep the device busy with other work during the soak.
    only : tuple of str
        `stage::layer` prefixes to check; empty checks everything.
    keep : bool
        Store every computed tensor, not only those with a finding.
    tolerance : tuple of Override
        Tolerances that replace the derived bounds; the last one that matches a tensor applies.
    wrapper : str or None
        `package.module:function` that takes the plain base and returns it wrapped.
    device_map : str or None
        A further way to shard the base: `auto`, `balanced`, `sequential`, or a JSON file of module names to devices.
    host_checked_by : str
        Name of the case of the same suite that checks the host; this case then leaves out the stages of the host. Empty
        where this case has them, or there is no other case.
    not_shared : str
        Reason why no worker of the case may see all devices; empty where it may.
    fit : Fit
        Smaller inputs, where memory is short.
    """

    name: str
    base: str
    adapter: str | None = None
    adapters: tuple[NamedAdapter, ...] = ()
    dtype: Dtype = "auto"
    profile: Profile = "pinned"
    settings: tuple[Switch, ...] = ()
    placement: Placement = "auto"
    stages: tuple[Stage, ...] = LEVELS[Level.STANDARD].stages
    load_paths: tuple[LoadPath, ...] | None = None
    level: Level = Level.STANDARD
    inputs: str | None = None
    engine_outputs: tuple[EngineFile, ...] = ()
    repeat: int = 1
    steps: int | None = None
    soak_s: float | None = None
    load: bool = False
    only: tuple[str, ...] = ()
    keep: bool = False
    tolerance: tuple[Override, ...] = ()
    wrapper: str | None = None
    device_map: str | None = None
    allow_pickle: bool = False
    trust_remote_code: bool = False
    fit: Fit = Fit()
    host_checked_by: str = ""
    not_shared: str = ""

    @property
    def makes_inputs(self) -> bool:
        """Return whether inputs are made, in the sizes of the level; otherwise a file has them."""
        return self.inputs is None or self.inputs.endswith(".txt")

    def sequences(self, matrix_elements: int = 0) -> int:
        """Return how many sequences are made for a model with so many elements in its matrices."""
        count = self.plan.sequences
        if self.plan.is_large(matrix_elements):
            count = max(1, count // 2)
        return min(count, self.fit.sequences or count)

    @property
    def tokens(self) -> int:
        """Return how many tokens a sequence has at most."""
        return self.fit.tokens or self.plan.tokens

    @property
    def long_tokens(self) -> int:
        """Return how many tokens the long text has at most; 0 where none is computed, as with tensors of a file."""
        if not self.makes_inputs:
            return 0
        return self.plan.long_tokens if self.fit.long_tokens is None else self.fit.long_tokens

    @property
    def plan(self) -> LevelPlan:
        return LEVELS[self.level]

    @property
    def is_pinned(self) -> bool:
        """Return whether every numerical setting is fixed; otherwise equal bits are promised nowhere."""
        return self.profile == "pinned"

    @property
    def process_key(self) -> object:
        """Return a key that is equal for cases that one process can run: libraries read some settings only once."""
        return (self.profile, self.settings)

    @property
    def factory(self) -> str | None:
        """Return package, module and function of a base that a function makes, None for a folder."""
        return self.base.removeprefix("python:") if self.base.startswith("python:") else None

    @property
    def needs_model(self) -> bool:
        """Return whether any stage checks the model; otherwise it is not loaded."""
        return bool(self.base) and any(SPECS[stage].model is not Model.UNUSED for stage in self.stages)

    @property
    def reloads(self) -> bool:
        """Return whether the adapter is loaded again over poison."""
        return self.plan.reload or self.repeat > 1

    @property
    def checked_elsewhere(self) -> dict[str, str]:
        """Return the case of the same suite that has a stage in place of this one, by stage."""
        if not self.host_checked_by:
            return {}
        return {stage: self.host_checked_by for stage in HOST_STAGES if stage not in self.stages}

    def not_checked(self) -> tuple[str, ...]:
        """Return the parts of the case that this run does not check, a line of the report for each."""
        elsewhere = self.checked_elsewhere
        absent_stages = [
            stage for stage, spec in SPECS.items() if stage not in self.stages and spec.named_where_left_out
        ]
        stage_lines = [f"stage {stage}" for stage in absent_stages if stage not in elsewhere]
        stage_lines += [in_other_case(stage, case) for stage, case in elsewhere.items()]
        check_lines = [check.text for check in self.plan.left_out if self._is_left_out(check)]
        if self.not_shared:
            check_lines.append(f"the load path shared ({self.not_shared})")
        stage_checks: list[str] = []
        for stage in self.stages:
            stage_checks += SPECS[stage].leaves_out
        return (*stage_lines, *check_lines, *self._unchecked_adapters(), *stage_checks, *self._cut_sizes())

    def _is_left_out(self, check: LeftOut) -> bool:
        """Return whether a report has to name a check that the level leaves out."""
        if check.part_of is not None and check.part_of not in self.stages:
            return False
        if check.made_by_repeat and self.repeat > 1:
            return False
        return not (check.made_by_soak and self.soak_s is not None)

    def _unchecked_adapters(self) -> list[str]:
        """Return the line on stages that check the first of several adapters alone; empty without such a stage."""
        first_only = [stage for stage in self.stages if SPECS[stage].adapters is Adapters.FIRST]
        if not first_only or len(self.adapters) < 2:
            return []
        # stages that need an adapter come first in the line: it is about them
        ordered = sorted(first_only, key=lambda stage: not SPECS[stage].needs_adapter)
        others = " and ".join(adapter.name for adapter in self.adapters[1:])
        return [f"{', '.join(ordered)} of {others} (checked for {self.adapters[0].name} only)"]

    def _cut_sizes(self) -> list[str]:
        """Return, in words, how many sequences and tokens are left out for lack of memory."""
        if not any(SPECS[stage].feeds_inputs for stage in self.stages):
            return []
        sizes = (
            ("sequences", self.sequences(), self.plan.sequences),
            ("tokens of each", self.tokens, self.plan.tokens),
        )
        lines = [f"{whole - cut} of {whole} {noun}, for lack of memory" for noun, cut, whole in sizes if cut < whole]
        if self.fit.long_tokens is not None and standard.FORWARD in self.stages:
            lines.append(f"a text of {self.plan.long_tokens} tokens, for lack of memory")
        return lines
