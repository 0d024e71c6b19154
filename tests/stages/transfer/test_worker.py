"""The stage `transfer` on the host alone: what a copy has to deliver, what is poisoned, and who is believed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from consistency.capture.names import CASTING, DIRECT, HOST, OVERLAPPED, STRIDED, large_copy
from consistency.capture.records import TensorRecord
from consistency.case import standard
from consistency.case.case import Case
from consistency.case.stage import Level
from consistency.numerics.digest import TensorDigest, as_bytes, digest
from consistency.stages.transfer import copying as copies
from consistency.stages.transfer import delivery, payload
from consistency.stages.transfer import worker as transfer
from consistency.stages.transfer.delivery import DIGEST_DIFFERS, Place
from consistency.worker.context import Machine
from consistency.worker.faults import plant
from consistency.worker.protocol import EventLog
from consistency.worker.recorder import Recorder
from tests.capture.whole import read_records
from tests.worker.made_jobs import job_of

CPU = torch.device("cpu")


def look(folder: Path, *, level: Level = Level.QUICK, only: tuple[str, ...] = ()) -> dict[str, TensorRecord]:
    folder.mkdir(exist_ok=True)
    case = Case(name="x", base="", stages=(standard.TRANSFER,), level=level, only=only)
    job = job_of(case, folder, name="cpu@baseline", makes_reference=False)
    with EventLog(folder / "events.jsonl") as events, Recorder(folder, folder, only=only) as record:
        transfer.run(cast("Machine", SimpleNamespace(job=job, events=events, record=record)))
    return {record.tensor: record for record in read_records(folder / "records.jsonl")}


def test_every_kind_of_copy_within_the_host(tmp_path: Path) -> None:
    found = look(tmp_path / "a")
    assert list(found) == [DIRECT, STRIDED, CASTING, OVERLAPPED]
    for record in found.values():
        assert (record.stage, record.layer, record.status) == ("transfer", "cpu->cpu", "equal")
        assert record.digest == record.reference_digest
        assert record.shape == (sum(record.evidence["bytes"]),)
        assert record.evidence["read_back"] == "agree"
    assert found[DIRECT].evidence["bytes"] == list(transfer.SIZES[Level.QUICK])
    assert found[DIRECT].evidence["gb_per_s"] > 0
    again = look(tmp_path / "b")
    assert {t: r.digest for t, r in again.items()} == {t: r.digest for t, r in found.items()}
    assert look(tmp_path / "c", only=("adapter",)) == {}


@pytest.mark.parametrize(
    ("fault", "word"),
    [("transfer-dropped", "never-written"), ("transfer-zeros", "zeros"), ("transfer-corrupt", "bit-flip")],
)
def test_whatever_goes_wrong_is_seen_in_every_kind(tmp_path: Path, fault: str, word: str) -> None:
    with plant(fault):
        found = look(tmp_path)
    assert {(r.status, r.word) for r in found.values()} == {("outside", word)}
    assert all("gb_per_s" not in r.evidence for r in found.values()), "what is dropped has no speed"
    assert found[DIRECT].evidence["wrong_copies"] == found[DIRECT].evidence["copies"] == 4
    assert found[CASTING].evidence["copy"] == "cpu->cpu float32 to bfloat16"
    assert found[DIRECT].blob is not None


def test_bytes_of_an_earlier_copy_beside_work(tmp_path: Path) -> None:
    with plant("transfer-stale-beside-work"):
        found = look(tmp_path)
    assert {t: r.status for t, r in found.items() if t != OVERLAPPED} == dict.fromkeys(
        (DIRECT, STRIDED, CASTING), "equal"
    )
    assert found[OVERLAPPED].word == "stale"
    assert found[OVERLAPPED].evidence["holds"] == "what was sent as cpu->cpu direct, 1048576 bytes"


def test_bytes_beside_the_target_are_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spill(source: torch.Tensor, destination: torch.Tensor) -> None:
        destination.copy_(source)
        whole = destination.as_strided((destination.untyped_storage().nbytes() // destination.element_size(),), (1,))
        if whole.numel() > destination.numel():
            whole[-1] = 0

    monkeypatch.setattr(copies, "copy", spill)
    found = look(tmp_path)
    assert {t: r.status for t, r in found.items()} == {
        DIRECT: "equal", STRIDED: "outside", CASTING: "equal", OVERLAPPED: "equal",
    }  # fmt: skip
    measured = found[STRIDED].measure
    assert measured is not None
    assert measured.mismatched == 1


def test_a_copy_that_fails_and_one_without_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("peer mapping resources exhausted")

    monkeypatch.setattr(copies, "copy", refuse)
    found = look(tmp_path / "a")
    assert {r.status for r in found.values()} == {"missing"}
    assert "peer mapping resources exhausted" in (found[DIRECT].reason or "")

    def no_room(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(copies, "copy", no_room)
    with pytest.raises(torch.OutOfMemoryError):
        look(tmp_path / "b")


def test_memory_that_runs_out_of_a_large_copy_leaves_that_copy_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(copies, "copy", no_room)
    monkeypatch.setattr(transfer, "LARGE", (1024,))
    monkeypatch.setattr(transfer, "places", lambda _: (Place(name=HOST, device=CPU),) * 2)  # as of a device and a host
    monkeypatch.setattr(transfer.Copies, "pair", lambda self, *path: self._check_large("cpu->cpu", path, 1024))
    (found,) = look(tmp_path).values()
    assert (found.tensor, found.status, found.reason) == (large_copy(1024), "skipped", "no memory left for it")


def test_a_digest_that_disagrees_with_the_bytes_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def every_other(tensor: torch.Tensor) -> TensorDigest:
        nonlocal calls
        calls += 1
        return digest(tensor if calls % 2 else torch.zeros_like(tensor))

    monkeypatch.setattr(delivery, "digest", every_other)  # of what was sent, then of what arrived
    found = look(tmp_path)[DIRECT]
    assert (found.status, found.word) == ("outside", "differs")
    assert found.evidence["read_back"] == DIGEST_DIFFERS
    assert found.evidence["digest_only"] is True


def test_every_copy_has_bytes_of_its_own_and_none_of_the_poison() -> None:
    one, other = payload.contiguous("a, 4097 bytes", 4097), payload.contiguous("b, 4097 bytes", 4097)
    assert not torch.equal(one.sent, other.sent)
    assert not bool((one.sent == one.poison).any())
    assert torch.equal(one.sent, payload.contiguous("a, 4097 bytes", 4097).sent)
    for made in (one, payload.strided("c", 4096), payload.casting("d", 4096, torch.float32, torch.bfloat16)):
        landing = made.landing(CPU)
        untouched = as_bytes(landing).clone()
        made.put(landing).copy_(made.take(made.sent))
        assert torch.equal(as_bytes(landing), as_bytes(made.expected))
        assert not torch.equal(as_bytes(landing), untouched)
    gaps = payload.strided("c", 4096)
    assert int((gaps.expected == gaps.poison).sum()) == gaps.expected.numel() // 2


def test_numbers_that_are_cast_are_normal_in_every_dtype() -> None:
    made = payload.casting("x", 65536, torch.float32, torch.float16)
    sizes = made.sent.abs()
    assert float(sizes.min()) >= 2.0**-8
    assert float(sizes.max()) < 2.0**8
    assert (made.expected.dtype, made.bytes) == (torch.float16, 32768)


def test_large_copies_are_left_out_where_there_is_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "free_bytes", lambda _: 100 * 2**20)
    monkeypatch.setattr(transfer, "places", lambda _: (Place(name=HOST, device=CPU), Place(name=HOST, device=CPU)))
    with Recorder(tmp_path, tmp_path) as record:
        job: Any = type("J", (), {"case": Case(name="x", base="", level=Level.THOROUGH)})
        looking = transfer.Copies(job, record)
        looking._check_large("cpu->cpu", (Place(name=HOST, device=CPU),) * 2, 256 * 2**20)
    (only,) = read_records(tmp_path / "records.jsonl")
    assert (only.tensor, only.status) == (large_copy(256 * 2**20), "skipped")
    assert "256 MiB is more than one part in 8 of what is free on cpu" in (only.reason or "")
