"""One pytest session's run: made once, under a lock, for the controller and all of its xdist workers.

The process that needs the comparison first runs the devices; all others wait for the lock and read its result.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from consistency.capture.json_codec import decode_json, encode_json
from consistency.case.load_path import LoadPath
from consistency.case.options import OPTIONS, Edge
from consistency.case.reading import gather_options
from consistency.case.stages import Stage
from consistency.comparison.findings.tolerances import KIND as TOLERANCE
from consistency.comparison.result import Comparison
from consistency.errors import CaptureError, ConsistencyError
from consistency.launch.plan import WorkerPlan, plan_waves
from consistency.pytest_plugin.item_names import Place, RowFinder, places
from consistency.report.sentences import sentence
from consistency.report.text import clean
from consistency.workflows import pipeline

_ARGUMENT = "consistency::"
_COMPARISON, _ERROR, _STARTED = "comparison.json", "error.json", "started"


class LostWorkerError(Exception):
    """The worker of a device was lost, so there is nothing to compare."""


@dataclass(slots=True, kw_only=True)
class Session:
    """The case of a pytest session, the items selected from it, and its one run.

    The controller and its workers share `folder`; without `consistency::…` in `arguments`, every item is made.
    """

    plan: pipeline.Plan
    folder: Path
    out: Path | None
    is_controller: bool
    arguments: tuple[str, ...] = ()
    alone: bool = False
    places: tuple[Place, ...] = ()
    workers: tuple[WorkerPlan, ...] = ()
    selected: Sequence[tuple[Place, WorkerPlan]] = ()
    _comparison: Comparison | None = None
    _failure: ConsistencyError | None = None
    _finder: RowFinder | None = field(default=None, repr=False)

    @classmethod
    def of(cls, config: pytest.Config) -> Session:
        """Make the session from the options, and check the case before anything is collected."""
        given = getattr(config, "workerinput", {}).get("consistency")
        values = {option.name: config.getoption(f"consistency_{option.name}", None) for option in OPTIONS}
        plan = pipeline.prepare(gather_options(config.getoption("consistency_config"), values, Edge.PYTEST))
        out = config.getoption("consistency_out")
        return cls(
            plan=plan,
            folder=Path(given["folder"]) if given else Path(tempfile.mkdtemp(prefix="consistency-pytest-")),
            out=None if out is None else Path(config.invocation_params.dir, out),
            is_controller=given is None,
            arguments=tuple(given["arguments"]) if given else (),
            alone=given is not None and given["alone"],
            places=places(plan.case),
            workers=tuple(worker for wave in plan_waves(plan.case, plan.devices) for worker in wave),
        )

    @property
    def headline(self) -> str:
        case = self.plan.case
        devices = (info.spec.name + (" (simulated)" if info.simulated else "") for info in self.plan.devices)
        profile = [] if case.is_pinned else [f"profile {case.profile}"]
        return clean(", ".join([case.name, case.dtype, *profile, *map(str, case.settings), f"on {', '.join(devices)}"]))

    def take_arguments(self, config: pytest.Config) -> None:
        """Take `consistency::…` from the arguments; without a path, collect the plugin's items only."""
        if self.is_controller:
            own = tuple(a for a in config.args if a.startswith(_ARGUMENT))
            others = [a for a in config.args if not a.startswith(_ARGUMENT)]
            given = config.args_source is pytest.Config.ArgsSource.ARGS
            self.arguments = own
            self.alone = not others or not given
            config.args[:] = [] if self.alone else others
        elif self.alone:
            config.args[:] = []

    def to_worker(self) -> dict[str, Any]:
        """Return the part of the session that an xdist worker needs."""
        return {"folder": str(self.folder), "arguments": list(self.arguments), "alone": self.alone}

    def comparison(self) -> Comparison:
        """Return the session's comparison; run the devices if nobody has yet."""
        if self._failure is not None:
            raise self._failure
        if self._comparison is None:
            from filelock import FileLock

            try:
                with FileLock(self.folder / "lock"):
                    self._comparison = self._read() or self._make()
            except ConsistencyError as error:
                self._failure = error
                raise
        return self._comparison

    def rows(self) -> RowFinder:
        """Return the rows of the session's comparison by place."""
        if self._finder is None:
            self._finder = RowFinder(self.comparison(), self.places)
        return self._finder

    def verdict(self) -> str | None:
        """Return the verdict as a sentence, None where nothing was run."""
        try:
            self._comparison = comparison = self._comparison or self._read()
        except ConsistencyError:
            return None
        return None if comparison is None else clean(f"{comparison.verdict}: {sentence(comparison)}")

    def notes(self) -> tuple[str, ...]:
        """Return which of the user's tolerances were applied."""
        found = self._comparison
        return () if found is None else tuple(clean(f.message) for f in found.findings if f.kind == TOLERANCE)

    def close(self) -> None:
        """Remove the folder that the session's processes share."""
        if self.is_controller:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self) -> Comparison | None:
        """Return the comparison that another process of the pytest session made, or raise its error."""
        if (self.folder / _ERROR).exists():
            raise ConsistencyError(**decode_json((self.folder / _ERROR).read_bytes(), dict[str, Any]))
        if (self.folder / _COMPARISON).exists():
            return decode_json((self.folder / _COMPARISON).read_bytes(), Comparison)
        if (self.folder / _STARTED).exists():
            raise CaptureError(
                "the pytest process that ran the devices died before it was done, and its workers with it",
                got=(self.folder / _STARTED).read_text(encoding="utf-8"),
                hint="run it without -n to see the error of that process",
            )
        return None

    def _make(self) -> Comparison:
        (self.folder / _STARTED).write_text(f"process {os.getpid()}", encoding="utf-8")
        try:
            found = pipeline.run(self._narrowed(), self.out, watch=lambda *_: None, replace=True).comparison
        except ConsistencyError as error:
            (self.folder / _ERROR).write_bytes(encode_json(error.parts))
            raise
        (self.folder / _COMPARISON).write_bytes(encode_json(found))
        return found

    def _narrowed(self) -> pipeline.Plan:
        """Return the plan narrowed to the stages, layers and devices of the selected items."""
        if not self.selected:
            return self.plan
        case = self.plan.case
        chosen_places = {place for place, _ in self.selected}
        chosen_workers = [worker for _, worker in self.selected]
        names = {worker.name for worker in chosen_workers}
        maker = next(worker for worker in self.workers if worker.makes_reference)
        taken = {r for w in chosen_workers if not w.info.spec.is_cpu for r in (w.load_path, *w.alternative_paths)}
        taken = taken or {r for w in chosen_workers for r in (LoadPath.ISOLATED, *w.alternative_paths)}
        whole = len(self.selected) == len(self.places) * len(self.workers)
        return dataclasses.replace(
            self.plan,
            case=msgspec.structs.replace(
                case,
                stages=tuple(s for s in case.stages if any(place.stage is s for place in chosen_places)),
                load_paths=tuple(r for r in LoadPath if r in taken),
                only=() if whole else tuple(sorted({_prefix(place) for place in chosen_places})),
            ),
            devices=tuple(i for i in self.plan.devices if i.spec.name in names or i is maker.info),
        )


def _prefix(place: Place) -> str:
    # a layer of the base may have another name in its file than in the model, so that stage is checked as a whole
    if place.is_rest or place.stage is Stage.BASE:
        return place.stage.value
    return f"{place.stage}::{place.layer}"
