"""Nodes whose captures cannot be compared with those of the others: other software, or no accelerator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from consistency.capture.node_status import NodeStatus
from consistency.capture.wording import counted


def other_software(statuses: Mapping[str, NodeStatus]) -> dict[str, str]:
    """Return the nodes whose software differs from that of most, each with what differs."""
    if not statuses:
        return {}
    kinds = Counter(tuple(sorted(status.software.items())) for status in statuses.values())
    usual = dict(kinds.most_common(1)[0][0])  # of equally common ones, that of the first node
    found = {}
    for node, status in statuses.items():
        names = sorted(name for name in {*usual, *status.software} if usual.get(name) != status.software.get(name))
        if names:
            found[node] = ", ".join(
                f"{name} {status.software.get(name, 'missing')}, not {usual.get(name, 'installed')}" for name in names
            )
    return found


def without_accelerator(statuses: Mapping[str, NodeStatus]) -> dict[str, str]:
    """Return the nodes without an accelerator in a fleet in which most have one."""
    having = [node for node, status in statuses.items() if status.accelerators]
    if 2 * len(having) <= len(statuses):
        return {}
    text = f"no accelerator, but {counted(len(having), 'other node')} of the fleet have one"
    return {node: text for node, status in statuses.items() if not status.accelerators}
