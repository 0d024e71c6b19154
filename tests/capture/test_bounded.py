"""Only regular files of a received folder are read, and no more of them than a machine can hold."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from consistency.capture import bounded
from consistency.capture.archive import take_out
from consistency.capture.bounded import READ_LIMIT, BoundedReader, NotReadError, read_regular
from consistency.capture.folder import Capture
from consistency.capture.reader import read_capture
from consistency.capture.transport import pack
from consistency.errors import CaptureError, UsageError
from consistency.extras.operations.history.store import History
from consistency.extras.operations.status.reading import read_status
from consistency.workflows.comparing import compare_folders
from consistency.workflows.report_folder import read_comparison
from tests.comparison.made_records import moved
from tests.conftest import MakeCapture
from tests.extras.operations.history.made_fleets import fleet_history


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def outside(path: Path) -> None:
    path.symlink_to("/etc/hosts")


def large(path: Path) -> None:
    path.touch()
    os.truncate(path, 20 * 2**30)


KINDS = [(pipe, "a pipe"), (endless, "leads out of its folder"), (outside, "leads out"), (large, "20.0 GiB, of which")]


@pytest.mark.parametrize(("make", "text"), KINDS)
def test_files_of_a_capture(make: Callable[[Path], None], text: str, tmp_path: Path, make_capture: MakeCapture) -> None:
    folder = make_capture("a", {"cpu": [moved()], "cuda:0": [moved()]})
    records = next(folder.rglob("records.jsonl"))
    records.unlink()
    make(records)
    (damage,) = read_capture(folder).damage
    assert text in damage
    (folder / "capture.json").unlink()
    make(folder / "capture.json")
    with pytest.raises(CaptureError, match="cannot read") as caught:
        read_capture(folder)
    assert text in str(caught.value.got)


@pytest.mark.parametrize(("make", "text"), [*KINDS[:3], (large, None)])
def test_a_stored_tensor(
    make: Callable[[Path], None], text: str | None, tmp_path: Path, make_capture: MakeCapture
) -> None:
    found: Capture = read_capture(make_capture("a", {"cpu": [moved()]}))
    path = found.folder / "blobs" / f"{'0' * 64}.safetensors"
    make(path)
    if text is None:
        assert found.blob_path("0" * 64) == path, "tensors may be larger"
        return
    with pytest.raises(CaptureError, match="a stored tensor cannot be read") as caught:
        found.blob_path("0" * 64)
    assert text in str(caught.value.got)


@pytest.mark.parametrize(("make", "text"), KINDS)
def test_a_report_and_its_status(
    make: Callable[[Path], None], text: str, tmp_path: Path, make_capture: MakeCapture
) -> None:
    out = tmp_path / "out"
    compare_folders([make_capture(name, {"cpu": [moved()]}) for name in "ab"], out)
    verdict = read_status(out).verdict
    (out / "status.json").unlink()
    make(out / "status.json")
    os.utime(out / "report.json", (0, 0))
    assert read_status(out).verdict == verdict
    (out / "report.json").unlink()
    make(out / "report.json")
    for read in (read_comparison, read_status):
        with pytest.raises(UsageError, match="cannot read") as caught:
            read(out)
        assert text in str(caught.value.got)


def test_a_file_that_the_user_names_may_be_a_link(tmp_path: Path, make_capture: MakeCapture) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    capture = make_capture("a", {"cpu": [moved()]})
    elsewhere.mkdir()
    compare_folders([capture, make_capture("b", {"cpu": [moved()]})], out)
    for place in (out, capture, out / "report.json"):
        (elsewhere / place.name).symlink_to(place)
    assert read_comparison(elsewhere / "report.json")[0].verdict == read_comparison(elsewhere / "out")[0].verdict
    assert read_capture(elsewhere / "a").damage == ()


def test_a_run_of_a_history_that_is_no_file_is_left_out(tmp_path: Path) -> None:
    history = fleet_history(tmp_path, 1, 2)
    os.mkfifo(tmp_path / "runs" / "20990101T000000-ffffffff.json")
    assert len(list(History(str(tmp_path)).runs())) == 2
    assert len(list(history.runs())) == 2
    assert history.damage == ["20990101T000000-ffffffff.json: a pipe, and no regular file"]


def test_all_files_of_a_capture_together(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(bytes(100))
    reader = BoundedReader(tmp_path, 250)
    assert [len(reader.read(tmp_path / name)) for name in "ab"] == [100, 100]
    with pytest.raises(NotReadError, match="CONSISTENCY_READ_LIMIT=10"):
        reader.read(tmp_path / "c")


def test_archive_that_would_fill_the_disk(
    tmp_path: Path, make_capture: MakeCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.zip"
    pack(make_capture("a", {"cpu": [moved()]}), path)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("workers/evil/records.jsonl", bytes(96 * 2**20))
        archive.writestr(f"blobs/{'0' * 64}.safetensors", bytes(96 * 2**20))
    assert path.stat().st_size < 2**19
    with pytest.raises(CaptureError, match="cannot unpack") as caught:
        compare_folders([str(path)], None)
    assert "96.0 MiB, of which at most" in str(caught.value.got)
    with pytest.raises(CaptureError, match="cannot unpack"):
        take_out(path, tmp_path / "blobs" / f"{'0' * 64}.safetensors")
    monkeypatch.setenv(READ_LIMIT, "10")
    assert compare_folders([str(path)], None).verdict == "consistent", "no worker of that name is listed"


@pytest.mark.parametrize(("count", "text"), [(1_100, "1100 members"), (3_000, "a list of members")])
def test_archive_of_many_members(count: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "MOST_MEMBERS", 1_000)
    monkeypatch.setattr(bounded, "_DIRECTORY_BYTES", 160_000)
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(count):
            archive.writestr(f"workers/w{number}/worker.json", "{}")
    with pytest.raises(CaptureError, match="cannot unpack") as caught:
        compare_folders([str(path)], None)
    assert text in str(caught.value.got)


def test_limits_are_raised_by_a_factor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    monkeypatch.setattr(bounded, "MOST_BYTES", 60)
    with pytest.raises(NotReadError):
        BoundedReader(None, 60).read(path)
    monkeypatch.setenv(READ_LIMIT, "1.7")
    assert BoundedReader(None, 60).read(path) == bytes(100)
    for wrong in ("much", "0", "-1", "nan", "inf"):
        monkeypatch.setenv(READ_LIMIT, wrong)
        with pytest.raises(UsageError, match="CONSISTENCY_READ_LIMIT is out of range"):
            read_regular(path)


def test_nothing_is_read_of_what_is_refused(tmp_path: Path) -> None:
    """A pipe whose writer waits gets no reader."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotReadError):
        read_regular(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such device"):
        os.open(tmp_path / "pipe", os.O_WRONLY | os.O_NONBLOCK)
    shutil.rmtree(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "pipe")
