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
from consistency.capture.records import RecordStatus, TensorRecord, WorkerInfo
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
    """Judge the engines' files of the case, and write the records of each as those of a worker.

    Raises
    ------
    InputError
        A file is not of this case, or does not fit the model.
    """
    passes_by_rows: dict[tuple[int, ...], Passes] = {}
    for engine_file in context.job.case.engine_outputs:
        context.events.step(engine_file.name, 0, 1)
        started = time.monotonic()
        outputs = read_outputs(Path(engine_file.path))
        folder = Path(context.job.folder).parent / worker_slug(engine_file.name, LoadPath.ISOLATED)
        folder.mkdir(exist_ok=True)
        case = context.job.case
        with Recorder(
            folder, Path(context.job.blobs), only=case.only, keep=case.keep, tolerance=case.tolerance
        ) as record:
            _judge(context, forward, outputs, record, passes_by_rows)
        write_json(folder / "worker.json", _info(engine_file, outputs, time.monotonic() - started))


def _info(engine_file: EngineFile, outputs: Outputs, elapsed_s: float) -> WorkerInfo:
    about = outputs.about
    engine = f"{about.engine} {about.version}".strip()
    return WorkerInfo(
        architecture=engine,
        model=about.device,
        name=engine_file.name,
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
    exact = next(iter(forward.exact.values()), None)
    if exact is None:
        why = next(iter(forward.failures.values()), f"the model has no {OUTPUT}")
        raise InputError(f"there is nothing to compare an engine's {OUTPUT} with", where=outputs.path, got=why)
    view = View(outputs, exact.shape, forward.inputs.get("attention_mask"))
    judge = _Engine(context=context, forward=forward, view=view, record=record, passes=passes)
    if not record.wants(standard.FORWARD, OUTPUT):
        return
    for mode in MODES if context.job.case.adapter is not None else (ADAPTER_OFF,):
        judge.judge_mode(mode)
    record_batches(
        view,
        record,
        drawn=forward.drawn.get(ADAPTER_ON),
        exact=forward.exact.get(ADAPTER_ON),
        dtype=outputs.about.dtype,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engine:
    """The outputs of one engine, which are judged mode by mode.

    Attributes
    ----------
    passes : dict
        Passes that all engines share, by the rows of their inputs, and whether they decide by themselves.
    """

    context: Context
    forward: ForwardOutputs
    view: View
    record: Recorder
    passes: dict[tuple[int, ...], Passes]

    def judge_mode(self, mode: str) -> None:
        """Record the outputs of a mode, with what explains them where they are outside."""
        about = self.view.outputs.about
        exact, drawn = self.forward.exact.get(_exact_mode(mode)), self.forward.drawn.get(mode)
        if drawn is None and mode == ADAPTER_MERGED:  # PEFT does not merge this adapter, but the engine does
            drawn = self.forward.drawn.get(ADAPTER_ON)
        if mode not in self.view.outputs.modes or exact is None or drawn is None:
            why = NOT_IN_FILE if exact is not None else self.forward.failures.get(_exact_mode(mode), "")
            why = why or "the model does not run in this mode"
            self.record.skipped(standard.FORWARD, why, mode, layer=OUTPUT, rule=Rule.RELATIVE, unsupported=True)
            return
        self._record_missing_rows(mode)
        actual, truth = self.view.actual(mode), self.view.model(mode, exact)
        noisy = [self.view.drawn(mode, logits, truth) for logits in drawn]
        rounding = rounding_error(noisy, truth, independent_rows)
        tolerance = self.record.tolerance(stage=standard.FORWARD, layer=OUTPUT, dtype=_dtype(about.dtype))
        bound = _Bound(dtype=about.dtype, rounding=rounding, tolerance=tolerance)
        error = measure_against_exact(actual, truth, tolerance)
        if error.worst_index is not None:  # in the model's logits, where a reader looks
            error = msgspec.structs.replace(error, worst_index=self.view.index_of(mode, *error.worst_index))
        ratio = bound.ratio(error)
        evidence: dict[str, Any] = {"values": about.values, **self.view.coverage}
        reason = None
        if not passes(ratio):
            evidence |= self._explain(mode, actual, truth, bound).evidence()
            is_explained = bool(evidence.keys() & {CAUSE, SEVERAL})
            if self.forward.again() is not None and not is_explained:
                reason = (
                    "the model makes decisions (a router, a selection): by rounding an engine may decide otherwise, "
                    "and that cannot be replayed"
                )
        limit = tolerance if tolerance is not None else bound.allowed(float(error.magnitude))
        if tolerance is None:
            error = msgspec.structs.replace(error, ratio=Real(ratio))
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
            measure=None if reason else error,
            tolerance=tolerance,
            ingredients={"exact": truth},
            chunks=None if reason else lambda: exact_chunks(actual, truth, limit),
        )

    def _record_missing_rows(self, mode: str) -> None:
        missing = self.view.rows_missing
        if not missing:
            return
        noun = "row" if len(missing) == 1 else "rows"
        rows = f"{noun} {', '.join(map(str, missing))}"
        reason = f"the engine gave no outputs of {rows} of {self.view.shape[0]}"
        self.record.fact(standard.FORWARD, OUTPUT, f"{mode} of {rows}", status="missing", reason=reason)

    def _explain(self, mode: str, actual: torch.Tensor, truth: torch.Tensor, bound: _Bound) -> Answer:
        """Return what explains the rows that are outside.

        Parameters
        ----------
        actual, truth : torch.Tensor
            `(places, values)`: the engine's values, and the exact ones.
        """
        on, off = self.forward.exact.get(ADAPTER_ON), self.forward.exact.get(ADAPTER_OFF)
        if on is None:  # a case without an adapter
            return Answer()
        row_of_place = self.view.rows_of(mode)
        rows = self._rows_outside(row_of_place, actual, truth, bound)
        is_asked = torch.isin(row_of_place, torch.tensor(rows))
        is_first = row_of_place[is_asked] == rows[0]
        wanted = actual[is_asked].to(torch.float64)

        def view(logits: torch.Tensor) -> torch.Tensor:
            whole = torch.zeros(self.view.shape, dtype=torch.float64)
            whole[rows] = logits
            return self.view.model(mode, whole)[is_asked]

        def first_view(logits: torch.Tensor) -> torch.Tensor:
            whole = torch.zeros(self.view.shape, dtype=torch.float64)
            whole[rows[:1]] = logits[:1]
            return self.view.model(mode, whole)[is_asked][is_first]

        def ratio(values: torch.Tensor, addition: float = 0.0) -> float:
            return bound.ratio(measure_against_exact(wanted, values, bound.tolerance), addition=addition)

        def first_ratio(values: torch.Tensor) -> float:
            return bound.ratio(measure_against_exact(wanted[is_first], values, bound.tolerance))

        decides = self.forward.again() is not None
        batch = self._passes(rows)
        free = self._passes(rows, decides=True)
        question = Question(
            mode=mode,
            wanted=wanted,
            view=view,
            ratio=ratio,
            rounding=bound.rounding,
            passes=batch,
            first=batch if decides else self._passes(rows[:1]),
            first_view=first_view,
            first_wanted=wanted[is_first],
            first_ratio=first_ratio,
            on=on[rows],
            off=None if off is None else off[rows],
        )
        try:
            with model_code(self.forward.model, "the rest, after "):
                answer = explain(question)
                if not answer.fits and decides:  # a real mistake may have the router decide otherwise
                    answer = explain(replace(question, passes=free, first=free))
        except Skip as skip:
            answer = Answer(not_tried=(str(skip),))
        return replace(answer, rows=tuple(rows) if len(rows) < self.view.shape[0] else ())

    def _rows_outside(
        self, row_of_place: torch.Tensor, actual: torch.Tensor, truth: torch.Tensor, bound: _Bound
    ) -> list[int]:
        """Return the rows that are outside, or all rows where they cannot be computed by themselves."""
        allowed = bound.allowed(float(truth.abs().max()))
        errors = (actual.to(torch.float64) - truth).abs().amax(-1)
        rows = sorted({int(row) for row in row_of_place[~(errors <= allowed)]})  # NaN is outside too
        sizes = {tensor.shape[:1] for tensor in self.forward.inputs.values()}
        has_other_sizes = sizes != {torch.Size([self.view.shape[0]])}
        decides = self.forward.again() is not None  # decisions are those of a whole batch
        if not rows or decides or has_other_sizes:
            return list(range(self.view.shape[0]))
        return rows

    def _passes(self, rows: list[int], *, decides: bool = False) -> Passes:
        """Return passes of some rows of the inputs, which decide as the right pass did, or each by itself."""
        key = (*rows, decides)
        if key not in self.passes:
            inputs = dict(self.forward.inputs)
            if len(rows) < self.view.shape[0]:
                inputs = {name: tensor[rows] for name, tensor in inputs.items()}
            self.passes[key] = Passes(
                model=self.forward.model,
                inputs=inputs,
                watch=(lambda: None) if decides else self.forward.again,
                step=functools.partial(self.context.events.step, done=0, total=1),
            )
        return self.passes[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """The error that the `relative` rule, or the user's tolerance, allows an engine's values."""

    dtype: str
    rounding: RoundingError
    tolerance: UserAllowance | None

    def allowed(self, magnitude: float) -> float:
        return relative_allowance(self.rounding, magnitude, self.dtype)

    def ratio(self, error: Measure, *, addition: float = 0.0) -> float:
        """Return the largest error over what is allowed, which `addition` is added to.

        A user's tolerance stays as it is.
        """
        if self.tolerance is not None:
            assert error.ratio is not None
            return float(error.ratio)
        if addition:
            return float(error.max_abs) / (self.allowed(float(error.magnitude)) + addition)
        return judge_relative(error, self.dtype, self.rounding).ratio


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = next(dtype for dtype in UNIT_ROUNDOFF if name_of(dtype) == name)
    return dtype


def _exact_mode(mode: str) -> str:
    """Return the mode whose exact pass judges a mode: merged and on are the same in float64."""
    return ADAPTER_ON if mode == ADAPTER_MERGED else mode


def record_batches(
    view: View, record: Recorder, *, drawn: Sequence[torch.Tensor] | None, exact: torch.Tensor | None, dtype: str
) -> None:
    """Record the first row in each batch of the file.

    Where the engine promises batch invariance, the bits are the same. Where it does not, what batching changes is
    measured, and each is held to the rule of the outputs themselves.

    Parameters
    ----------
    drawn, exact : sequence of torch.Tensor, torch.Tensor
        Logits with the adapter, of noisy passes and exact; nothing is recorded where there are none.
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
        rounding = rounding_error([view.drawn(name, logits[0], truth) for logits in drawn], truth, independent_rows)
        ratio = judge_relative(measure_against_exact(values, truth), dtype, rounding).ratio
        is_same = digest(values).value == digest(alone).value
        moved = (values.to(torch.float64) - alone.to(torch.float64)).abs().nan_to_num(nan=torch.inf)
        where = _place(name)
        status: RecordStatus = "equal" if is_same else "within"
        reason = None
        if not ratio <= 1:
            status = "outside"
            reason = f"row 0 {where} is {ratio:.3g} times as far from float64 as the rule allows"
        elif promised and not is_same:
            status = "outside"
            changed = int((values != alone).sum())
            reason = (
                f"row 0 {where} differs in {changed} of {values.numel()} values from row 0 {_place(names[0])}, by at "
                f"most {float(moved.max()):.3g}, although the engine promises that batching changes no bit"
            )
        record.fact(
            standard.FORWARD,
            BATCHES,
            name,
            status=status,
            reason=reason,
            evidence={"promised": promised, "same_bits": is_same, "max_abs": float(moved.max()), "rule_ratio": ratio},
        )


def _place(name: str) -> str:
    if batch_size(name) == 1:
        return "alone"
    return f"{name.rpartition('.')[2]} in a batch of {batch_size(name)}"


JUDGE = OutputJudge(is_asked=lambda case: bool(case.engine_outputs), judge=judge_engines)
