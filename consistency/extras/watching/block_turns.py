"""Which block the CPU judges at a check, and whether in the training or beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from consistency.extras.watching.beside import LEAST_THREADS, BlockTurn, JudgeBeside, free_threads
from consistency.extras.watching.block_function import BlockInputs
from consistency.extras.watching.block_on_cpu import CHECK, check_block, function_to_judge, judged_block
from consistency.extras.watching.micro_batch import MicroBatch, WatchedModel
from consistency.extras.watching.outcome import CheckOutcome
from consistency.extras.watching.rank_talk import RankTalk
from consistency.extras.watching.repeating import Repeats
from consistency.extras.watching.report import say
from consistency.extras.watching.sharded_block import ShardedBlock


class BlockTurns:
    """The blocks of a model, of which one is judged at each check.

    Every rank makes it alike.

    Parameters
    ----------
    places : sequence of str
        Host and device of each rank.
    every : int
        Steps between two checks.
    folder : Path or None
        Folder for the tensors of a block that is wrong.
    beside : bool or None
        Whether blocks are judged beside the training; None where enough cores are left.

    Attributes
    ----------
    is_beside_anywhere : bool
        Whether any rank judges blocks beside the training.
    """

    def __init__(
        self,
        watched: WatchedModel,
        talk: RankTalk,
        places: Sequence[str],
        *,
        every: int,
        folder: Path | None,
        beside: bool | None,
    ) -> None:
        self._watched = watched
        self._talk = talk
        self._every = every
        self._folder = folder
        self._beside = self._process_beside(places, beside)
        self.is_beside_anywhere = any(talk.gather(self._beside is not None))

    def _process_beside(self, places: Sequence[str], wanted: bool | None) -> JudgeBeside | None:
        """Return the process that judges blocks beside this rank; None where there is none."""
        threads = free_threads(places, places[self._talk.rank], self._watched.device)
        is_wanted = threads >= LEAST_THREADS if wanted is None else wanted
        if not is_wanted or self._watched.is_split or not self._watched.blocks:
            return None
        return JudgeBeside(max(1, threads))

    def in_turn(self, step: int) -> str:
        """Return the block that is judged in a step; empty where none can be."""
        names = list(self._watched.blocks)
        return names[(step // self._every) % len(names)] if names else ""

    def check(
        self, step: int, between: str, batch: MicroBatch | None, repeats: Repeats, sharded: ShardedBlock | None
    ) -> CheckOutcome:
        """Judge one block on every rank: the one at which bits differed on any, or else the next one in turn."""
        suspects = [name for name in self._talk.gather(repeats.suspect) if name]
        in_turn = self.in_turn(step)
        name = suspects[0] if suspects else in_turn
        noted = repeats.inputs if sharded is None else sharded.inputs
        if name != in_turn:
            noted = None  # a pass once more tells what that one has
        file = None
        if self._folder is not None:
            file = self._folder / f"block-of-step-{step}-rank-{self._talk.rank}.safetensors"
        earlier = None if self._beside is None else self._beside.outcome(self._talk)
        waiting = None if self._beside is None else self._beside.waiting
        if suspects or self._beside is None:
            # bits that differ are not left to the next check
            outcome = check_block(self._watched, batch, name, self._talk, between, noted, file)
            return _together(earlier, outcome)
        if waiting is not None:
            turn = waiting.turn
            reason = f"the CPU still computes {turn.name} as it was in step {turn.step}"
            return CheckOutcome(check=CHECK, not_checked=reason)
        begun = BlockTurn(name=name, step=step, between=between, keep_in=file)
        return _together(earlier, self._begun_beside(self._beside, begun, batch, noted))

    def _begun_beside(
        self, beside: JudgeBeside, turn: BlockTurn, batch: MicroBatch | None, noted: BlockInputs | None
    ) -> CheckOutcome:
        """Have a block judged beside the training; where that cannot be done, in it, and from now on."""
        function = function_to_judge(self._watched, batch, turn.name, noted)
        if batch is None or isinstance(function, str):
            return CheckOutcome(check=CHECK, figures={"block": turn.name}, not_checked=str(function))
        why_not = beside.begin(function, batch, turn)
        if not why_not:
            return CheckOutcome(check=CHECK, not_checked=f"{turn.name} is computed beside the training")
        self.close()
        say(f"blocks are judged in the training, and not beside it: {why_not}")
        return judged_block(function, batch, turn.name, self._talk, turn.between, turn.keep_in)

    def last(self, *, wait_s: float) -> CheckOutcome:
        """Return what the process beside says last: there is no further check to say it at."""
        outcome = None if self._beside is None else self._beside.outcome(self._talk, wait_s=wait_s)
        return outcome or CheckOutcome(check=CHECK, not_checked="no block is left that was begun beside the training")

    def close(self) -> None:
        """End the process beside the training."""
        if self._beside is not None:
            self._beside.close()
            self._beside = None


def _together(earlier: CheckOutcome | None, later: CheckOutcome) -> CheckOutcome:
    """Return one outcome of the check of an earlier step, which was told just now, and of that of this step."""
    if earlier is None:
        return later
    earlier.discoveries += later.discoveries
    earlier.wrong_block = earlier.wrong_block or later.wrong_block
    if "ratio" in later.figures:  # of a block that was judged at once
        earlier.figures["at once"] = later.figures
    return earlier
