"""Several nodes of a fleet as one group: each node lists its ranks in a folder that all nodes see."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from consistency.capture.node_group import lost_node, members_of, name_on
from consistency.worker.protocol import EventLog, RankGroup
from consistency.worker.recorder import Skip

_POLL_S = 0.2
_SIGN_S = 5.0
"""Seconds between two signs of life while a rank waits for nodes to come."""


def meet_nodes(group: RankGroup, events: EventLog) -> RankGroup:
    """Wait for all nodes, and return the group with their ranks, in the order of the nodes.

    It waits for nodes that have not begun, as long as their fleet does.

    Raises
    ------
    Skip
        The fleet has lost a node.
    """
    if not group.nodes or group.has_met:
        return group
    folder, name = Path(group.folder).parent, Path(group.folder).name
    # node by node: every rank has to get the same numbers
    ranks: list[str] = []
    last_sign_s = 0.0
    for node in group.nodes:
        while (members := members_of(folder, node)) is None:
            if (reason := why_lost(group)) is not None:
                raise Skip(reason)
            if time.monotonic() - last_sign_s > _SIGN_S:
                events.wait(f"for node {node} to join the group")
                last_sign_s = time.monotonic()
            time.sleep(_POLL_S)
        ranks += [name_on(node, worker) for worker in members.get(name, ())]
    own_name = name_on(group.node, group.ranks[group.rank])
    return msgspec.structs.replace(group, rank=ranks.index(own_name), ranks=tuple(ranks), has_met=True)


def why_lost(group: RankGroup) -> str | None:
    """Return the first node of a group that its fleet has lost, and why."""
    for node in group.nodes:
        mark = lost_node(Path(group.folder).parent, node)
        if mark.exists():
            return f"node {node} was lost: {mark.read_text(encoding='utf-8')}"
    return None
