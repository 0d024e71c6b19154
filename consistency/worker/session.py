"""One worker's run: determinism, environment, loading, stages."""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import msgspec
import torch

from consistency.capture.names import ADAPTER_METHOD, WHOLE_MODEL
from consistency.capture.records import SettingChange
from consistency.capture.writer import write_json
from consistency.case import standard
from consistency.case.budget.costs import Setting
from consistency.case.budget.estimate import final_steps
from consistency.case.budget.passes import passes_of
from consistency.case.budget.shape import Shape, read_shape
from consistency.case.load_path import LoadPath
from consistency.case.stage import Model, Stage, StageSpec
from consistency.case.stages import run_order
from consistency.devices.backends import CPU
from consistency.devices.interface import register
from consistency.errors import ConsistencyError, UsageError
from consistency.numerics import words
from consistency.worker import determinism, environment
from consistency.worker.bound_kernels import BOUND, choose_by_device
from consistency.worker.context import AfterStages, Context, Machine
from consistency.worker.device_check import require_device
from consistency.worker.memory.host_memory import reset_peak
from consistency.worker.memory.mapped_pages import release, trim
from consistency.worker.memory.offload_choice import choose
from consistency.worker.memory.per_stage import StageMemoryLog
from consistency.worker.memory.placement import Placement
from consistency.worker.model.expected_adapter import expected_adapter
from consistency.worker.model.float64_reference import give_up
from consistency.worker.model.id_checks import KernelAssertedError
from consistency.worker.model.inputs import digest_of, sourced_inputs
from consistency.worker.model.kept_base import BaseKeeper, Taken
from consistency.worker.model.loading import ADAPTER_NAME, LoadedBase, load_adapter, load_base
from consistency.worker.model.sources import config_of, sources_of
from consistency.worker.model.structure import Structure
from consistency.worker.model.weight_files import WeightFiles
from consistency.worker.nondeterministic import NondeterministicOperations
from consistency.worker.protocol import STATE_FILE, EventLog, Job, WorkerState
from consistency.worker.recorder import Recorder
from consistency.worker.stage_failure import Unchanged, is_of_a_stage, record_blocked, stated
from consistency.worker.uncollected import uncollected


class Session:
    """Run the stages of a job one after the other, and check the settings after each."""

    def __init__(self, job: Job, events: EventLog, asked: dict[str, Any], bases: BaseKeeper | None = None) -> None:
        self._job = job
        self._events = events
        self._asked = asked
        self._bases = bases or BaseKeeper()
        self._structure: Structure | None = None
        """Structure of the base before any adapter, where the next case takes the base; else None."""
        self._unchanged: Unchanged | None = None
        """The loaded model as every stage has to leave it."""
        self._begun: set[Stage] = set()
        self._model_loss = ""
        """Why there is no usable model for the stages to come; empty while there is one."""
        self._detour = ""
        """Why the adapter was not loaded as PEFT does by default; empty where it was."""
        self._operations = NondeterministicOperations()
        device = torch.device(job.device)
        self._placement = Placement(device)
        if not self._bases.is_first(job):
            # the memory and the devices of an earlier case in this process are not this one's
            reset_peak()
            self._placement.start_again()
        self._placement.look("import")
        self._memory = StageMemoryLog(device)
        described, in_force = environment.describe(device), determinism.in_force()
        key = environment.kernel_key(device.type, described, in_force)
        self._state = WorkerState(environment=described, asked=asked, in_force=in_force, kernel_key=key)
        self._update()

    def run(self) -> bool:
        """Run the stages; return whether the device can be used afterwards."""
        job, case = self._job, self._job.case
        with (
            Recorder(
                Path(job.folder),
                Path(job.blobs),
                only=case.only,
                keep=case.keep,
                tolerance=case.tolerance,
                remembers=case.soak_s is not None,
                operations=self._operations,
            ) as record,
            self._operations,
        ):
            machine = Machine(
                job=job, events=self._events, record=record, placement=self._placement, memory=self._memory
            )
            specs = run_order(case.stages, sees_others=job.device != "cpu" and job.load_path == LoadPath.SHARED)
            context, is_usable = self._run_stages(machine, specs)
            if not is_usable:
                return False
            if not self._model_loss:
                self._run_final_steps(context or machine, specs)
        if context is not None and self._structure is not None:
            self._bases.keep(job, context.model, context.base, self._structure)
        return True

    def _run_stages(self, machine: Machine, specs: list[StageSpec]) -> tuple[Context | None, bool]:
        """Run the stages in order, and load the model before the first one that uses it.

        Returns
        -------
        context : Context or None
            The loaded model, None where no stage has needed one or it could not be loaded.
        is_usable : bool
            False where a kernel's assertion has taken the device's context with it.
        """
        context: Context | None = None
        for number, spec in enumerate(specs):
            uses_model = spec.model is not Model.UNUSED and self._job.case.needs_model
            if uses_model and context is None and not self._model_loss:
                context = self._load_or_block(machine, specs)
            if self._is_left_out(machine.record, spec):
                continue
            try:
                self._run(spec, context or machine)
            except KernelAssertedError as lost:
                _record_lost_device(machine.record, spec, specs[number + 1 :], lost)
                return context, False
        return context, True

    def _is_left_out(self, record: Recorder, spec: StageSpec) -> bool:
        """Report whether a stage is not run in its turn; record why it has no result, unless it has run already."""
        if spec.on_base and spec.stage in self._begun:
            return True  # it has run between loading the base and loading the adapter
        if spec.model is not Model.UNUSED and self._model_loss:
            record_blocked(record, spec, self._model_loss, raised=self._model_loss)
            return True
        if spec.needs_adapter and self._job.case.adapter is None:
            record.skipped(spec.stage, "no adapter was given")
            return True
        return False

    def _load_or_block(self, machine: Machine, specs: list[StageSpec]) -> Context | None:
        """Load base and adapter; return None where a library fails over them, which blocks the stages that need them.

        A user's own function may raise anything, which ends this worker: its report has the whole traceback.
        """
        try:
            return self._load(machine, specs)
        except Exception as error:  # model code of any kind may raise anything
            if self._job.case.factory is not None or not is_of_a_stage(error, machine.device):
                raise
            self._model_loss = f"the model could not be loaded: {stated(error)}"
            return None

    def _run(self, spec: StageSpec, context: Machine) -> None:
        """Run a stage. One that raises is blocked; stages after it have no model only where it left that changed.

        Raises
        ------
        KernelAssertedError
            The device is lost.
        """
        self._begun.add(spec.stage)
        if isinstance(context, Context):
            _release_pages(context.base, context.expected)
        self._begin(spec.stage)
        try:
            if spec.feeds_inputs and isinstance(context, Context):
                self._describe_inputs(context)
            with context.record.skipping(spec.stage):
                pkgutil.resolve_name(spec.worker)(context)
        except KernelAssertedError:
            raise
        except Exception as error:  # model code of any kind may raise anything
            if not is_of_a_stage(error, context.device):
                raise
            self._lose_stage(spec, context, error)
            self._end(spec.stage)
            return
        # it ran with the adapter loaded in another way, so nothing is known of the way that PEFT takes by default
        if spec.stage == standard.ADAPTER and self._detour:
            record_blocked(context.record, spec, self._detour, raised=self._detour)
        self._end(spec.stage)
        self._update(stages_done=(*self._state.stages_done, spec.stage))

    def _describe_inputs(self, context: Context) -> None:
        """Write the digest of the inputs, None where there are none, and their source to the worker's state."""
        inputs, _, source = sourced_inputs(self._job.case, context.base.model)
        digest = None if inputs is None else digest_of(inputs)
        facts = {"inputs": source} if source else {}
        self._update(inputs_digest=digest, environment={**self._state.environment, **facts})

    def _lose_stage(self, spec: StageSpec, context: Machine, error: Exception) -> None:
        """Record that a stage failed, tell the workers that wait for its reference, and restore the model."""
        why = stated(error)
        record_blocked(context.record, spec, f"the stage failed: {why}", raised=why)
        if self._job.makes_reference and spec.reference_file:
            message = f"{self._job.name}, which computes it, failed: {why}"
            give_up(Path(self._job.scratch), spec.reference_file, message)
        error.__traceback__ = None  # its frames hold tensors
        change = "" if self._unchanged is None else self._unchanged.restore()
        if change:
            self._model_loss = f"the stage {spec.stage} failed and left the model changed: {change}"

    def _run_final_steps(self, context: Machine, specs: list[StageSpec]) -> None:
        """Run the steps of plug-ins that come after the stages."""
        after = AfterStages(
            context=context,
            specs=specs,
            device_uuid=self._state.environment.get("device_uuid"),
            update=self._update,
        )
        for step in final_steps(self._job.case).values():
            self._begin(step.name)
            pkgutil.resolve_name(step.run)(after)
            self._end(step.name)

    def _load(self, machine: Machine, specs: list[StageSpec]) -> Context:
        """Load base and adapter; the stage `base` runs in between."""
        case = self._job.case
        loaded = self._load_base()
        self._describe_base(loaded)
        context = Context(
            job=self._job,
            events=machine.events,
            record=machine.record,
            placement=machine.placement,
            memory=machine.memory,
            base=loaded,
            model=loaded.model,
        )
        for spec in specs:
            if spec.on_base:
                self._run(spec, context)
        # loading an adapter may change the base, and the next case may take it: both are found by these digests
        if case.adapter is not None or self._structure is not None:
            _take_digests(loaded)
        if case.adapter is None:
            self._unchanged = Unchanged(context, loaded.digests)
            return context
        return self._load_adapter_onto(context, case.adapter, specs)

    def _describe_base(self, loaded: LoadedBase) -> None:
        """Write what was loaded to the worker's state: dtype, class, kernels, config, sources."""
        facts = {"dtype": loaded.dtype, "model_class": type(loaded.model).__name__}
        if BOUND and self._job.device != "cpu":
            facts["bound_kernels"] = ", ".join(f"{name} of {package}" for name, package in sorted(BOUND.items()))
        self._update(
            environment={**self._state.environment, **facts, **environment.quantizers()},
            config=config_of(loaded.model),
            sources=sources_of(self._job.case),
        )

    def _load_adapter_onto(self, context: Context, path: str, specs: list[StageSpec]) -> Context:
        """Load the adapter onto the base, and run the checks of stages that come right after; return its context."""
        job, case, loaded = self._job, self._job.case, context.base
        bare = None
        if case.adapters:  # noted before PEFT changes the base, for the stages that load the other adapters
            bare = self._structure or Structure(loaded.model)
        _release_pages(loaded, {})
        self._begin("load adapter")
        with self._placement.watching():
            adapter = load_adapter(loaded, case, autocast=job.autocast_adapter_dtype, notes_initial=True)
        method = cast("Any", adapter.model).peft_config[ADAPTER_NAME].peft_type.value
        self._update(environment={**self._state.environment, ADAPTER_METHOD: method})
        if adapter.detour:
            detour = f"PEFT first reads the adapter onto another device, and that device fails: {adapter.detour}"
            self._detour = f"{detour}; loaded with torch_device={job.device}"
            self._update(environment={**self._state.environment, "adapter": self._detour})
        files = WeightFiles.of_adapter(path, allow_pickle=case.allow_pickle)
        expected = expected_adapter(adapter.model, files)
        self._end("load adapter")
        self._begin("base, after the adapter")
        changed = context.changed_base()
        for spec in specs:
            if spec.after_adapter:
                pkgutil.resolve_name(spec.after_adapter)(context, changed)
        self._end("base, after the adapter")
        adapted = dataclasses.replace(
            context,
            model=adapter.model,
            expected=expected,
            initial=adapter.initial,
            rewritten=frozenset(changed),
            origins=adapter.origins,
            bare=bare,
        )
        self._unchanged = Unchanged(adapted, {**loaded.digests, **changed})
        return adapted

    def _load_base(self) -> LoadedBase:
        """Load the base, or take that of the case before, whose digests are known."""
        job, taken = self._job, None
        if not self._bases.is_first(job):
            gc.collect()  # PEFT's models hold themselves: the adapter before, and a base that is not kept, go now
        if self._bases.keeps:
            self._begin("take the adapter off")
            taken = self._bases.take(job)
            self._end("take the adapter off")
        if isinstance(taken, Taken):
            self._describe_taken_base(taken)
            self._structure = taken.structure if self._bases.is_wanted_after(job) else None
            return taken.base
        if taken is not None:  # a sentence that says why the base of the case before cannot be used
            self._update(environment={**self._state.environment, "base": f"loaded anew: {taken}"})
        self._begin("load base")
        placed = choose(job.case, torch.device(job.device))
        if job.device != "cpu":
            self._update(environment={**self._state.environment, "placement": str(placed)})
        loaded = load_base(job.case, job.device, offload=placed.offload)
        self._end("load base")
        # an offloaded base stays on the host and is not kept: it is mapped anew in no time
        is_kept_for_next = self._bases.is_wanted_after(job) and loaded.offload is None
        self._structure = Structure(loaded.model) if is_kept_for_next else None
        return loaded

    def _describe_taken_base(self, taken: Taken) -> None:
        """Write to the worker's state that the base is that of the case before."""
        count = len(taken.base.digests)
        facts = {"base": f"kept from the case before, {taken.restored} of {count} tensors restored from the file"}
        if self._job.device != "cpu":
            facts["placement"] = "device"
        self._update(environment={**self._state.environment, **facts})

    def _begin(self, stage: str) -> None:
        """Begin a stage, or a step of loading: seeded, with fresh counters, and free pages returned to the system."""
        determinism.seed_all()
        self._operations.begin()
        trim()
        self._memory.begin()
        self._events.stage(stage, passes_of(Stage(stage), self._setting))

    @functools.cached_property
    def _setting(self) -> Setting:
        """The case as `--plan` takes it for this worker: stages declare their passes by it."""
        job = self._job
        try:
            shape = read_shape(job.case)
        except ConsistencyError:  # whoever loads the files says what is wrong with them
            shape = Shape()
        return Setting(shape=shape, case=job.case, on_device=job.device != CPU, makes_reference=job.makes_reference)

    def _end(self, stage: str) -> None:
        """End what `_begin` began: record its memory, the other devices it touched, and settings it changed.

        Settings that were asked for are set back.
        """
        self._placement.look(stage)
        memory = self._memory.end(stage)
        restored = determinism.restore(self._asked)
        in_force = determinism.in_force()
        changes = self._setting_changes(stage, restored, in_force)
        # the digest's kernel is tried on the first large tensor, so its outcome is known only now
        device = torch.device(self._job.device)
        described = {name: value for name, value in self._state.environment.items() if name != environment.PRODUCTS}
        described |= environment.digest_kernel(device) | environment.products(device)
        # a setting that was asked for keeps its first value here: that a stage has changed it is in `changes`
        asked_for = {name: value for name, value in self._state.in_force.items() if name in self._asked}
        self._update(
            environment=described,
            in_force={**in_force, **asked_for},
            changes=(*self._state.changes, *changes),
            peak_bytes=self._memory.peak_bytes,
            stage_memory=(*self._state.stage_memory, memory),
        )

    def _setting_changes(
        self, stage: str, restored: Mapping[str, Any], in_force: Mapping[str, Any]
    ) -> list[SettingChange]:
        """Return the settings that a stage has changed.

        Parameters
        ----------
        restored
            Those that were asked for and set back, with the value that the stage left.
        in_force
            All settings now.
        """
        changes = [
            SettingChange(setting=name, asked=self._asked[name], in_force=value, stage=stage)
            for name, value in restored.items()
        ]
        # what nobody asked for stays as the user's libraries set it, and is in force from here on
        for name, earlier in self._state.in_force.items():
            if name not in self._asked and in_force.get(name) != earlier:
                changes.append(SettingChange(setting=name, asked=None, in_force=in_force[name], stage=stage))
        return changes

    def _update(self, **values: Any) -> None:
        """Change fields of the worker's state, by name, and write it."""
        self._state = msgspec.structs.replace(self._state, **values)
        write_json(Path(self._job.folder) / STATE_FILE, self._state)


def _record_lost_device(
    record: Recorder, spec: StageSpec, later: Sequence[StageSpec], lost: KernelAssertedError
) -> None:
    """Record that a kernel asserted in a stage, and that the later ones cannot run on this device."""
    record.fact(
        stage=spec.stage,
        layer=WHOLE_MODEL,
        tensor="kernels",
        status="outside",
        word=words.IDS_CHANGED,
        reason=str(lost),
    )
    # `transfer` too: every copy of it has this device at one end, and CUDA needs a new process now
    for later_spec in later:
        record.skipped(later_spec.stage, "an earlier kernel assertion took the device's context with it")


def _take_digests(base: LoadedBase) -> None:
    """Take the digests of the base that no stage has asked for, before an adapter is loaded."""
    for name, tensor in base.on_device(base.tensors.keys() - base.digests.keys()):
        base.digest_of(name, tensor)


def _release_pages(base: LoadedBase, expected: Mapping[str, tuple[str, torch.Tensor]]) -> None:
    """Leave no page of the files resident that the next stage does not read."""
    if base.files is not None:
        base.files.let_go()
    release([*base.tensors.values(), *(tensor for _, tensor in expected.values())])


def import_models() -> ModuleType:
    """Import transformers and PEFT; report apart from any fault of the model that their versions do not fit."""
    try:
        importlib.import_module("peft")
        transformers = importlib.import_module("transformers")
        choose_by_device()
        return transformers
    except ImportError as error:
        versions = environment.describe(torch.device("cpu"))
        raise UsageError(
            "the installed transformers and PEFT cannot be imported together",
            got=f"transformers {versions['transformers']}, peft {versions['peft']}: {error}",
            hint="upgrade both: pip install --upgrade transformers peft",
        ) from error


def run(job: Job, events: EventLog, bases: BaseKeeper | None = None) -> bool:
    """Run a job with the settings of its profile; return whether this process can take another.

    Parameters
    ----------
    bases : BaseKeeper, optional
        Keeps the base for the next job of this process; None where there is no other.
    """
    register(torch.device(job.device).type)
    if job.case.needs_model:
        events.stage("import libraries")  # from a cold network disk this takes a while: a sign of life
        # later cases find them imported, and a collection between two cases has to take what the case before left
        with uncollected() if bases is not None and bases.is_first(job) else nullcontext():
            transformers = import_models()
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    if job.case.is_pinned and torch.get_num_interop_threads() != 1:  # torch takes this once in the life of a process
        torch.set_num_interop_threads(1)
    planted: AbstractContextManager[None] = nullcontext()
    if job.fault is not None:
        from consistency.worker.faults import plant

        planted = plant(job.fault)
    pins = job.case.is_pinned
    with planted, determinism.deterministic(threads=job.threads, pins=pins, **job.settings) as asked:
        require_device(job)
        return Session(job, events, asked, bases).run()
