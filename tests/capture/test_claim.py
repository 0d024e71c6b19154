"""Places and scratch folders are claimed by living processes alone."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from consistency.capture.claim import CLAIM, PARTIAL, claimed, is_abandoned, is_held, scratch_folder
from consistency.capture.whole_file import WholeFile, put_in_place, remove_leftovers
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


def test_a_full_disk_has_room_for_a_claim_without_text(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with patch.object(os, "write", side_effect=full) as write, claimed(tmp_path / CLAIM):
        assert write.called
        assert is_held(tmp_path / CLAIM)
    assert not (tmp_path / CLAIM).exists()


@pytest.mark.process
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


@pytest.mark.process
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


def test_place_of_a_capture_has_the_old_one_or_the_new_one_whoever_is_killed(
    tmp_path: Path, make_capture: MakeCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the two renames, what was there is put back by the next one, which may fail itself."""
    place = make_capture("a", {"cpu": []})
    (place / "old").touch()

    rename = os.replace

    def killed(made: Path, target: Path) -> None:
        if made.name.endswith(PARTIAL):
            raise SystemExit
        rename(made, target)

    with monkeypatch.context() as patch, CaptureWriter(place, replace=True) as writer:
        patch.setattr(os, "replace", killed)
        with pytest.raises(SystemExit):
            put_in_place(writer.folder, place)
    assert not place.exists()
    with CaptureWriter(place, replace=True):
        assert (place / "old").exists()
    assert {one.name for one in tmp_path.iterdir()} == {"a", "tmp"}
    assert (place / "old").exists()


def test_new_capture_takes_the_place_of_the_old_one_and_leaves_nothing(
    tmp_path: Path, make_capture: MakeCapture
) -> None:
    place = make_capture("a", {"cpu": []})
    (place / "old").touch()
    with CaptureWriter(place, replace=True) as writer:
        put_in_place(writer.folder, place)
    assert {one.name for one in tmp_path.iterdir()} == {"a", "tmp"}
    assert not (place / "old").exists()


_WRITE = """
import sys, time
from pathlib import Path
from consistency.capture.whole_file import WholeFile
with WholeFile(Path(sys.argv[1])) as made:
    made.write([b"part"])
    print(flush=True)
    time.sleep(600)
"""


@pytest.mark.process
def test_temporary_file_of_a_killed_process_is_removed_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / ".consistency-notes").touch()
    writers = [
        subprocess.Popen([sys.executable, "-c", _WRITE, str(out / "report.json")], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        for writer in writers:
            assert writer.stdout is not None
            writer.stdout.readline()
        writers[0].kill()
        writers[0].wait()
        assert len([*out.iterdir()]) == 3
        remove_leftovers(out)
        assert len([*out.iterdir()]) == 2
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    remove_leftovers(out)
    assert [one.name for one in out.iterdir()] == [".consistency-notes"]


def test_folder_that_was_never_claimed_is_removed_after_an_hour(temporary: Path) -> None:
    old, new, full = (temporary / f"consistency-run-{end}" for end in ("aaaaaaa1", "aaaaaaa2", "aaaaaaa3"))
    for folder in (old, new, full):
        folder.mkdir()
    (full / "file").touch()
    for folder in (old, full):
        os.utime(folder, (0, 0))
    with scratch_folder("test") as own:
        assert {*temporary.iterdir()} == {new, full, own}


def test_many_write_one_file_and_one_of_them_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files = [WholeFile(path) for _ in range(3)]
    for number, file in enumerate(files):
        file.write([b"%d" % number] * (number + 1))
    for file in (files[2], files[0]):
        file.commit()
    for file in files:
        file.__exit__()
    assert path.read_bytes() == b"0"
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()
    assert [one.name for one in tmp_path.iterdir() if one.is_file()] == ["file"]


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
