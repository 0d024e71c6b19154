"""The watch of a training, in a loop of one's own or by accelerate.

A watch hangs on two hooks. Before the model's forward pass it notes the micro-batch; before the optimizer's step it
checks, while parameters are still those of the passes and the gradients are there. Between two checks it holds
references alone, and asks in each step only whether the norm of the gradients is finite.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from consistency.capture.names import split_name
from consistency.capture.whole_file import write_whole
from consistency.capture.wording import counted
from consistency.errors import CaptureError, ConsistencyError, UsageError, first_line
from consistency.extras.watching import report
from consistency.extras.watching.agreement import (
    BUFFER,
    GRADIENT,
    PARAMETER,
    STATE,
    Digests,
    changed_base,
    check_agreement,
    digests_of,
    optimizer_tensors,
)
from consistency.extras.watching.block_turns import BlockTurns
from consistency.extras.watching.counters import check_counters
from consistency.extras.watching.evidence_folder import EvidenceFolder
from consistency.extras.watching.grouping import one_for_each_fault
from consistency.extras.watching.kinds import BASE_CHANGED
from consistency.extras.watching.loss_by_rank import LossByRank, loss_in
from consistency.extras.watching.micro_batch import (
    MicroBatch,
    PassMarks,
    WatchedModel,
    is_inside_compiled_call,
    not_compiled,
)
from consistency.extras.watching.not_finite import check_origin, gradients_are_finite
from consistency.extras.watching.outcome import CheckOutcome, Discovery
from consistency.extras.watching.rank_talk import RankTalk, place_of_rank
from consistency.extras.watching.repeating import Repeats, check_on_next_rank
from consistency.extras.watching.set_up import (
    Trained,
    check_batches,
    check_reloaded,
    check_weights,
    first_elements,
    weighed_parameter,
)
from consistency.extras.watching.sharded_block import ShardedBlock, can_be_gathered
from consistency.extras.watching.standstill import Standstill
from consistency.extras.watching.sums import LocalSum, check_sum, local_sum

OnFinding = Literal["warn", "stop", "raise"]
_ON_FINDING = ("warn", "stop", "raise")

_BATCHES = 3
"""Steps whose batches are compared between ranks: one may be the same by chance."""

_BASE = "base-digests.json"
"""File with the digests of the base weights when a training began, which it is held against when it goes on."""


class TrainingError(ConsistencyError):
    """A watch has found that a training goes wrong, and was told to raise."""

    exit_status = 1


class Watch:
    """Watch a training: check at every so many steps that ranks agree, repeat, and compute what the CPU computes.

    Every rank makes it, after the process group and before the first step, and calls `step` alike.

    Parameters
    ----------
    model : torch.nn.Module
        The model, in DistributedDataParallel or not.
    optimizer : torch.optim.Optimizer
        The optimizer, as accelerate prepares it or as it is.
    every : int
        Steps of the optimizer between two checks; the first step is checked too.
    on_finding : {"warn", "stop", "raise"}
        What to do with a finding: say it; have `step` return True on all ranks; or raise `TrainingError` on all ranks
        before the optimizer's step.
    output : path, optional
        Folder for `watch.jsonl`, a line for each check, and for the report of a finding.
    first_step : int
        Steps that were done before, where a training goes on.
    resumed_from : path, optional
        Checkpoint from which it goes on: its adapter is compared with the adapter in the model.
    timeout_s : float
        Seconds that a rank waits for the others in a check, and that a training of several ranks may stand still: then
        the rank that it waits for is named. With ``on_finding="raise"`` all processes that are left end, with status 1.
    beside : bool, optional
        Whether the CPU's part of a check runs in a process beside the training, and is said at the next check; by
        default where two cores for each rank are left beside those that the training computes with.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 200,
        on_finding: OnFinding = "warn",
        output: str | Path | None = None,
        first_step: int = 0,
        resumed_from: str | Path | None = None,
        timeout_s: float = 600.0,
        beside: bool | None = None,
    ) -> None:
        if every < 1:
            raise UsageError("a watch checks at every so many steps", where="every=", got=every, wanted="1 or more")
        if on_finding not in _ON_FINDING:
            wanted = ", ".join(_ON_FINDING)
            raise UsageError("unknown way to treat a finding", where="on_finding=", got=on_finding, wanted=wanted)
        self.every = every
        self.on_finding = on_finding
        self.folder = None if output is None else Path(output)
        self.findings: list[Discovery] = []
        self.metrics: dict[str, float] = {}
        self.should_stop = False
        self._watched = WatchedModel(model)
        self._optimizer = unwrapped_optimizer(optimizer)
        self._talk = RankTalk(timeout_s=timeout_s)
        self._places = self._talk.gather(place_of_rank(self._watched.device))
        self._began_s = time.monotonic()
        self._first_step = self._last_checked = self._done = first_step
        self._resumed_from = None if resumed_from is None else Path(resumed_from)
        self._batches: list[MicroBatch] = []
        self._recent: deque[str] = deque(maxlen=_BATCHES)
        self._buffers: Digests = {}
        self._local_sum: LocalSum | None = None
        self._sharded: ShardedBlock | None = None
        self._parts: list[torch.Tensor] = []
        self._remove_step_hooks: list[Callable[[], None]] = []
        self._repeats = Repeats()
        self._loss_by_rank = LossByRank()
        self._gives_no_loss = False
        self._trained = Trained()
        self._trained.begin(self._watched)
        self._counters: dict[str, Any] = {}
        self._start = self._frozen_digests()
        self._is_checking = False
        self._was_not_finite = False
        self._said: set[tuple[Any, ...]] = set()
        self._unwritten: set[str] = set()
        self._evidence = EvidenceFolder(self._talk, self.folder, self._places)
        self._timeout_s = timeout_s
        self._blocks = BlockTurns(
            self._watched, self._talk, self._places, every=every, folder=self.folder, beside=beside
        )
        self._standstill = Standstill(
            self._talk,
            self._places,
            first_step=first_step,
            timeout_s=timeout_s,
            say=self._say_standstill,
            end=self._end_standstill,
        )
        self._handles = [
            # of the whole: DistributedDataParallel talks to the other ranks before the model's own forward pass
            model.register_forward_pre_hook(not_compiled(self._note_begin)),
            self._watched.model.register_forward_pre_hook(not_compiled(self._before_forward), with_kwargs=True),
            self._watched.model.register_forward_hook(not_compiled(self._after_forward)),
            self._optimizer.register_step_pre_hook(self._before_update),
        ]

    def step(self, batch: Any = None, loss: Any = None) -> bool:  # noqa: ARG002 - `batch` is for the reader of a loop
        """Say that a step of the training's loop is done; return whether the training is to stop.

        Parameters
        ----------
        batch, loss
                Hooks see the batch. The loss is needed where the model does not give it: it is compared between ranks.
        """
        if self._gives_no_loss:
            self._loss_by_rank.note(loss)
        return self.should_stop

    def close(self) -> None:
        """End the watch; every rank calls it."""
        for handle in self._handles:
            handle.remove()
        self._end_step()
        was_open, self._handles = bool(self._handles), []
        try:
            if was_open and self._blocks.is_beside_anywhere:
                self._conclude(self._done, [(self._blocks.last(wait_s=self._timeout_s / 2), 0.0)])
        finally:
            self._blocks.close()
            self._standstill.close()
            self._talk.close()

    def is_due(self, step: int) -> bool:
        """Return whether a step is checked: the first one of this process, and every so many."""
        return step == self._first_step + 1 or step % self.every == 0

    # --- what the hooks do --------------------------------------------------------------------------------------------

    def _before_forward(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a micro-batch of the training; passes of an evaluation, and those of the watch, are none."""
        if self._is_checking or not model.training or not torch.is_grad_enabled():
            return
        batch = self._watched.batch_of(args, kwargs)
        if self._parts and self._has_no_gradient():
            # gradients were put away without a step, as a gradient scaler does where one overflows
            self._end_step()
        if self._watched.blocks and self.is_due(self._done + 1) and is_inside_compiled_call():
            # a hook on its blocks would have torch compile the step that is checked by itself
            self._watched.blocks, self._watched.is_called_compiled = {}, True
        is_first = not self._batches
        self._batches.append(batch)
        if not self.is_due(self._done + 1):
            return
        if is_first:
            # here, since DistributedDataParallel has just sent the first rank's buffers to all
            self._buffers = digests_of(BUFFER, self._watched.buffers())
            self._begin_sums()
        if self._sharded is not None:
            self._sharded.begin_micro_batch()
        if not self._watched.is_split:
            batch.marks = PassMarks()
            for earlier in self._batches[:-1]:
                earlier.marks = None  # the last one is repeated
            self._end_marks()
            self._remove_marks = self._watched.mark(batch.marks)

    def _has_no_gradient(self) -> bool:
        gradients = (parameter.grad for parameter in self._watched.trainable().values())
        return not any(gradient is not None and bool(gradient.any()) for gradient in gradients)

    def _note_begin(self, model: torch.nn.Module, _: Any) -> None:
        """Note that a forward pass begins; one of an evaluation is a sign of life alone."""
        self._standstill.is_alive()
        if not self._is_checking and model.training and torch.is_grad_enabled():
            self._standstill.forward_begins(self._done + 1, len(self._batches) + 1)

    def _after_forward(self, model: torch.nn.Module, _args: Any, output: Any) -> None:
        if not self._batches or self._is_checking:
            return
        self._standstill.forward_ends(self._done + 1, len(self._batches))
        if model.training and torch.is_grad_enabled():
            loss = loss_in(output)
            self._gives_no_loss = loss is None
            self._loss_by_rank.note(loss)

    _remove_marks: Callable[[], None] | None = None

    def _end_marks(self) -> None:
        if self._remove_marks is not None:
            self._remove_marks()
            self._remove_marks = None

    def _begin_sums(self) -> None:
        """Have what backward passes give two tensors noted until the end of the step."""
        number = 0 if self._done == self._first_step else (self._done + 1) // self.every
        name = self._blocks.in_turn(self._done + 1)
        if can_be_gathered(self._watched, name):
            self._sharded = ShardedBlock(self._watched, name, number)
            self._local_sum = self._sharded.local
            self._remove_step_hooks.append(self._sharded.end)
        elif self._talk.world > 1:
            self._local_sum = local_sum(self._watched, number)
            if self._local_sum is not None:
                self._local_sum.begin()
                self._remove_step_hooks.append(self._local_sum.end)
        parameter = weighed_parameter(self._watched)
        if parameter is not None and not self._watched.is_split:
            handle = parameter.register_hook(lambda gradient: self._parts.append(first_elements(gradient)))
            self._remove_step_hooks.append(handle.remove)

    def _before_update(self, *_: Any) -> None:
        """Check, where the step is due; every rank comes here once in each step."""
        step = self._done + 1
        self._end_hooks_of_step()  # passes of the checks are none of the training's
        self._is_checking = True
        self._standstill.check_begins(step)
        try:
            self._trained.note_step(self._watched, self._optimizer)
            if any(self.is_due(step + later) for later in range(_BATCHES)) or step <= self._first_step + _BATCHES:
                self._recent.append("|".join(batch.digest() for batch in self._batches))
            outcomes: list[tuple[CheckOutcome, float]] = []
            for check in self._checks(step):
                began_s = time.monotonic()
                outcome = check()
                outcomes.append((outcome, time.monotonic() - began_s))
            if outcomes:
                self._conclude(step, outcomes)
        finally:
            self._is_checking = False
            self._done = step
            self._end_step()
            self._standstill.step_ends(step)

    def _end_hooks_of_step(self) -> None:
        self._end_marks()
        for remove in self._remove_step_hooks:
            remove()
        self._remove_step_hooks = []

    def _end_step(self) -> None:
        self._end_hooks_of_step()
        self._batches, self._parts, self._local_sum, self._sharded = [], [], None, None

    # --- what is checked ----------------------------------------------------------------------------------------------

    def _checks(self, step: int) -> Iterator[Callable[[], CheckOutcome]]:
        """Yield the checks of a step, in an order in which what explains others comes first."""
        between = f"between steps {self._last_checked} and {step}"
        if not self._was_not_finite and not self._is_finite():
            self._was_not_finite = True
            yield lambda: check_origin(self._watched, self._batches, self._talk, f"in step {step}")
        if step == self._first_step + _BATCHES:
            yield lambda: check_batches(self._recent, self._talk, shares_batches=self._watched.shares_batches)
        if not self.is_due(step):
            return
        if step == self._first_step + 1:
            yield lambda: check_reloaded(self._watched, self._resumed_from, self._talk)
            yield self._check_base_of_start
        else:
            yield lambda: check_batches(self._recent, self._talk, shares_batches=self._watched.shares_batches)
            yield lambda: self._trained.check(self._watched, self._optimizer, self._talk)
        yield lambda: self._trained.check_dtypes(self._watched, self._talk)
        yield lambda: self._check_agreement(between)
        yield lambda: self._loss_by_rank.check(self._own_norm(), self._talk, between)
        yield lambda: check_sum(self._watched, self._local_sum, self._talk, between)
        yield lambda: check_weights(self._watched, self._batches, self._parts)
        turn = self._blocks.in_turn(step)
        yield lambda: self._repeats.check(self._watched, self._last_batch, self._talk, between, turn)
        yield lambda: check_on_next_rank(self._watched, self._last_batch, self._repeats, self._talk, between)
        yield lambda: self._blocks.check(step, between, self._last_batch, self._repeats, self._sharded)
        yield lambda: check_counters(self._counters, self._watched.device, self._talk, between)

    @property
    def _last_batch(self) -> MicroBatch | None:
        return self._batches[-1] if self._batches else None

    def _is_finite(self) -> bool:
        """Report whether gradients are finite; those that are split need all ranks, and are not asked."""
        if self._watched.is_split:
            return True
        return gradients_are_finite(list(self._watched.trainable().values()))

    def _frozen_digests(self) -> Digests:
        frozen = {name: tensor for name, tensor in self._watched.parameters().items() if not tensor.requires_grad}
        return digests_of(PARAMETER, frozen)

    def _check_agreement(self, between: str) -> CheckOutcome:
        """Compare what all ranks hold, and the base weights with those of the start."""
        watched = self._watched
        parameters = digests_of(PARAMETER, watched.parameters())
        own = dict(self._buffers)
        if not watched.has_flat_parts:
            own |= parameters | self._gradient_and_state_digests()
        outcome = check_agreement(self._talk, own, start=self._start, between=between)
        if watched.has_flat_parts and not outcome.not_checked:
            outcome.not_checked = "parameters: each rank holds a part of every one (FullyShardedDataParallel)"
        changed = changed_base(parameters, self._start)
        if changed and not outcome.discoveries:
            outcome.discoveries.append(_base_changed(changed, f"{between}", "since the training began"))
        if self._talk.rank:
            outcome.discoveries = []  # every rank has found the same
        return outcome

    def _gradient_and_state_digests(self) -> Digests:
        gradients = {name: tensor.grad for name, tensor in self._watched.trainable().items() if tensor.grad is not None}
        digests = digests_of(GRADIENT, gradients)
        if type(self._optimizer).__name__ != "ZeroRedundancyOptimizer":  # each rank has the state of its own part
            names = {id(parameter): name for name, parameter in self._watched.parameters().items()}
            digests |= digests_of(STATE, optimizer_tensors(self._optimizer, names))
        return digests

    def _check_base_of_start(self) -> CheckOutcome:
        """Compare the base weights with those that the training had when it first began."""
        outcome = CheckOutcome(check="the base is that of the start")
        file = None if self.folder is None else self.folder / _BASE
        if self._talk.rank or file is None or self._watched.is_split:
            outcome.not_checked = "the first rank does" if self._talk.rank else "no folder, or a split model"
            return outcome
        if self._first_step == 0 and self._resumed_from is None:
            outcome.not_checked = "the training begins"
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_whole(file, [json.dumps(self._start).encode()])
            except (OSError, CaptureError) as error:  # a full disk ends no training
                outcome.not_checked = f"the training begins, and {_unwritten(file, error)}"
            return outcome
        try:
            start: Digests = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            outcome.not_checked = f"the digests of the start cannot be read: {first_line(error)}"
            return outcome
        changed = changed_base(self._start, start)
        outcome.figures["tensors"] = len(start)
        if changed:
            outcome.discoveries.append(_base_changed(changed, "on resuming", "than when the training began"))
        return outcome

    def _own_norm(self) -> float | None:
        """Return the norm of this rank's own gradient of the tensor whose sum is checked."""
        total = None if self._local_sum is None else self._local_sum.total
        return None if total is None else float(total.norm())

    # --- what follows from it -----------------------------------------------------------------------------------------

    def _conclude(self, step: int, outcomes: list[tuple[CheckOutcome, float]]) -> None:
        """Tell all ranks what any has found, write it down, and do what was asked for."""
        by_rank = self._talk.gather([outcome.discoveries for outcome, _ in outcomes])
        seen: dict[tuple[Any, ...], Discovery] = {}
        for number in range(len(outcomes)):
            for discoveries in by_rank:
                for discovery in discoveries[number]:
                    seen.setdefault(discovery.key, discovery)
        # a fault that was said before and is still there explains what follows from it now
        faults = one_for_each_fault(list(seen.values()))
        new = [discovery for discovery in faults if discovery.key not in self._said]
        self._said.update(seen, (discovery.key for discovery in new))
        self.findings += new
        seconds = sum(elapsed for _, elapsed in outcomes)
        self.metrics = {"watch/findings": float(len(self.findings)), "watch/seconds": seconds}
        self._last_checked = step
        for text in self._evidence.store(new, [outcome for outcome, _ in outcomes], self._title):
            self._say_unwritten(text)
        if self._talk.rank == 0:
            self._write(step, outcomes, by_rank, new)
        if any(discovery.severity != "note" for discovery in new):
            self._act(new)

    @property
    def _title(self) -> str:
        """The model, in words."""
        return type(self._watched.model).__name__

    def _write(
        self, step: int, outcomes: list[tuple[CheckOutcome, float]], by_rank: list[list[list[Discovery]]], new: Any
    ) -> None:
        if self.folder is not None:
            for number, (outcome, elapsed_s) in enumerate(outcomes):
                outcome.discoveries = [found for discoveries in by_rank for found in discoveries[number]]
                self._write_line(step, outcome, elapsed_s)
        self._report(step, new)

    def _write_line(self, step: int, outcome: CheckOutcome, elapsed_s: float) -> None:
        """Write a check down; where that cannot be done, such as on a full disk, say so and let the training go on."""
        if self.folder is None:
            return
        try:
            report.write_line(self.folder, step, outcome, elapsed_s)
        except OSError as error:
            self._say_unwritten(_unwritten(self.folder / report.LINES, error))

    def _say_unwritten(self, text: str) -> None:
        """Say what cannot be written, each once: hours of checks may find the same full disk."""
        if text not in self._unwritten:
            self._unwritten.add(text)
            report.say(text)

    def _report(self, step: int, new: Sequence[Discovery]) -> None:
        """Print what was found by now, and write the report of all that was found."""
        for discovery in new:
            report.say(f"{discovery.severity}: {discovery.message}")
        if new and self.folder is not None:
            steps = f"steps {self._first_step + 1} to {step}, checked every {self.every}"
            comparison = report.as_comparison(
                self.findings, title=self._title, places=self._places, steps=steps, stored=self._evidence.records
            )
            try:
                unwritten = report.write_report(self.folder, comparison, self._began_s)
            except OSError as error:
                unwritten = [_unwritten(self.folder, error)]
            for text in unwritten:
                self._say_unwritten(text)
            if not unwritten:
                report.say(f"consistency show {self.folder}")

    def _say_standstill(self, discovery: Discovery) -> None:
        """Report that the training stands still, in another thread than it."""
        self.findings.append(discovery)
        outcome = CheckOutcome(check="the training moves", discoveries=[discovery])
        self._write_line(self._done + 1, outcome, 0.0)
        self._report(self._done + 1, [discovery])

    def _end_standstill(self) -> None:
        """End this process where that was asked for: nothing else ends a collective that waits for a lost rank."""
        if self.on_finding == "raise":
            os._exit(TrainingError.exit_status)

    def _act(self, new: list[Discovery]) -> None:
        if self.on_finding == "warn":
            return
        self.should_stop = True
        if self.on_finding == "raise":
            worst = next(discovery for discovery in new if discovery.severity != "note")
            where = None if self.folder is None else f"consistency show {self.folder}"
            raise TrainingError(worst.message, where=where, hint=worst.next)


def _unwritten(place: Path, error: Exception) -> str:
    return f"cannot write {place}: {first_line(error)}"


def _base_changed(names: list[str], when: str, since: str) -> Discovery:
    places = tuple(split_name(name) for name in names)
    return Discovery(
        kind=BASE_CHANGED,
        message=f"{counted(len(names), 'base weight')} that nothing trains changed, {names[0]} first: other bits "
        f"{since}: {when}",
        tensors=places,
        next="load the base in the dtype in which the training began, from the same files; look for a merge of the "
        "adapter that was undone",
    )


def unwrapped_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside of accelerate's."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError("not an optimizer of torch", where="optimizer=", got=type(optimizer).__name__)
    return optimizer
