"""Places and scratch folders are claimed by living processes alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from consistency.capture.claim import CLAIM, claimed, is_abandoned, scratch_folder
from consistency.capture.writer import CaptureWriter
from consistency.errors import CaptureError
from tests.conftest import MakeCapture

_HOLD = """
import sys, time
from pathlib import Path
from consistency.capture.claim import claimed, scratch_folder
with scratch_folder("test") as scratch, claimed(Path(sys.argv[1])):
    (scratch / "large").write_bytes(b"x")
    print(scratch, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a TMPDIR of the test's own."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def start_holder(claim: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start a process that holds a claim and a scratch folder."""
    holder = subprocess.Popen([sys.executable, "-c", _HOLD, str(claim)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    return holder, Path(holder.stdout.readline().strip())


def test_claim_of_a_living_process_is_refused_and_that_of_a_killed_one_taken_over(tmp_path: Path) -> None:
    claim = tmp_path / CLAIM
    holder, _ = start_holder(claim)
    with holder:
        try:
            with pytest.raises(CaptureError, match="another process") as caught, claimed(claim):
                pass
            assert f"process {holder.pid}" in str(caught.value.got)
            assert not is_abandoned(tmp_path)
        finally:
            holder.send_signal(signal.SIGKILL)
    assert claim.exists()
    assert is_abandoned(tmp_path)
    with claimed(claim):
        assert f"process {os.getpid()}" in claim.read_text()
        assert not is_abandoned(tmp_path)
    assert not claim.exists()


def test_scratch_of_a_killed_process_is_removed_by_the_next_one_and_no_other(tmp_path: Path, temporary: Path) -> None:
    stranger = temporary / "consistency-notes"
    stranger.mkdir()
    living, kept = start_holder(tmp_path / "one")
    killed, left = start_holder(tmp_path / "two")
    with living, killed:
        try:
            killed.send_signal(signal.SIGKILL)
            killed.wait()
            assert {one.name for one in left.iterdir()} == {CLAIM, "large"}
            with scratch_folder("test") as own:
                assert {*temporary.iterdir()} == {stranger, kept, own}
            assert {*temporary.iterdir()} == {stranger, kept}
        finally:
            living.kill()


def test_two_captures_at_one_place_are_refused_and_what_a_killed_one_left_makes_room(tmp_path: Path) -> None:
    left = tmp_path / ".a.partial" / "blobs"
    left.mkdir(parents=True)
    (left / "old").touch()
    (tmp_path / ".a.claim").touch()
    with CaptureWriter(tmp_path / "a") as writer:
        assert not any(writer.blobs.iterdir())
        with pytest.raises(CaptureError, match="another process"):
            CaptureWriter(tmp_path / "a", replace=True)
        assert writer.blobs.exists()
    assert [one.name for one in tmp_path.iterdir()] == ["tmp"]


def test_capture_does_not_replace_what_appeared_meanwhile(
    tmp_path: Path, make_capture: MakeCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_worker = CaptureWriter.write_worker

    def write(self: CaptureWriter, slug: str, info: Any) -> None:
        write_worker(self, slug, info)
        self.target.mkdir()
        (self.target / "other").touch()

    monkeypatch.setattr(CaptureWriter, "write_worker", write)
    with pytest.raises(CaptureError, match="not empty"):
        make_capture("a", {"cpu": []})
    assert [one.name for one in (tmp_path / "a").iterdir()] == ["other"]
