"""The nodes of a fleet whose devices form one group, and the files by which they inform each other.

The files are in a folder that all nodes see. Each node is told its name and the names of the others. Before its workers
start it writes which workers it has; why a node is lost, the fleet writes. No torch here.
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
    """The group as one of its nodes knows it."""

    node: str
    """The name of this node."""
    nodes: tuple[str, ...]
    """The names of all nodes, in the order of their ranks."""
    folder: str
    """The folder that all nodes see."""

    @classmethod
    def read(cls, path: Path) -> NodeGroup:
        """Read the file that a fleet has written for a node.

        Raises
        ------
        UsageError
            There is no such file, or it is damaged.
        """
        try:
            return decode_json(read_regular(path), cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise UsageError("cannot read the nodes of the group", where=f"--together {path}", got=error) from None

    def write(self, path: Path) -> None:
        """Write the file for a node."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, [encode_json(self)])

    def tell(self, members: Mapping[str, Sequence[str]]) -> None:
        """Write the workers of this node, by the name of their group, for the other nodes."""
        write_whole(_members(Path(self.folder), self.node), [encode_json(members)])


def members_of(folder: Path, node: str) -> dict[str, list[str]] | None:
    """Return the workers of a node by group; None where it has not written them yet."""
    with suppress(OSError, msgspec.MsgspecError):
        return decode_json(read_regular(_members(folder, node)), dict[str, list[str]])
    return None


def lost_node(folder: Path, node: str) -> Path:
    """Return the path of the file in which a fleet writes why a node is lost."""
    return folder / f"lost-node-{node}"


def name_on(node: str, worker: str) -> str:
    """Return the name of a worker among those of several nodes."""
    return f"{node}:{worker}"


def _members(folder: Path, node: str) -> Path:
    return folder / f"members-{node}.json"
