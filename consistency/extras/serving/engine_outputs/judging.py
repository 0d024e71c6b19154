"""Judge the outputs of inference engines by the float64 passes of the stage `forward`, each as a worker of its own."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from consistency.capture.folder import worker_slug
from consistency.capture.names import ADAPTER_MERGED, ADAPTER_OFF, ADAPTER_ON, BATCHES, NOT_IN_FILE
from consistency.capture.records import TensorRecord, WorkerInfo
from consistency.capture.writer import write_json
from consistency.case import standard
from consistency.case.engine_file import EngineFile
from consistency.case.load_path import LoadPath
from consistency.errors import InputError
from consistency.extras.serving.causes import CAUSE, SEVERAL
from consistency.extras.serving.engine_outputs.explanations import Answer, Question, explain
from consistency.extras.serving.engine_outputs.passes import Passes
from consistency.extras.serving.engine_outputs.view import View
from consistency.extras.serving.inference.outputs import Outputs, batch_size, check_dtype, read_outputs, refuse
from consistency.extras.serving.inference.request import MODES, OUTPUT
from consistency.numerics.bound import UserAllowance
from consistency.numerics.chunks import exact_chunks
from consistency.numerics.digest import digest
from consistency.numerics.dtype import UNIT_ROUNDOFF, name_of
from consistency.numerics.error import measure_against_exact
from consistency.numerics.independent_errors import independent_rows
from consistency.numerics.measure import Measure
from consistency.numerics.real import Real
from consistency.numerics.rules import RoundingError, Rule, judge_relative, passes, relative_allowance
from consistency.worker.context import Context
from consistency.worker.cpu_error import rounding_error
from consistency.worker.judging.outputs import ForwardOutputs, OutputJudge
from consistency.worker.model.inputs import digest_of
from consistency.worker.model.running import model_code
from consistency.worker.recorder import Recorder, Skip


def judge_engines(context: Context, forward: ForwardOutputs) -> None:
    """Judge the files of the case, and leave a worker's records of each.

    Raises
    ------
    InputError
        A file is not of this case, or does not fit the model.
    """
    known: dict[tuple[int, ...], Passes] = {}
    for one in context.job.case.engine_outputs:
        context.events.step(one.name, 0, 1)
        started = time.monotonic()
        outputs = read_outputs(Path(one.path))
        folder = Path(context.job.folder).parent / worker_slug(one.name, LoadPath.ISOLATED)
        folder.mkdir(exist_ok=True)
        case = context.job.case
        with Recorder(
            folder, Path(context.job.blobs), only=case.only, keep=case.keep, tolerance=case.tolerance
        ) as record:
            _judge(context, forward, outputs, record, known)
        write_json(folder / "worker.json", _info(one, outputs, time.monotonic() - started))


def _info(one: EngineFile, outputs: Outputs, elapsed_s: float) -> WorkerInfo:
    about = outputs.about
    engine = f"{about.engine} {about.version}".strip()
    return WorkerInfo(
        architecture=engine,
        model=about.device,
        name=one.name,
        load_path=LoadPath.ISOLATED,
        status="ok",
        engine=engine,
        environment={"dtype": about.dtype, "batch_invariant": about.batch_invariant, "engine_settings": about.settings},
        stages_done=(standard.FORWARD,),
        inputs_digest=about.case.inputs,
        elapsed_s=round(elapsed_s, 3),
    )


def _judge(
    context: Context,
    forward: ForwardOutputs,
    outputs: Outputs,
    record: Recorder,
    passes: dict[tuple[int, ...], Passes],
) -> None:
    if outputs.about.case.inputs != digest_of(forward.inputs):
        refuse(
            outputs,
            "the engine's outputs are of other inputs",
            got=outputs.about.case.inputs,
            wanted=digest_of(forward.inputs),
            hint="give the file of `consistency inputs` as --inputs, or let the engine answer these inputs",
        )
    check_dtype(outputs, context.base.dtype)
    known = next(iter(forward.exact.values()), None)
    if known is None:
        why = next(iter(forward.failures.values()), f"the model has no {OUTPUT}")
        raise InputError(f"there is nothing to compare an engine's {OUTPUT} with", where=outputs.path, got=why)
    view = View(outputs, known.shape, forward.inputs.get("attention_mask"))
    judge = _Engine(context=context, forward=forward, view=view, record=record, passes=passes)
    for mode in MODES if context.job.case.adapter is not None else (ADAPTER_OFF,):
        if record.wants(standard.FORWARD, OUTPUT):
            judge.mode(mode)
    if record.wants(standard.FORWARD, OUTPUT):
        record_batches(
            view,
            record,
            drawn=forward.drawn.get(ADAPTER_ON),
            exact=forward.exact.get(ADAPTER_ON),
            dtype=outputs.about.dtype,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engine:
    """One engine, mode by mode; `passes` are those of all engines, by the rows of their inputs."""

    context: Context
    forward: ForwardOutputs
    view: View
    record: Recorder
    passes: dict[tuple[int, ...], Passes]

    def mode(self, mode: str) -> None:
        """Record the outputs of a mode."""
        about = self.view.outputs.about
        exact, drawn = self.forward.exact.get(_exact(mode)), self.forward.drawn.get(mode)
        if drawn is None and mode == ADAPTER_MERGED:  # PEFT does not merge this adapter, but the engine does
            drawn = self.forward.drawn.get(ADAPTER_ON)
        if mode not in self.view.outputs.modes or exact is None or drawn is None:
            why = NOT_IN_FILE if exact is not None else self.forward.failures.get(_exact(mode), "")
            why = why or "the model does not run in this mode"
            self.record.skipped(standard.FORWARD, why, mode, layer=OUTPUT, rule=Rule.RELATIVE, unsupported=True)
            return
        missing = self.view.rows_missing
        if missing:
            rows = f"{'row' if len(missing) == 1 else 'rows'} {', '.join(map(str, missing))}"
            few = f"the engine gave no outputs of {rows} of {self.view.shape[0]}"
            self.record.fact(standard.FORWARD, OUTPUT, f"{mode} of {rows}", status="missing", reason=few)
        actual, truth = self.view.actual(mode), self.view.model(mode, exact)
        rounding = rounding_error([self.view.drawn(mode, one, truth) for one in drawn], truth, independent_rows)
        tolerance = self.record.tolerance(stage=standard.FORWARD, layer=OUTPUT, dtype=_dtype(about.dtype))
        bound = _Bound(dtype=about.dtype, rounding=rounding, tolerance=tolerance)
        found = measure_against_exact(actual, truth, tolerance)
        if found.worst_index is not None:  # in the model's logits, where a reader looks
            found = msgspec.structs.replace(found, worst_index=self.view.index_of(mode, *found.worst_index))
        share = bound.share(found)
        evidence: dict[str, Any] = {"values": about.values, **self.view.coverage}
        reason = None
        if not passes(share):
            evidence |= self._why(mode, actual, truth, bound).evidence()
            if self.forward.again() is not None and not evidence.keys() & {CAUSE, SEVERAL}:
                reason = (
                    "the model decides (a router, a selection), and rounding may have an engine decide otherwise, "
                    "which cannot be replayed there"
                )
        limit = tolerance if tolerance is not None else bound.allowed(float(found.magnitude))
        if tolerance is None:
            found = msgspec.structs.replace(found, ratio=Real(share))
        row = TensorRecord(
            standard.FORWARD,
            OUTPUT,
            mode,
            rule=Rule.RELATIVE,
            status="measured",
            rounding=rounding,
            evidence=evidence,
            reason=reason,
            dtype=about.dtype,
        )
        self.record.computed(
            row,
            actual,
            found=None if reason else found,
            tolerance=tolerance,
            ingredients={"exact": truth},
            chunks=None if reason else lambda: exact_chunks(actual, truth, limit),
        )

    def _why(self, mode: str, actual: torch.Tensor, truth: torch.Tensor, bound: _Bound) -> Answer:
        """Return what explains the rows that are outside."""
        numbers = self.view.rows_of(mode)
        allowed = bound.allowed(float(truth.abs().max()))
        errors = (actual.to(torch.float64) - truth).abs().amax(-1)
        rows = sorted({int(row) for row in numbers[~(errors <= allowed)]})  # NaN is outside too
        on, off = self.forward.exact.get(ADAPTER_ON), self.forward.exact.get(ADAPTER_OFF)
        inputs, watch = self.forward.inputs, self.forward.again
        sizes = {tensor.shape[:1] for tensor in inputs.values()}
        if on is None:  # a case without an adapter
            return Answer()
        if not rows or watch() is not None or sizes != {torch.Size([self.view.shape[0]])}:
            rows = list(range(self.view.shape[0]))  # decisions are those of a whole batch
        chosen = torch.isin(numbers, torch.tensor(rows))
        first = numbers[chosen] == rows[0]
        wanted = actual[chosen].to(torch.float64)

        def seen(logits: torch.Tensor) -> torch.Tensor:
            whole = torch.zeros(self.view.shape, dtype=torch.float64)
            whole[rows] = logits
            return self.view.model(mode, whole)[chosen]

        def first_seen(logits: torch.Tensor) -> torch.Tensor:
            whole = torch.zeros(self.view.shape, dtype=torch.float64)
            whole[rows[:1]] = logits[:1]
            return self.view.model(mode, whole)[chosen][first]

        def share(explained: torch.Tensor, more: float = 0.0) -> float:
            return bound.share(measure_against_exact(wanted, explained, bound.tolerance), more=more)

        batch = self._passes(rows)
        one = batch if watch() is not None else self._passes(rows[:1])
        free = self._passes(rows, decides=True)
        question = Question(
            mode=mode,
            wanted=wanted,
            seen=seen,
            share=share,
            rounding=bound.rounding,
            passes=batch,
            first=one,
            first_seen=first_seen,
            first_wanted=wanted[first],
            first_share=lambda explained: bound.share(measure_against_exact(wanted[first], explained, bound.tolerance)),
            on=on[rows],
            off=None if off is None else off[rows],
        )
        try:
            with model_code(self.forward.model, "the rest, after "):
                found = explain(question)
                if not found.fits and watch() is not None:  # a real mistake may have the router decide otherwise
                    found = explain(replace(question, passes=free, first=free))
        except Skip as skip:
            found = Answer(not_tried=(str(skip),))
        return replace(found, rows=tuple(rows) if len(rows) < self.view.shape[0] else ())

    def _passes(self, rows: list[int], *, decides: bool = False) -> Passes:
        """Return passes of some rows of the inputs, that decide as the right pass did or each by itself."""
        key = (*rows, decides)
        if key not in self.passes:
            whole = len(rows) == self.view.shape[0]
            inputs = {name: one if whole else one[rows] for name, one in self.forward.inputs.items()}
            self.passes[key] = Passes(
                model=self.forward.model,
                inputs=inputs,
                watch=self.forward.again if not decides else lambda: None,
                step=functools.partial(self.context.events.step, done=0, total=1),
            )
        return self.passes[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """What the `relative` rule, or the user's tolerance, allows an engine's values."""

    dtype: str
    rounding: RoundingError
    tolerance: UserAllowance | None

    def allowed(self, magnitude: float) -> float:
        return relative_allowance(self.rounding, magnitude, self.dtype)

    def share(self, found: Measure, *, more: float = 0.0) -> float:
        """Return the largest error over what is allowed, which `more` adds to."""
        if self.tolerance is not None:
            assert found.ratio is not None
            return float(found.ratio)
        if more:
            return float(found.max_abs) / (self.allowed(float(found.magnitude)) + more)
        return judge_relative(found, self.dtype, self.rounding).ratio


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = next(one for one in UNIT_ROUNDOFF if name_of(one) == name)
    return found


def _exact(mode: str) -> str:
    """Return the mode whose float64 pass serves it."""
    return ADAPTER_ON if mode == ADAPTER_MERGED else mode


def record_batches(
    view: View, record: Recorder, *, drawn: Sequence[torch.Tensor] | None, exact: torch.Tensor | None, dtype: str
) -> None:
    """Record the first row in each batch of the file, `drawn` and `exact` being logits with the adapter.

    Where the engine promises batch invariance, the bits are the same. Where it does not, what batching changes is
    measured, and each is held to the rule of the outputs themselves.
    """
    names = view.outputs.batches
    if drawn is None or exact is None or not names:
        return
    for name in names:
        view.check_batch(name)
    promised = view.outputs.about.batch_invariant
    alone = view.actual(names[0])
    for name in names:
        values, truth = view.actual(name), view.model(name, exact[0])
        rounding = rounding_error([view.drawn(name, one[0], truth) for one in drawn], truth, independent_rows)
        found = measure_against_exact(values, truth)
        share = judge_relative(found, dtype, rounding).ratio
        same = digest(values).value == digest(alone).value
        moved = (values.to(torch.float64) - alone.to(torch.float64)).abs().nan_to_num(nan=torch.inf)
        where = _place(name)
        reason = None
        if not share <= 1:
            reason = f"row 0 {where} is {share:.3g} times as far from float64 as the rule allows"
        elif promised and not same:
            changed = int((values != alone).sum())
            reason = (
                f"row 0 {where} differs in {changed} of {values.numel()} values from row 0 {_place(names[0])}, by at "
                f"most {float(moved.max()):.3g}, although the engine promises that batching changes no bit"
            )
        record.fact(
            standard.FORWARD,
            BATCHES,
            name,
            status="outside" if reason else "equal" if same else "within",
            reason=reason,
            evidence={"promised": promised, "same_bits": same, "max_abs": float(moved.max()), "rule_ratio": share},
        )


def _place(name: str) -> str:
    return "alone" if batch_size(name) == 1 else f"{name.rpartition('.')[2]} in a batch of {batch_size(name)}"


JUDGE = OutputJudge(is_asked=lambda case: bool(case.engine_outputs), judge=judge_engines)
