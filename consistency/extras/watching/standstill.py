"""A thread that notices when a training stands still, and names the rank that it waits for.

Every second each rank leaves a sign of life in the store of the process group, with where its training is. A rank
whose own training has not moved for the time-out reads the signs of all: one that is no longer renewed is of a process
that is gone or stopped, and of the others the one that is least far has kept the rest waiting. The thread needs no
collective, so that it speaks where the training cannot.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from consistency.extras.watching.kinds import STANDS_STILL
from consistency.extras.watching.outcome import Discovery
from consistency.extras.watching.rank_talk import RankTalk, rank_names

_BEAT_S = 1.0
"""Seconds between two signs of life."""

_GONE_BEATS = 5
"""Beats without a new sign after which a rank gives none."""

_CHECK = 1 << 20
"""Part of a step that is the check of a watch: after all of its micro-batches."""

_SAID = "said"
"""Key in the store that is there once a rank has said what the training waits for."""

_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class TrainingPlace:
    """Where a training is: a step, and how far in it.

    Attributes
    ----------
    step : int
        Number of the step, from 1 on.
    part : int
        0 before its first forward pass, 1 and 2 in and after the first forward pass, 3 and 4 of the second, and so on.
    """

    step: int
    part: int

    def __str__(self) -> str:
        if self.part == 0:
            return f"before the forward pass of step {self.step}"
        if self.part >= _CHECK:
            return f"in the check of step {self.step}"
        if self.part % 2:
            return f"in the forward pass of step {self.step}"
        return f"after the forward pass of step {self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeSign:
    """A sign of life of a rank, as it stands in the store.

    Attributes
    ----------
    beats : int
        LifeSigns that it has given.
    step, part : int
        Its place.
    line : str
        The line of Python that its training is at.
    has_ended : bool
        Its training is over, or has raised an error: no more signs are to come.
    """

    beats: int
    step: int
    part: int
    line: str
    has_ended: bool

    @property
    def place(self) -> TrainingPlace:
        return TrainingPlace(step=self.step, part=self.part)


LifeSigns = Sequence[LifeSign | None]


class Standstill:
    """The signs of life of all ranks, and a thread that reads them where the training has not moved.

    Parameters
    ----------
    places : sequence of str
        Host and device of each rank.
    timeout_s : float
        Seconds without a move after which the training stands still.
    say : callable
        Is given what was found, on the first of the ranks that are left.
    end : callable
        Is called in the thread on every rank that is left, where a rank is named.
    """

    def __init__(
        self,
        talk: RankTalk,
        places: Sequence[str],
        *,
        first_step: int,
        timeout_s: float,
        say: Callable[[Discovery], None],
        end: Callable[[], None],
    ) -> None:
        self._rank, self._places = talk.rank, places
        self._timeout_s, self._say, self._end = timeout_s, say, end
        self._beat_s = min(_BEAT_S, timeout_s / 10)
        self._place = TrainingPlace(step=first_step + 1, part=0)
        self._moved_s = time.monotonic()
        self._is_said = False
        self._has_ended = False
        self._beats = 0
        self._closed = threading.Event()
        self._owner = threading.get_ident()
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        if talk.world > 1:
            store = _get_default_store()
            self._store = PrefixStore(f"consistency-watch-{next(_numbers)}", store)
            self._thread = threading.Thread(target=self._watch, name="consistency-watch", daemon=True)
            self._thread.start()
            self._hook, sys.excepthook = sys.excepthook, self._explain

    def forward_begins(self, step: int, number: int) -> None:
        """Note that the forward pass of a micro-batch begins, counted from 1 in its step."""
        self._move(TrainingPlace(step=step, part=2 * number - 1))

    def forward_ends(self, step: int, number: int) -> None:
        """Note that it has ended."""
        self._move(TrainingPlace(step=step, part=2 * number))

    def check_begins(self, step: int) -> None:
        """Note that the gradients of a step are there."""
        self._move(TrainingPlace(step=step, part=_CHECK))

    def step_ends(self, step: int) -> None:
        """Note that a step is done."""
        self._move(TrainingPlace(step=step + 1, part=0))

    def is_alive(self) -> None:
        """Note that something moves that is no step, such as an evaluation."""
        self._move(self._place)

    def close(self) -> None:
        """End the thread."""
        self._has_ended = True
        self._closed.set()
        if self._thread is None:
            return
        self._thread.join(timeout=10 * self._beat_s)
        self._thread = None
        if sys.excepthook == self._explain:
            sys.excepthook = self._hook
        with suppress(RuntimeError):  # the store may be gone before the watch
            self._leave_sign()

    def _move(self, place: TrainingPlace) -> None:
        self._place, self._moved_s, self._is_said = place, time.monotonic(), False

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Leave a sign of life at every beat, and read those of all where this rank stands still."""
        earlier: LifeSigns | None = None
        read_at = 0
        with suppress(RuntimeError):  # torch's: the process that holds the store is gone, and the group with it
            while not self._closed.wait(self._beat_s):
                self._leave_sign()
                if self._is_said or time.monotonic() - self._moved_s <= self._timeout_s:
                    earlier = None
                elif earlier is None:
                    earlier, read_at = self._signs(), self._beats
                elif self._beats >= read_at + _GONE_BEATS:
                    self._is_said = True
                    self._conclude(earlier, self._signs())

    def _leave_sign(self) -> None:
        self._beats += 1
        place = self._place
        sign = LifeSign(
            beats=self._beats, step=place.step, part=place.part, line=self._line(), has_ended=self._has_ended
        )
        self._store.set(str(self._rank), json.dumps(asdict(sign)))

    def _signs(self) -> LifeSigns:
        """Return the last sign of each rank; None of one that never gave any."""
        signs: list[LifeSign | None] = []
        for rank in range(len(self._places)):
            # asked for first, since reading a key that is not there waits for it
            is_there = self._store.check([str(rank)])
            signs.append(LifeSign(**json.loads(self._store.get(str(rank)))) if is_there else None)
        return signs

    def _line(self) -> str:
        """Return the line that the training is at: the innermost one outside of torch."""
        frame = sys._current_frames().get(self._owner)
        stack = [] if frame is None else traceback.extract_stack(frame)
        inner = [line for line in stack if "torch" not in Path(line.filename).parts] or stack
        if not inner:
            return ""
        return f"{Path(inner[-1].filename).name}:{inner[-1].lineno}, {inner[-1].name}"

    def _conclude(self, earlier: LifeSigns, latest: LifeSigns) -> None:
        """Say which rank the training waits for, on the first of those that are left."""
        gone = _gone(earlier, latest)
        discovery = self._discovery(gone, latest)
        if self._rank == min(set(range(len(latest))) - set(gone)):
            self._say(discovery)
            with suppress(RuntimeError):
                self._store.set(_SAID, "")
        elif discovery.ranks:
            self._wait_until_said()
        if discovery.ranks:
            self._end()

    def _wait_until_said(self) -> None:
        """Wait for the rank that says it: a process that ends takes others with it, by torch's error of a collective.

        Signs of life go on, or that rank would take this one for gone.
        """
        until_s = time.monotonic() + self._timeout_s
        with suppress(RuntimeError):  # that rank holds the store, and has ended
            while time.monotonic() < until_s and not self._store.check([_SAID]):
                self._leave_sign()
                time.sleep(self._beat_s)

    # --- an error that ends the training ------------------------------------------------------------------------------

    def _explain(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Show an error that nothing has caught; where it is torch's of a collective, say which rank is gone."""
        self._has_ended = True
        self._hook(kind, error, trace)
        # a forked process, as one that loads data, has the store's connection too, and must not talk on it
        if not issubclass(kind, RuntimeError) or os.getpid() != self._process:
            return
        with suppress(RuntimeError):
            earlier = self._signs()
            time.sleep((_GONE_BEATS + 1) * self._beat_s)
            latest = self._signs()
            gone = _gone(earlier, latest)
            if gone and self._rank == min(set(range(len(latest))) - set(gone)):
                self._say(self._discovery(gone, latest))

    def _discovery(self, gone: Sequence[int], signs: LifeSigns) -> Discovery:
        if gone:
            return self._gone_discovery(gone, signs)
        places = {rank: sign.place for rank, sign in enumerate(signs) if sign is not None and not sign.has_ended}
        least = min(places.values())
        behind = tuple(rank for rank, place in places.items() if place == least)
        waiting = [rank for rank in places if rank not in behind]
        sign = signs[behind[0]]
        line = f" ({sign.line})" if sign is not None and sign.line else ""
        if not waiting:
            return Discovery(
                kind=STANDS_STILL,
                severity="warning",
                message=f"no rank has moved for {self._timeout_s:.3g} s: all are {least}{line}",
                next=_LOOK,
            )
        return Discovery(
            kind=STANDS_STILL,
            severity="warning",
            message=f"{self._named(behind)} {'stands' if len(behind) == 1 else 'stand'} {least}{line} for "
            f"{self._timeout_s:.3g} s, and {rank_names(waiting)} {'waits' if len(waiting) == 1 else 'wait'} "
            f"{max(places.values())}",
            ranks=behind,
            next=_LOOK,
        )

    def _gone_discovery(self, gone: Sequence[int], signs: LifeSigns) -> Discovery:
        sign = signs[gone[0]]
        where = f", last seen {sign.place}" if sign is not None else ""
        return Discovery(
            kind=STANDS_STILL,
            message=f"{self._named(gone)} gives no sign of life: its process is gone or stopped{where}",
            ranks=tuple(gone),
            next="look at that host for a process that was killed for its memory (dmesg), and at its card (consistency "
            "doctor); go on from the last checkpoint",
        )

    def _named(self, ranks: Sequence[int]) -> str:
        place = f" ({self._places[ranks[0]]})" if len(ranks) == 1 else ""
        return f"{rank_names(ranks)}{place}"


_LOOK = (
    "look at what that rank is doing (py-spy dump --pid), at its storage and its card; timeout_s= says how long a step "
    "may take"
)


def _gone(earlier: LifeSigns, latest: LifeSigns) -> list[int]:
    """Return the ranks whose sign was not renewed, though their training has not ended."""
    gone = []
    for rank, (before, now) in enumerate(zip(earlier, latest, strict=True)):
        is_renewed = now is not None and (before is None or now.beats > before.beats)
        has_ended = now is not None and now.has_ended
        if not is_renewed and not has_ended:
            gone.append(rank)
    return gone
