"""Captures as one file and at URLs, and archives from strangers."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import fsspec
import pytest

from consistency.capture.folder import MANIFEST
from consistency.capture.reader import read_capture
from consistency.capture.records import TensorRecord
from consistency.capture.transport import deliver, refuse_to_replace, travels
from consistency.errors import CaptureError
from consistency.workflows import comparing
from consistency.workflows.api import compare
from tests.capture.whole import fetch
from tests.conftest import Cli, MakeCapture


@pytest.fixture
def folder(make_capture: MakeCapture) -> Path:
    record = TensorRecord(
        rule="bitwise",
        status="equal",
        stage="base",
        layer="l",
        tensor="weight",
        digest="a",
        reference="file",
        reference_digest="a",
        shape=(1,),
    )
    made = make_capture("box-a", {"cpu": [record]})
    (made / "blobs" / f"{'0' * 64}.safetensors").write_bytes(b"not read")
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.mark.parametrize(
    ("text", "does"),
    [("box", False), ("./box", False), ("box.zip", True), ("s3://b/box", True), ("memory://b", True), ("C-3", False)],
)
def test_what_travels(text: str, does: bool) -> None:
    assert travels(text) is does


def test_one_file_holds_the_whole_capture(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "sent" / "box-b.zip"
    deliver(folder, str(target))
    back = fetch(str(target), tmp_path / "scratch")
    assert back.name == "box-b"
    assert contents(back) == contents(folder)
    assert zipfile.ZipFile(target).namelist()[-1] == MANIFEST
    assert [file.name for file in target.parent.iterdir()] == ["box-b.zip"]


@pytest.mark.parametrize("url", ["memory://bucket/box-c", "memory://bucket/deep/box-c.zip"])
def test_url_holds_the_whole_capture(folder: Path, tmp_path: Path, url: str) -> None:
    deliver(folder, url)
    back = fetch(url, tmp_path / "scratch")
    assert back.name == "box-c"
    assert contents(back) == contents(folder)
    with pytest.raises(CaptureError, match="is not empty"):
        refuse_to_replace(url)
    deliver(folder, url)
    assert contents(fetch(url, tmp_path / "again")) == contents(folder)


def test_captures_of_all_kinds_are_compared(folder: Path, tmp_path: Path) -> None:
    deliver(folder, str(tmp_path / "one.zip"))
    deliver(folder, "memory://bucket/two")
    found = compare([folder, tmp_path / "one.zip", "memory://bucket/two"])
    assert {worker.name for worker in found.workers} == {"box-a:cpu", "one:cpu", "two:cpu"}
    assert found.exit_status == 0


def test_report_says_where_the_captures_lie(folder: Path, tmp_path: Path) -> None:
    deliver(folder, str(tmp_path / "one.zip"))
    comparing.compare_folders([tmp_path / "one.zip", folder], tmp_path / "out")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["captures"] == [str(tmp_path / "one.zip"), str(folder)]


def test_archive_of_a_stranger_writes_nowhere_else(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "evil.zip"
    deliver(folder, str(path))
    with zipfile.ZipFile(path, "a") as archive:
        for name in ("../out.json", "/etc/out.json", "workers/../../out.json", "blobs/x.safetensors", "run.py"):
            archive.writestr(name, "gotcha")
        link = zipfile.ZipInfo("workers/cpu.isolated/link.json")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    back = fetch(str(path), tmp_path / "scratch")
    found = contents(back)
    assert not [name for name in found if found[name] == b"gotcha"]
    assert found["workers/cpu.isolated/link.json"] == b"/etc/passwd"  # a file with this text, no link
    assert not list(tmp_path.glob("**/out.json"))
    assert read_capture(back).workers


def _inside(path: Path, name: str) -> int:
    """Return the place of a byte of a member's content in an archive."""
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo(name)
    return member.header_offset + 30 + len(member.filename) + 4  # a local file header has 30 bytes and the name


@pytest.mark.parametrize("damage", ["cut", "rubbish", "flipped"])
def test_damaged_archive(folder: Path, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "box.zip"
    deliver(folder, str(path))
    raw = bytearray(path.read_bytes())
    if damage == "cut":
        raw = raw[: len(raw) // 2]
    elif damage == "rubbish":
        raw = bytearray(b"rubbish")
    else:
        raw[_inside(path, "workers/cpu.isolated/records.jsonl")] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(CaptureError):
        comparing.compare_folders([path], None)


def test_more_than_the_disk_holds(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deliver(folder, str(tmp_path / "box.zip"))
    monkeypatch.setattr("consistency.capture.archive._SPARE_BYTES", 1 << 60)
    with pytest.raises(CaptureError, match="no room"):
        fetch(str(tmp_path / "box.zip"), tmp_path / "scratch")


@pytest.mark.parametrize("url", ["nosuchprotocol://b/c", "memory://nothing/there"])
def test_url_that_leads_nowhere(tmp_path: Path, url: str) -> None:
    with pytest.raises(CaptureError):
        fetch(url, tmp_path)


def test_command_writes_one_file_and_compares_it(cli_here: Cli, tmp_path: Path) -> None:
    made = cli_here("capture", "--devices", "cpu", "--stages", "adapter", "--out", tmp_path / "a.zip")
    assert made.returncode == 0, made.stderr
    assert cli_here("capture", "--devices", "cpu", "--stages", "adapter", "--out", tmp_path / "a.zip").returncode == 2
    done = cli_here("compare", tmp_path / "a.zip")
    assert done.returncode == 0, done.stderr
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.zip"]


def test_delivery_that_is_cut_short_leaves_nothing_under_the_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system shows a file while it is written: what has the name of a capture must be one."""
    target = tmp_path / "store" / "box.zip"

    def put(self: object, source: str, to: str) -> None:
        Path(to).write_bytes(Path(source).read_bytes()[:100])
        assert not target.exists()
        raise OSError("the connection is gone")

    monkeypatch.setattr(fsspec.get_filesystem_class("file"), "put_file", put)
    with pytest.raises(CaptureError, match="connection is gone"):
        deliver(folder, target.as_uri())
    assert list(target.parent.iterdir()) == []
    monkeypatch.undo()
    deliver(folder, target.as_uri())
    assert [file.name for file in target.parent.iterdir()] == ["box.zip"]
