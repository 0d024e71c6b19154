"""What a fleet shows of its nodes: a line for each change of a few, counts and losses of many."""

from __future__ import annotations

import io

from rich.console import Console

from consistency.extras.operations.fleet.following import NodeState, Progress
from consistency.extras.operations.fleet.progress import fleet_progress


def shown(changes: list[tuple[str, Progress]], *, count: int, terminal: bool = False) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100, color_system=None, legacy_windows=False)
    with fleet_progress(count, console) as watch:
        for node, progress in changes:
            watch(node, progress)
    return file.getvalue()


RUNNING = Progress(state=NodeState.RUNNING, text="forward, 5 of 9")
LOST = Progress(state=NodeState.LOST, text="no sign of life\x1b for 60 s")
DELIVERED = Progress(state=NodeState.DELIVERED)


def test_every_change_of_a_small_fleet() -> None:
    text = shown([("n1", Progress(state=NodeState.WAITING)), ("n1", RUNNING), ("n2", LOST), ("n1", DELIVERED)], count=2)
    assert text.splitlines() == [
        "n1: waiting", "n1: running: forward, 5 of 9", "n2: lost: no sign of life\\x1b for 60 s", "n1: delivered"
    ]  # fmt: skip


def test_counts_of_a_large_fleet() -> None:
    nodes = [f"n{number}" for number in range(1000)]
    changes = [(node, RUNNING) for node in nodes] + [("n7", LOST)]
    text = shown([*changes, *((node, DELIVERED) for node in nodes if node != "n7")], count=1000)
    assert text.splitlines() == ["n7: lost: no sign of life\\x1b for 60 s", "1000 nodes: 999 delivered, 1 lost"]


def test_table_on_a_terminal() -> None:
    changes = [(f"n{number}", RUNNING) for number in range(40)]
    text = shown([*changes, ("n3", LOST)], count=40, terminal=True)
    assert "forward, 5 of 9" in text
    assert "and 23 more nodes" in text
    assert "n3: lost" in text
    assert "40 nodes: 39 running, 1 lost" in text
