"""Checks 2 and 3: the last micro-batch once more, on this rank and on the next one, has the same bits.

The first pass is the training's own: hooks note digests of what each block computes and of each gradient, forward and
backward. The second is made before the optimizer's step, with the same parameters, draws and arriving gradient. Where a
training computes what hooks on its model do not see, as a loss with a term of its own, no pass has the bits of the
first: so other bits are a finding only after a pass has had equal ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree

from consistency.comparison import kinds
from consistency.errors import first_line
from consistency.extras.watching.block_function import BlockInputs, keep_inputs_of
from consistency.extras.watching.kinds import OTHER_RANK_DIFFERS
from consistency.extras.watching.micro_batch import MicroBatch, PassMarks, WatchedModel
from consistency.extras.watching.outcome import CheckOutcome, Discovery
from consistency.extras.watching.rank_talk import RankTalk, rank_names

SPLIT = "the model is split over the ranks: a pass needs all of them"


REENTRANT = "gradients: a reentrant checkpoint gives none to a pass that is made again"


@dataclass(slots=True)
class Repeats:
    """The passes of this rank that were computed a second time, and how they compared.

    Attributes
    ----------
    has_repeated : bool
        Whether a pass once more has had the bits of the training's own.
    again : PassMarks or None
        The last pass that was made again; None where there is none.
    suspect : str
        Block at which bits differed, for the next check to judge; empty where none did.
    """

    has_repeated: bool = False
    again: PassMarks | None = None
    suspect: str = ""
    inputs: BlockInputs | None = None
    """What one block had in the pass that was made again; None where none was."""

    def check(
        self, watched: WatchedModel, batch: MicroBatch | None, talk: RankTalk, between: str, block: str = ""
    ) -> CheckOutcome:
        """Compute the last micro-batch once more on this rank (check 2).

        Parameters
        ----------
        block : str
            The block whose inputs are kept, since it is judged next; empty for none.
        """
        outcome = CheckOutcome(check="this rank repeats")
        self.again, self.suspect, self.inputs = None, "", None
        outcome.not_checked = _why_not(watched, batch)
        if outcome.not_checked or batch is None or batch.marks is None:
            return outcome
        try:
            first = batch.marks
            self.inputs = BlockInputs() if block else None
            self.again, is_whole = _pass_once_more(watched, batch, batch.marks.incoming, block, self.inputs)
            if not is_whole:
                first = first.of_forward_pass()
                outcome.not_checked = REENTRANT
            place = first.first_difference(self.again)
            if place is not None and not self.has_repeated:
                outcome.not_checked = _why_never_equal(self.again, watched.repeat(batch, batch.marks.incoming))
        except Exception as error:  # model code may raise anything, and the training is to go on
            outcome.not_checked = f"the pass cannot be made again: {first_line(error)}"
            return outcome
        outcome.figures["results"] = len(first.digests)
        if place is None:
            self.has_repeated = True
        elif self.has_repeated:
            self._note_difference(outcome, watched, place, talk, between)
        return outcome

    def _note_difference(
        self, outcome: CheckOutcome, watched: WatchedModel, place: tuple[str, str], talk: RankTalk, between: str
    ) -> None:
        """Report other bits where each pass has to have the same; else have the block judged that differs first."""
        layer, tensor = place
        self.suspect = watched.block_of(layer)
        if not repeats_its_bits(watched.device):
            outcome.figures["other bits"] = f"{layer}.{tensor}"
            outcome.not_checked = "deterministic algorithms are off: the block that differs is judged by the rule block"
            return
        outcome.discoveries.append(
            Discovery(
                kind=kinds.NOT_REPEATABLE,
                message=f"{rank_names([talk.rank])} has other bits when it computes the same micro-batch again, first "
                f"in the {tensor} of {layer or 'the model'}: {between}",
                ranks=(talk.rank,),
                tensors=((layer or "model", tensor),),
                next="test that card and its memory (consistency run --for 1h --load); take the node out",
            )
        )


def _pass_once_more(
    watched: WatchedModel,
    batch: MicroBatch,
    incoming: Mapping[int, torch.Tensor],
    block: str,
    inputs: BlockInputs | None,
) -> tuple[PassMarks, bool]:
    """Compute a micro-batch once more, and tell whether gradients were: a reentrant checkpoint gives none."""
    handles = keep_inputs_of(watched.blocks[block], inputs) if inputs is not None else []
    try:
        marks = watched.repeat(batch, incoming)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):  # torch's own error about it
            raise
        marks = PassMarks()
    finally:
        for handle in handles:
            handle.remove()
    if marks.has_gradients:
        return marks, True
    return watched.repeat(batch, {}), False


def _why_not(watched: WatchedModel, batch: MicroBatch | None) -> str:
    if watched.is_split:
        return SPLIT
    if batch is None or batch.marks is None:
        return "no forward pass of the model was seen in this step"
    if watched.is_called_compiled:
        return "the training compiles a wrapper of the model, and a pass once more would not be compiled"
    if not batch.marks.incoming:
        return "no gradient arrived at the model's outputs"
    return ""


def _why_never_equal(again: PassMarks, once_more: PassMarks) -> str:
    if again.first_difference(once_more) is None:
        return "the training computes more than the model's forward pass and its loss: a pass has never had its bits"
    return "no two passes have the same bits: deterministic algorithms are off"


def repeats_its_bits(device: torch.device) -> bool:
    """Report whether the same pass has to have the same bits: on the CPU, and where torch was told so."""
    return device.type == "cpu" or torch.are_deterministic_algorithms_enabled()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """A micro-batch on its way to the next rank, with what its own rank computed."""

    batch: MicroBatch
    marks: PassMarks
    incoming: dict[int, torch.Tensor]
    kernels: str
    rank: int


def check_on_next_rank(
    watched: WatchedModel, batch: MicroBatch | None, repeats: Repeats, talk: RankTalk, between: str
) -> CheckOutcome:
    """Compute the micro-batch of the rank before, and compare with what that rank computed (check 3)."""
    outcome = CheckOutcome(check="another rank says the same")
    if talk.world == 1:
        outcome.not_checked = "one rank"
        return outcome
    # every rank sends something, and every rank waits for it: none hangs where another cannot
    sent: _Sent | str = SPLIT if watched.is_split else _sendable(watched, batch, repeats, talk.rank)
    received = talk.pass_on(sent)
    if isinstance(received, str):
        outcome.not_checked = received
    elif received.kernels != _kernels(watched.device):
        outcome.not_checked = "the ranks have unlike devices or settings: their bits may differ"
    elif not repeats_its_bits(watched.device):
        outcome.not_checked = "deterministic algorithms are off: the bits of two ranks may differ"
    else:
        _compute_for(received, watched, repeats, talk, outcome, between)
    return outcome


def _sendable(watched: WatchedModel, batch: MicroBatch | None, repeats: Repeats, rank: int) -> _Sent | str:
    if batch is None or batch.marks is None or repeats.again is None or not repeats.has_repeated:
        return "the rank before has no pass to compare with"
    moved = MicroBatch(
        args=_to(batch.args, torch.device("cpu")),
        kwargs=_to(batch.kwargs, torch.device("cpu")),
        generators=batch.generators,
        autocast=batch.autocast,
    )
    incoming = _to(batch.marks.incoming, torch.device("cpu"))
    # gradients that arrive are those of `incoming` alone
    marks = replace(repeats.again, incoming={})
    return _Sent(batch=moved, marks=marks, incoming=incoming, kernels=_kernels(watched.device), rank=rank)


def _compute_for(
    received: _Sent, watched: WatchedModel, repeats: Repeats, talk: RankTalk, outcome: CheckOutcome, between: str
) -> None:
    batch = received.batch
    batch.args, batch.kwargs = _to(batch.args, watched.device), _to(batch.kwargs, watched.device)
    try:
        marks = watched.repeat(batch, _to(received.incoming, watched.device))
    except Exception as error:  # model code may raise anything, and the training is to go on
        outcome.not_checked = f"the pass of {rank_names([received.rank])} cannot be made here: {first_line(error)}"
        return
    place = received.marks.first_difference(marks)
    if place is None:
        return
    layer, tensor = place
    repeats.suspect = repeats.suspect or watched.block_of(layer)
    outcome.discoveries.append(
        Discovery(
            kind=OTHER_RANK_DIFFERS,
            message=f"ranks {received.rank} and {talk.rank} compute the same micro-batch with the same weights to "
            f"other bits, first in the {tensor} of {layer or 'the model'}: {between}",
            ranks=(received.rank, talk.rank),
            tensors=((layer or "model", tensor),),
            next="read which of the two the check by the CPU names; else exchange their cards, or test both",
        )
    )


def _to(value: Any, device: torch.device) -> Any:
    def moved(leaf: Any) -> Any:
        return leaf.detach().to(device) if isinstance(leaf, torch.Tensor) else leaf

    return _pytree.tree_map(moved, value)


def _kernels(device: torch.device) -> str:
    """Return what two ranks have to have in common so that their bits are the same."""
    name = torch.backends.cpu.get_cpu_capability()
    if device.type != "cpu":
        name = torch.get_device_module(device).get_device_name(device)
    return f"{name} {torch.get_num_threads()} {torch.__version__}"
