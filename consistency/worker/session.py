"""One worker's run: determinism, environment, loading, stages."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import torch

from consistency.capture.names import WHOLE_MODEL
from consistency.capture.records import SettingChange
from consistency.capture.writer import write_json
from consistency.case.load_path import LoadPath
from consistency.case.stages import SPECS, Model, Stage, StageSpec, run_order
from consistency.errors import UsageError
from consistency.numerics.digest import digest
from consistency.numerics.words import Word
from consistency.worker import determinism, environment
from consistency.worker.memory.per_stage import StageMemoryLog
from consistency.worker.memory.placement import Placement
from consistency.worker.model.id_checks import KernelAssertedError
from consistency.worker.model.inputs import digest_of, fixed_inputs
from consistency.worker.model.loading import expected_adapter, load_adapter, load_base
from consistency.worker.model.weight_files import WeightFiles
from consistency.worker.protocol import TOLD_FILE, EventLog, Job, Told
from consistency.worker.recorder import Recorder
from consistency.worker.stages import base
from consistency.worker.stages.context import Context, Machine


class Session:
    """Run the stages of a job one after the other, and check the settings after each."""

    def __init__(self, job: Job, events: EventLog, asked: dict[str, Any]) -> None:
        self._job = job
        self._events = events
        self._asked = asked
        self._path = Path(job.folder) / TOLD_FILE
        self._placement = Placement(torch.device(job.device))
        self._placement.look("import")
        self._memory = StageMemoryLog(torch.device(job.device))
        self._told = Told(
            environment=environment.describe(torch.device(job.device)),
            asked=asked,
            in_force=determinism.in_force(),
            kernel_key="",
        )
        key = environment.kernel_key(self._told.environment, self._told.in_force)
        self._told = msgspec.structs.replace(self._told, kernel_key=key)
        self._save()

    def run(self) -> None:
        job, case = self._job, self._job.case
        tolerance, folder = case.tolerance, Path(job.folder)
        with Recorder(folder, Path(job.blobs), only=case.only, keep=case.keep, tolerance=tolerance) as record:
            machine = Machine(
                job=job, events=self._events, record=record, placement=self._placement, memory=self._memory
            )
            context: Context | None = None
            specs = run_order(case.stages, sees_others=job.device != "cpu" and job.load_path == LoadPath.SHARED)
            for number, spec in enumerate(specs):
                if spec.model is not Model.UNUSED and case.needs_model and context is None:
                    context = self._load(machine, specs)
                if spec.stage is Stage.BASE:
                    continue  # it has run between loading the base and loading the adapter
                if spec.needs_adapter and case.adapter is None:
                    _skip(record, spec, "the case has no adapter")
                    continue
                if spec.feeds_inputs and context is not None:
                    inputs, _ = fixed_inputs(case, context.base.model)
                    self._update(inputs_digest=None if inputs is None else digest_of(inputs))
                try:
                    self._run(spec, context or machine)
                except KernelAssertedError as lost:
                    record.fact(
                        stage=spec.stage,
                        layer=WHOLE_MODEL,
                        tensor="kernels",
                        status="outside",
                        diagnosis=Word.IDS_CHANGED,
                        reason=str(lost),
                    )
                    for later in specs[number + 1 :]:
                        _skip(record, later, "an earlier kernel assertion took the device's context with it")
                    return

    def _run(self, spec: StageSpec, context: Machine) -> None:
        self._begin(spec.stage)
        pkgutil.resolve_name(spec.worker)(context)
        self._check(spec.stage)
        self._update(stages_done=(*self._told.stages_done, spec.stage))

    def _load(self, machine: Machine, specs: list[StageSpec]) -> Context:
        """Load base and adapter; the stage `base` runs in between."""
        job, case = self._job, self._job.case
        self._begin("load base")
        loaded = load_base(case, job.device)
        self._update(
            environment={**self._told.environment, "dtype": loaded.dtype, "model_class": type(loaded.model).__name__}
        )
        self._check("load base")
        context = Context(
            **{field.name: getattr(machine, field.name) for field in dataclasses.fields(machine)},
            base=loaded,
            model=loaded.model,
            digests={},
            expected={},
            initial={},
            rewritten=frozenset(),
        )
        checks_base = SPECS[Stage.BASE] in specs
        if checks_base:
            self._run(SPECS[Stage.BASE], context)
        if case.adapter is None:
            return context
        for name, tensor in loaded.tensors.items():
            if name not in context.digests:
                context.digests[name] = digest(tensor)
        self._begin("load adapter")
        with self._placement.watching():
            model = load_adapter(loaded, case, initial=context.initial, autocast=job.autocast_adapter_dtype)
        files = WeightFiles.of_adapter(case.adapter, allow_pickle=case.allow_pickle)
        expected = expected_adapter(model, files)
        self._check("load adapter")
        self._begin("base, after the adapter")
        changed = base.rewritten(context)
        if checks_base:
            base.look_again(context, changed)
        return dataclasses.replace(context, model=model, expected=expected, rewritten=frozenset(changed))

    def _begin(self, stage: str) -> None:
        determinism.seed_all()
        self._memory.begin()
        self._events.stage(stage)

    def _check(self, stage: str) -> None:
        """Note settings that another library has changed since they were set, and set them again.

        Note the memory that the stage took, and the other devices that it touched.
        """
        self._placement.look(stage)
        taken = self._memory.end(stage)
        found = determinism.changed(self._asked)
        changes = tuple(
            SettingChange(setting=name, asked=self._asked[name], in_force=value, stage=stage)
            for name, value in found.items()
        )
        if changes:
            determinism.restore(self._asked, found)
        # the digest's kernel is tried on the first large tensor, so its outcome is known only now
        described = {**self._told.environment, **environment.digest_kernel(torch.device(self._job.device))}
        self._update(
            environment=described,
            changes=(*self._told.changes, *changes),
            peak_bytes=self._memory.peak_bytes,
            stage_memory=(*self._told.stage_memory, taken),
        )

    def _update(self, **values: Any) -> None:
        self._told = msgspec.structs.replace(self._told, **values)
        self._save()

    def _save(self) -> None:
        write_json(self._path, self._told)


def _skip(record: Recorder, spec: StageSpec, reason: str) -> None:
    record.absent(
        stage=spec.stage, layer=WHOLE_MODEL, tensor=spec.whole, status="skipped", reason=reason, rule=spec.rule
    )


def _import_libraries() -> ModuleType:
    """Import transformers and PEFT; report apart from any fault of the model that their versions do not fit."""
    try:
        importlib.import_module("peft")
        return importlib.import_module("transformers")
    except ImportError as error:
        versions = environment.describe(torch.device("cpu"))
        raise UsageError(
            "the installed transformers and PEFT cannot be imported together",
            got=f"transformers {versions['transformers']}, peft {versions['peft']}: {error}",
            hint="upgrade both: pip install --upgrade transformers peft",
        ) from error


def run(job: Job, events: EventLog) -> None:
    """Run a job with every setting pinned."""
    if job.case.needs_model:
        events.stage("import libraries")  # from a cold network disk this takes a while: a sign of life
        transformers = _import_libraries()
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    if torch.get_num_interop_threads() != 1:  # torch takes this once in the life of a process
        torch.set_num_interop_threads(1)
    with _fault(job.fault), determinism.deterministic(threads=job.threads, **job.settings) as asked:
        Session(job, events, asked).run()


def _fault(name: str | None) -> AbstractContextManager[None]:
    if name is None:
        return nullcontext()
    from consistency.worker.faults import plant

    return plant(name)
