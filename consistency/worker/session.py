"""One worker's run: determinism, environment, loading, stages."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import torch

from consistency.capture.folder import write_json
from consistency.capture.names import WHOLE_MODEL
from consistency.capture.records import SettingChange
from consistency.case.load_path import LoadPath
from consistency.case.stages import Stage
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
from consistency.worker.stages import base, forward, memory, wrapping
from consistency.worker.stages.adapter import stage as adapter
from consistency.worker.stages.context import Context
from consistency.worker.stages.gradient import stage as gradient
from consistency.worker.stages.merged import stage as merged
from consistency.worker.stages.operators import stage as operators
from consistency.worker.stages.sharding import stage as sharding
from consistency.worker.stages.transfer import stage as transfer


class Session:
    """Run the stages of a job one after the other, and look at the settings after each."""

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
        job = self._job
        with Recorder(Path(job.folder), Path(job.blobs), only=job.case.only) as record:
            self._run(record)

    def _run(self, record: Recorder) -> None:
        case, wanted = self._job.case, self._job.case.stages
        # The stage `transfer` opens every device that it sees, and leaves right bytes in memory that is used again:
        # beside other devices it comes last, so that what loading touches is looked at untouched.
        late = self._sees_others()
        if not late:
            self._transfer(record, wanted)
        if Stage.OPERATORS in wanted:  # they need no model
            self._begin(Stage.OPERATORS)
            operators.run(operators.Trials.of(case, self._job.device, self._job.settings), record, self._events)
            self._end(Stage.OPERATORS)
        if case.needs_model:
            self._look_at_model(record)
        elif Stage.MEMORY in wanted:
            self._begin(Stage.MEMORY)
            memory.devices(record, self._placement)
            self._end(Stage.MEMORY)
        if late:
            self._transfer(record, wanted)

    def _sees_others(self) -> bool:
        return self._job.device != "cpu" and self._job.load_path == LoadPath.SHARED

    def _transfer(self, record: Recorder, wanted: tuple[Stage, ...]) -> None:
        if Stage.TRANSFER in wanted:
            self._begin(Stage.TRANSFER)
            transfer.run(self._job, self._events, record)
            self._end(Stage.TRANSFER)

    def _look_at_model(self, record: Recorder) -> None:
        job, events = self._job, self._events
        wanted = job.case.stages
        self._begin("load base")
        loaded = load_base(job.case, job.device)
        self._update(
            environment={**self._told.environment, "dtype": loaded.dtype, "model_class": type(loaded.model).__name__}
        )
        self._check("load base")
        before = {}
        if Stage.BASE in wanted:
            self._begin(Stage.BASE)
            before = base.look(loaded, record, events, on_cpu=job.device == "cpu")
            self._end(Stage.BASE)
        model, files, expected, changed = loaded.model, None, {}, {}
        initial: dict[str, str] = {}
        if job.case.adapter is not None:
            before = before or {name: digest(tensor) for name, tensor in loaded.tensors.items()}
            self._begin("load adapter")
            with self._placement.watching():
                model = load_adapter(loaded, job.case, initial=initial, autocast=job.autocast_adapter_dtype)
            files = WeightFiles.of_adapter(job.case.adapter, allow_pickle=job.case.allow_pickle)
            expected = expected_adapter(model, files)
            self._check("load adapter")
            self._begin("base, after the adapter")
            changed = base.rewritten(loaded, before)
            if Stage.BASE in wanted:
                base.look_again(loaded, record, before, changed)
        context = Context(
            job=job,
            events=events,
            record=record,
            base=loaded,
            model=model,
            adapter_files=files,
            expected=expected,
            initial=initial,
            rewritten=frozenset(changed),
            placement=self._placement,
            memory=self._memory,
        )
        # the forward stage leaves the adapter merged, so whatever looks at the model as it was comes before it
        stages = (
            (Stage.ADAPTER, adapter.run),
            (Stage.MERGED, merged.run),
            (Stage.GRADIENT, gradient.run),
            (Stage.FORWARD, forward.run),
            (Stage.MEMORY, memory.run),
            (Stage.SHARDING, sharding.run),
            (Stage.WRAPPING, wrapping.run),
        )
        for stage, look in stages:
            if stage not in wanted:
                continue
            if job.case.adapter is None and stage in (Stage.ADAPTER, Stage.MERGED):
                record.absent(
                    stage=stage,
                    layer=WHOLE_MODEL,
                    tensor="everything",
                    status="skipped",
                    reason="the case has no adapter",
                )
                continue
            self._begin(stage)
            if stage in (Stage.GRADIENT, Stage.FORWARD):
                inputs, _ = fixed_inputs(job.case, loaded.model)
                self._update(inputs_digest=None if inputs is None else digest_of(inputs))
            try:
                look(context)
            except KernelAssertedError as lost:
                _tell_of_assert(record, stage, wanted, str(lost))
                return
            self._end(stage)

    def _begin(self, stage: str) -> None:
        determinism.seed_all()
        self._memory.begin()
        self._events.stage(stage)

    def _end(self, stage: str) -> None:
        self._check(stage)
        self._update(stages_done=(*self._told.stages_done, stage))

    def _check(self, stage: str) -> None:
        """Note settings that another library has flipped since they were set, and set them again.

        Note too what the stage took of memory, and which other devices it touched.
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
        # the digest's kernel is tried when the first large tensor comes, so what became of it is known only now
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


def _tell_of_assert(record: Recorder, stage: Stage, wanted: Sequence[Stage], sentence: str) -> None:
    """Record why the worker stops here: the device's context went with the kernel, and nothing runs on it any more."""
    record.fact(
        stage=stage,
        layer=WHOLE_MODEL,
        tensor="kernels",
        status="outside",
        diagnosis=Word.IDS_CHANGED,
        reason=sentence,
    )
    for later in [s for s in wanted if list(Stage).index(s) > list(Stage).index(stage)]:
        record.absent(
            stage=later,
            layer=WHOLE_MODEL,
            tensor="everything",
            status="skipped",
            reason="a kernel asserted before, and took the device's context with it",
        )


def _import_libraries() -> ModuleType:
    """Import transformers and PEFT, which are told apart from a fault of the model: their versions must fit."""
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
