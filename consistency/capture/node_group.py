"""The nodes of a fleet whose devices form one group, and what they tell each other in a folder that all of them see.

Each node is told its name and those of the others. Before its workers start it says which of them there are; what a
node is lost by, the fleet says. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from consistency.capture.bounded import read_regular
from consistency.capture.json_codec import decode_json, encode_json
from consistency.capture.whole_file import write_whole
from consistency.errors import UsageError


class NodeGroup(msgspec.Struct, frozen=True, kw_only=True):
    """What a node knows of the group."""

    node: str
    """This one's name."""
    nodes: tuple[str, ...]
    """Of all, in the order of their ranks."""
    folder: str
    """That all of them see."""

    @classmethod
    def read(cls, path: Path) -> NodeGroup:
        """Read what a fleet has written for a node.

        Raises
        ------
        UsageError
            There is no such file.
        """
        try:
            return decode_json(read_regular(path), cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise UsageError("cannot read the nodes of the group", where=f"--together {path}", got=error) from None

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, [encode_json(self)])

    def tell(self, members: Mapping[str, Sequence[str]]) -> None:
        """Say which workers of this node are in which group."""
        write_whole(_members(Path(self.folder), self.node), [encode_json(members)])


def members_of(folder: Path, node: str) -> dict[str, list[str]] | None:
    """Return the workers of a node by group, None where it has not said so yet."""
    with suppress(OSError, msgspec.MsgspecError):
        return decode_json(read_regular(_members(folder, node)), dict[str, list[str]])
    return None


def lost_node(folder: Path, node: str) -> Path:
    """Return the file in which a fleet says why a node is lost."""
    return folder / f"lost-node-{node}"


def name_on(node: str, worker: str) -> str:
    """Return the name of a worker among those of several nodes."""
    return f"{node}:{worker}"


def _members(folder: Path, node: str) -> Path:
    return folder / f"members-{node}.json"
