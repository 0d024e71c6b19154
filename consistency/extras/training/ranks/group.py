"""A group of ranks: the workers that run side by side, one per device, joined by torch.distributed.

They meet in a folder of the run, not at a port: nothing but this host is needed, and two runs cannot meet. Each rank
announces itself there, waits until all have, and then makes the process group. A rank that the launcher has lost is
named there too, so that none waits longer than the launcher does.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]  # they are in C

from consistency.errors import first_line
from consistency.extras.training.ranks.nodes import why_lost
from consistency.worker.device_error import is_of_the_device
from consistency.worker.protocol import EventLog, RankGroup, lost_rank
from consistency.worker.recorder import Skip

_FIRST_POLL_S, _POLL_S = 0.001, 0.05
_SIGN_S = 5.0
"""Seconds between two signs of life while a rank waits for others to come."""

_NOTICE_S = 40.0
"""Seconds that a rank whose peer is gone waits for the launcher to say what became of it: on a busy machine that takes
a while, and a group that failed by itself is rare."""

_REFUSAL_S = 20.0
"""Seconds that a rank whose library raises waits for the same from all others."""

_COLLECTIVE_ERRORS = (
    "gloo",
    "nccl",
    "timed out",
    "timeout",
    "connection closed",
    "connection reset",
    "broken pipe",
    "hccl",
)
"""Words in the errors that a collective raises, which have no class of their own but with NCCL."""


class GroupError(Exception):
    """The group cannot go on: a rank is lost, or a collective failed.

    Attributes
    ----------
    lost : bool
        Whether the launcher has lost a rank, which its own worker reports.
    """

    def __init__(self, reason: str, *, lost: bool = False) -> None:
        super().__init__(reason)
        self.lost = lost


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedGroup:
    """A group that one rank has joined: means to talk with the others, by collectives and beside them."""

    group: RankGroup
    device: torch.device
    """Device of the tensors that are sent."""
    store: Store
    """Passes texts between ranks beside the collectives, which may be broken."""
    events: EventLog
    folder: Path
    """Folder of this stage and this group alone."""
    process_group: dist.ProcessGroup
    """Process group of the members; for all ranks, torch's default."""
    members: tuple[int, ...] | None = None
    """Numbers of the group's ranks that talk here, in their order; None for all ranks."""

    @property
    def names(self) -> tuple[str, ...]:
        names = self.group.ranks
        if self.members is None:
            return names
        return tuple(names[member] for member in self.members)

    @property
    def rank(self) -> int:
        """Number of this rank among the members."""
        return self.group.rank if self.members is None else self.members.index(self.group.rank)

    @property
    def world(self) -> int:
        return len(self.names)

    @property
    def count_suffix(self) -> str:
        """The ending of the name of a tensor whose bits depend on how many ranks made it."""
        return f" of {self.world} ranks"

    def subgroup(self, members: tuple[int, ...]) -> JoinedGroup | None:
        """Make a group of some of the ranks; return None to those that are not in it. Every rank has to call this."""
        with self.in_collective(f"making a group of {len(members)} ranks"):
            process_group = dist.new_group(list(members), timeout=timedelta(seconds=self.group.timeout_s))
        if self.group.rank not in members:
            return None
        store = PrefixStore("-".join(map(str, members)), self.store)
        return dataclasses.replace(self, store=store, members=members, process_group=process_group)

    @contextmanager
    def in_collective(self, place: str) -> Iterator[None]:
        """Tell the others where this rank waits, and name the rank that keeps it waiting for too long.

        Parameters
        ----------
        place : str
            The collective, in words.

        Raises
        ------
        GroupError
            A collective failed or took longer than `RankGroup.timeout_s`; with the rank that is lost or has not come.
        """
        self.store.set(f"at/{self.rank}", place)
        try:
            yield
        except RuntimeError as error:
            raise _group_error(self.group, self._late_ranks(place, error), self.events, self.folder) from error

    @contextmanager
    def in_library(self, place: str) -> Iterator[None]:
        """Call a library that calls collectives itself, and tell an error of the group from one of the library.

        Parameters
        ----------
        place : str
            The work of the library, in words.

        Raises
        ------
        GroupError
            As `in_collective`.
        Skip
            Every rank's library raised.
        """
        self.store.set(f"at/{self.rank}", place)
        try:
            yield
        except (GroupError, Skip):
            raise
        except Exception as error:  # model code of any kind may raise anything
            if _is_of_a_collective(error):
                raise _group_error(self.group, self._late_ranks(place, error), self.events, self.folder) from error
            # a broken device is this rank's alone: no other one raises with it
            if is_of_the_device(error, self.device):
                self._leave(error)
                raise
            if self._all_raise(place, error):
                raise Skip(f"{place}: {first_line(error)}") from error
            raise

    def _all_raise(self, place: str, error: Exception) -> bool:
        """Return whether every rank raises in the same place; if not, tell the others that this one has left."""
        # in the store: a rank that has not raised may be waiting in a collective
        self.store.set(f"raised/{place}/{self.rank}", "")
        keys = [f"raised/{place}/{rank}" for rank in range(self.world)]
        deadline = time.monotonic() + min(_REFUSAL_S, self.group.timeout_s / 2)
        while time.monotonic() < deadline:
            if self.store.check(keys):
                return True
            time.sleep(_POLL_S)
        self._leave(error)
        return False

    def _leave(self, error: Exception) -> None:
        left_rank(self.folder, self.names[self.rank]).write_text(first_line(error), encoding="utf-8")

    def _late_ranks(self, place: str, error: Exception) -> str:
        """Return a message with the ranks that are not in the same collective, and where they are."""
        place_by_name = {name: self.store.get(f"at/{rank}").decode() for rank, name in enumerate(self.names)}
        late = [f"{name} is still in {other}" for name, other in place_by_name.items() if other != place]
        return f"{place}: {'; '.join(late) or 'every rank is in it'}: {str(error).splitlines()[0]}"

    @contextmanager
    def torchrun_environment(self) -> Iterator[None]:
        """Set the variables that torchrun sets, for libraries that read them."""
        numbers = {"RANK": self.rank, "WORLD_SIZE": self.world, "LOCAL_RANK": self.device.index or 0}
        values_before = {name: os.environ.get(name) for name in numbers}
        os.environ.update({name: str(number) for name, number in numbers.items()})
        try:
            yield
        finally:
            for name, value in values_before.items():
                if value is None:
                    os.environ.pop(name)
                else:
                    os.environ[name] = value

    def exchange(self, name: str, answer: str) -> list[str]:
        """Give the other ranks an answer, and return the answers of all, in the order of the ranks.

        It waits for ranks that are still at work, however long: the launcher knows which of them is lost. So a
        collective that begins after it waits for nobody who has yet to come.

        Parameters
        ----------
        name : str
            The question, in words that no other one of this stage has.
        answer : str
            This rank's answer.

        Raises
        ------
        GroupError
            A rank is lost, or has left the stage.
        """
        self.store.set(f"at/{self.rank}", name)
        self.store.set(f"{name}/{self.rank}", answer)
        last_sign_s, pause_s = time.monotonic(), _FIRST_POLL_S
        for rank, peer in enumerate(self.names):
            while not self.store.check([f"{name}/{rank}"]):
                if (reason := _lost_rank(self.group, self.folder)) is not None:
                    raise GroupError(f"{reason}, during {name}", lost=True)
                if time.monotonic() - last_sign_s > _SIGN_S:
                    self.events.wait(f"for {peer} in {name}")
                    last_sign_s = time.monotonic()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _POLL_S)
        return [self.store.get(f"{name}/{rank}").decode() for rank in range(self.world)]

    def ranks_against(self, answers: Sequence[str]) -> list[str]:
        """Return the ranks that agree on another answer; none if this rank agrees with most, or with the first.

        Parameters
        ----------
        answers : sequence of str
            The answers of all ranks, in their order.
        """
        (common, count), *_ = Counter(answers).most_common(1)
        if 2 * count <= len(answers):  # without a majority the first rank is the reference, as everywhere
            common = answers[0]
        if answers[self.rank] == common:
            return []
        return [name for name, answer in zip(self.names, answers, strict=True) if answer == common]


def _is_of_a_collective(error: Exception) -> bool:
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in _COLLECTIVE_ERRORS)


def left_rank(folder: Path, name: str) -> Path:
    """Return the file in which a rank says why it alone has left a stage."""
    return folder / f"left-{name.replace(':', '-')}"


@contextmanager
def joined_group(group: RankGroup, device: torch.device, events: EventLog, stage: str) -> Iterator[JoinedGroup]:
    """Join a group, whose nodes have met, for a stage, and leave it at the end.

    Raises
    ------
    GroupError
        A rank is lost before it came, or the group cannot be made.
    Skip
        There is no other rank.
    """
    if len(group.ranks) < 2:
        raise Skip("no worker of another node runs on a device of its type")
    folder = Path(group.folder) / stage
    _wait_for_ranks(group, folder, events)
    # the address of this host's name may be none that answers; without other nodes the ranks are all here
    if not group.nodes:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # an error after the time limit, in place of an abort
    timeout = timedelta(seconds=group.timeout_s)
    store = FileStore(str(folder / "store"), len(group.ranks))
    store.set_timeout(timeout)
    device_id = None if device.type == "cpu" else device
    # its functions have the group as a default: imported later, as with an optimizer, they keep it with its threads,
    # and one that still runs while the interpreter ends aborts the process
    import torch.distributed.nn  # noqa: F401

    try:
        dist.init_process_group(
            dist.get_default_backend_for_device(device),
            store=PrefixStore("group", store),
            rank=group.rank,
            world_size=len(group.ranks),
            timeout=timeout,
            device_id=device_id,
        )
    except (RuntimeError, ValueError) as error:
        reason = f"the group cannot be made: {first_line(error)}"
        raise _group_error(group, reason, events, folder) from error
    try:
        assert dist.group.WORLD is not None
        yield JoinedGroup(
            group=group,
            device=device,
            store=PrefixStore("answers", store),
            events=events,
            folder=folder,
            process_group=dist.group.WORLD,
        )
    except Exception as error:  # whatever ends this rank's part, the others are told
        # but for a lost rank, of which the launcher tells them, and for a skip, which is no failure
        is_of_a_lost_rank = isinstance(error, GroupError) and error.lost
        if not isinstance(error, Skip) and not is_of_a_lost_rank:
            left_rank(folder, group.ranks[group.rank]).write_text(first_line(error), encoding="utf-8")
        raise
    finally:
        with suppress(RuntimeError):
            dist.destroy_process_group()


def _wait_for_ranks(group: RankGroup, folder: Path, events: EventLog) -> None:
    """Announce this rank in the folder, and wait until every other one has."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank-{group.rank}").touch()
    last_sign_s = 0.0
    while missing := [name for number, name in enumerate(group.ranks) if not (folder / f"rank-{number}").exists()]:
        if (reason := _lost_rank(group, folder)) is not None:
            raise GroupError(reason, lost=True)
        if time.monotonic() - last_sign_s > _SIGN_S:
            events.wait(f"for {', '.join(missing)} to join the group")
            last_sign_s = time.monotonic()
        time.sleep(_POLL_S)


def _group_error(group: RankGroup, message: str, events: EventLog, folder: Path) -> GroupError:
    """Return the error of a lost rank, where the launcher names one in time; else one with the message of this rank.

    A rank that another one keeps waiting gives up after half the time in which the launcher gives that one up, so it
    waits as long again.
    """
    is_late = any(word in message.lower() for word in ("timed out", "timeout"))
    last_sign_s = time.monotonic()
    deadline = last_sign_s + _NOTICE_S
    if is_late:
        deadline += group.timeout_s
    while time.monotonic() < deadline:
        if (reason := _lost_rank(group, folder)) is not None:
            return GroupError(f"{reason}, during {message}", lost=True)
        if time.monotonic() - last_sign_s > _SIGN_S:
            events.wait("for what became of a rank")
            last_sign_s = time.monotonic()
        time.sleep(_POLL_S)
    return GroupError(message)


def _lost_rank(group: RankGroup, folder: Path) -> str | None:
    """Return the first rank that the launcher has lost, or that has left by itself, and why."""
    if (reason := why_lost(group)) is not None:
        return reason
    # a rank that is lost explains others that have left
    for name in group.ranks:
        with suppress(OSError):
            return f"{name} was lost: {lost_rank(Path(group.folder), name).read_text(encoding='utf-8')}"
    for name in group.ranks:
        with suppress(OSError):
            return f"{name} has failed: {left_rank(folder, name).read_text(encoding='utf-8')}"
    return None
