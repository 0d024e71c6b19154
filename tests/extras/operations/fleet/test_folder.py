"""What a fleet keeps, and by what it is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from consistency.capture.node_status import NodeStatus, read_status, write_status
from consistency.capture.transport import write_bytes
from consistency.case.requirements import Requirements
from consistency.errors import CaptureError, UsageError
from consistency.extras.operations.fleet.folder import FleetFolder, FleetRecord, NodeOutcome

NODES = {"n1": NodeOutcome(), "n2": NodeOutcome()}
RECORD = FleetRecord(engine="slurm", case=("--level=quick",), requirements=Requirements(), nodes=NODES)


class Objects(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types here
    """An object store: it has no folder in which nothing is."""

    protocol = "objects"
    store: ClassVar[dict[str, object]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing, as there."""


@pytest.fixture(params=["folder", "memory", "objects"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> FleetFolder:
    fsspec.register_implementation("objects", Objects, clobber=True)
    store = str(tmp_path / "store") if request.param == "folder" else f"{request.param}://fleet-{tmp_path.name}"
    return FleetFolder(out=tmp_path / "out", store=store)


def test_every_node_has_a_status_before_it_starts(folder: FleetFolder) -> None:
    folder.prepare(RECORD.requirements, ["n1", "n2"], replace=False)
    assert [read_status(folder.status(node)) for node in ("n1", "n2")] == [NodeStatus(), NodeStatus()]
    with pytest.raises(CaptureError, match="not empty"):
        folder.prepare(RECORD.requirements, ["n1"], replace=False)
    folder.prepare(RECORD.requirements, ["n1"], replace=True)


def test_only_a_capture_that_is_there_was_delivered(folder: FleetFolder) -> None:
    folder.prepare(RECORD.requirements, ["n1", "n2", "n3"], replace=False)
    folder.save(RECORD)
    for node in ("n1", "n2"):
        write_status(folder.status(node), NodeStatus(phase="delivered", beat=9))
    write_bytes(folder.capture("n1"), b"a capture")
    assert folder.delivered(RECORD, ["n1", "n2", "n3"]) == ["n1"]


def test_another_case_cannot_be_resumed(folder: FleetFolder) -> None:
    with pytest.raises(UsageError, match="nothing to resume"):
        folder.delivered(RECORD, ["n1"])
    folder.prepare(RECORD.requirements, ["n1"], replace=False)
    folder.save(RECORD)
    other = FleetRecord(engine="slurm", case=("--level=quick",), requirements=Requirements(accelerators=8), nodes={})
    with pytest.raises(UsageError, match="the earlier run had other requirements"):
        folder.delivered(other, ["n1"])


def test_last_line_of_a_nodes_output(tmp_path: Path) -> None:
    folder = FleetFolder(out=tmp_path, store=str(tmp_path))
    assert folder.logged("n1") == ""
    log = folder.log("n1")
    assert log is not None
    log.parent.mkdir()
    log.write_text("first\nno such file\n\nslurmstepd-n1: error: *** JOB 6 CANCELLED ***\n")
    assert folder.logged("n1") == "no such file"
    assert FleetFolder(out=tmp_path, store="s3://bucket/fleet").log("n1") is None
