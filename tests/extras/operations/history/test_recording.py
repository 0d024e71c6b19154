"""What a run leaves in a history: the same for a fleet as for each of its workers alone, and no more work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from consistency.capture.folder import SCHEMA, Capture, CaptureManifest, WorkerCapture
from consistency.capture.json_codec import decode_json, encode_json
from consistency.capture.records import TensorRecord, WorkerInfo
from consistency.case.case import Case
from consistency.comparison.compare import compare
from consistency.comparison.result import Finding, tensor_name
from consistency.extras.operations.history.drift import add_run
from consistency.extras.operations.history.recording import record_of
from consistency.extras.operations.history.store import History
from tests.comparison.made_records import computed, moved

Parts = tuple[tuple[TensorRecord, ...], ...]


def captures(parts: dict[int, Parts], nodes: int = 9, **fields: Any) -> list[Capture]:
    """Return captures of nodes with eight GPUs; workers without parts of their own share those of 0."""
    return [
        Capture(
            folder=Path(f"/nowhere/gpu-{node:04}"),
            manifest=CaptureManifest(
                schema=SCHEMA, tool="0", created="2026-01-01", host=f"gpu-{node:04}", workers=(),
                case=Case(name="made-up", base="base", adapter="adapter"),
            ),
            workers=tuple(
                WorkerCapture(
                    info=WorkerInfo(
                        name=f"cuda:{gpu}", load_path="isolated", architecture="Hopper sm_90", model="H100",
                        status="ok", uuid=f"GPU-{node}-{gpu}", kernel_key="k", **fields,
                    ),
                    parts=parts.get(node * 8 + gpu, parts[0]),
                )
                for gpu in range(8)
            ),
        )
        for node in range(nodes)
    ]  # fmt: skip


HEALTHY: Parts = ((moved(), moved(tensor="lora_A")), (computed(), computed(layer="layers.1.q")))
OTHER: Parts = (HEALTHY[0], (computed("x"), computed(layer="layers.1.q")))


def alone(parts: Parts) -> Parts:
    """Return parts that no other worker shares."""
    return tuple(tuple(decode_json(encode_json(record), TensorRecord) for record in part) for part in parts)


def test_workers_that_share_their_records_are_recorded_like_each_alone() -> None:
    shared = captures({0: HEALTHY, 13: OTHER})
    apart = captures({number: alone(OTHER if number == 13 else HEALTHY) for number in range(72)})
    (one, tables), (other, same_tables) = (record_of(found, compare(found)) for found in (shared, apart))
    assert one.workers == other.workers
    assert tables == same_tables
    assert len(tables) == 2
    first, *others = one.workers
    assert {worker.bits["adapter"] for worker in others} == {first.bits["adapter"]}
    (odd,) = (worker for worker in others if worker.bits != first.bits)
    assert (odd.name, odd.host, odd.device) == ("gpu-0001:cuda:5", "gpu-0001", "GPU-1-5")


def test_bits_that_no_operation_promises_are_no_drift() -> None:
    """Only what an operation without a deterministic version can reach is left out."""
    unordered = (HEALTHY[0], (computed("x", nondeterministic=("cumsum",)), computed(layer="layers.1.q")))
    found = captures({0: unordered}, nodes=1)
    run, tables = record_of(found, compare(found))
    (table,) = (decode_json(raw, dict[str, str]) for raw in tables.values())
    assert set(table) == {"adapter::layers.0.q.lora_A", "adapter::layers.0.q.lora_B", "merged::layers.1.q.weight"}
    assert {worker.bits.keys() >= {"merged"} for worker in run.workers} == {True}


def test_no_tensor_is_gone_through_for_every_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[str] = []

    def count(*parts: str) -> str:
        named.append(parts[-1])
        return tensor_name(*parts)

    found = captures({0: HEALTHY})
    comparison = compare(found)
    monkeypatch.setattr("consistency.extras.operations.history.recording.tensor_name", count)
    record_of(found, comparison)
    assert len(named) == 4


def test_hosts_that_share_a_name_are_not_compared_with_each_other(tmp_path: Path) -> None:
    """One of two CPUs without a UUID holds other bits in every run: it is odd, and did not drift."""
    first, second = captures({0: HEALTHY, 8: OTHER}, 2)
    found = [
        msgspec.structs.replace(
            one,
            manifest=msgspec.structs.replace(one.manifest, host="localhost"),
            workers=tuple(
                msgspec.structs.replace(worker, info=msgspec.structs.replace(worker.info, uuid=None, name="cpu"))
                for worker in one.workers[:1]
            ),
        )
        for one in (first, second)
    ]
    for _ in range(2):
        judged = add_run(History(str(tmp_path)), found, compare(found), None)
        assert [finding.kind for finding in judged.findings if finding.kind == "drift"] == []
    (last, _) = History(str(tmp_path)).runs()
    assert [worker.device for worker in last.workers] == ["localhost/gpu-0000:cpu", "localhost/gpu-0001:cpu"]


def test_a_fleet_drifts_through_the_real_way(tmp_path: Path) -> None:
    def night(parts: dict[int, Parts], **fields: Any) -> list[Finding]:
        found = captures(parts, **fields)
        judged = add_run(History(str(tmp_path)), found, compare(found), None)
        return [finding for finding in judged.findings if finding.kind != "same-device-type"]

    assert night({0: HEALTHY}) == []
    assert night({0: HEALTHY}) == []
    (drift,) = night({0: HEALTHY, 13: OTHER})
    assert (drift.kind, drift.workers, drift.tensors) == ("drift", ("gpu-0001:cuda:5",), ("merged::layers.0.q.weight",))
    (again,) = night({0: HEALTHY, 13: OTHER})
    assert again.message == drift.message, "until the earlier bits return"
    (note,) = night({0: OTHER}, driver="580.2")
    assert (note.kind, len(note.workers)) == ("software", 72)
    last = next(History(str(tmp_path)).runs())
    assert (last.verdict, len(last.workers.devices), len(last.workers.hosts)) == ("consistent", 72, 9)
