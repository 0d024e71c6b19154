"""The status of a node: one page, rewritten in place, readable at any time."""

from __future__ import annotations

import os
from pathlib import Path

from consistency.capture.node_status import NodeStatus, read_status, write_status


def test_round_trip_in_a_file_and_at_a_url(tmp_path: Path) -> None:
    status = NodeStatus(phase="running", beat=3, stage="forward", number=5, of=9, software={"torch": "2"})
    for place in (str(tmp_path / "n1.json"), "memory://fleet/n1.json"):
        write_status(place, status)
        assert read_status(place) == status
    assert status.place == "forward, 5 of 9"
    assert NodeStatus().place == "start"


def test_the_file_stays_the_same(tmp_path: Path) -> None:
    """A full disk gives no new block, and a client of NFS may take a replaced file for a minute."""
    path = tmp_path / "n1.json"
    write_status(str(path), NodeStatus())
    before = path.stat()
    write_status(str(path), NodeStatus(phase="failed", reason='a "long" reason \\ ' * 1000))
    after = path.stat()
    assert (before.st_ino, before.st_size) == (after.st_ino, after.st_size) == (after.st_ino, 4096)
    found = read_status(str(path))
    assert found is not None
    assert found.phase == "failed"


def test_what_cannot_be_read_is_none(tmp_path: Path) -> None:
    path = tmp_path / "n1.json"
    assert read_status(str(path)) is None
    path.write_bytes(b"")
    assert read_status(str(path)) is None
    write_status(str(path), NodeStatus(beat=7))
    os.truncate(path, 20)
    assert read_status(str(path)) is None
    assert read_status("memory://fleet/nothing.json") is None
