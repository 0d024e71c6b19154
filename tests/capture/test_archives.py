"""ZIP files are read without their tensors, and leave nothing behind but those that were asked for."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from consistency.capture.archives import read_sent
from consistency.capture.transport import deliver
from consistency.errors import CaptureError
from tests.comparison.made_records import moved
from tests.conftest import MakeCapture

NAMES = ("0" * 64, "1" * 64)


@pytest.fixture
def archive(make_capture: MakeCapture, tmp_path: Path) -> Path:
    folder = make_capture("box", {"cpu": [moved()]})
    for name in NAMES:
        (folder / "blobs" / f"{name}.safetensors").write_bytes(name.encode() * 100)
    deliver(folder, str(tmp_path / "box.zip"))
    return tmp_path / "box.zip"


def files(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file()]


def test_only_the_tensor_that_is_asked_for_is_unpacked(archive: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    found = read_sent(str(archive), scratch)
    assert [worker.info.name for worker in found.workers] == ["cpu"]
    assert found.folder.name == "box"
    assert files(scratch) == []
    assert found.blob_path(NAMES[1]).read_bytes() == NAMES[1].encode() * 100
    assert files(scratch) == [f"{NAMES[1]}.safetensors"]
    assert not found.blob_path("2" * 64).exists(), "there is none"


def test_the_capture_of_a_run(archive: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(archive) as plain, zipfile.ZipFile(tmp_path / "run.zip", "w") as run:
        for name in plain.namelist():
            run.writestr(f"captures/{name}", plain.read(name))
    found = read_sent(str(tmp_path / "run.zip"), tmp_path / "scratch")
    assert found.blob_path(NAMES[0]).read_bytes() == NAMES[0].encode() * 100


def test_a_damaged_tensor_is_found_when_it_is_read(archive: Path, tmp_path: Path) -> None:
    raw = bytearray(archive.read_bytes())
    raw[raw.index(NAMES[0].encode() * 100)] ^= 1
    archive.write_bytes(raw)
    found = read_sent(str(archive), tmp_path / "scratch")
    with pytest.raises(CaptureError, match="cannot unpack a stored tensor"):
        found.blob_path(NAMES[0])
    assert files(tmp_path / "scratch") == []


def test_a_fetched_archive_keeps_its_tensors(archive: Path, tmp_path: Path) -> None:
    found = read_sent(archive.as_uri(), tmp_path / "scratch")
    archive.unlink()
    assert found.blob_path(NAMES[0]).exists()
