"""Several processes change one baseline, and one history, at the same time: none loses what another has written."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from consistency.capture.claim import claim_of
from consistency.comparison.result import Finding
from consistency.extras.operations.history.baseline import accept, read_baseline
from consistency.extras.operations.history.retention import remove_old
from consistency.extras.operations.history.store import STARTED, History, noted
from tests.extras.operations.history.made_fleets import fleet_history, fleet_runs


def test_no_accepted_finding_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"

    def add(number: int) -> None:
        error = Finding(kind="zeros", severity="error", message="m", workers=("cpu",), tensors=(str(number),))
        accept(path, [error], [], reason="known")

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(add, range(64)))
    assert {entry.tensors for entry in read_baseline(path).accepted} == {(str(number),) for number in range(64)}
    assert [one.name for one in tmp_path.iterdir()] == ["baseline.json"]


def test_old_runs_are_removed_by_several_at_once(tmp_path: Path) -> None:
    fleet_history(tmp_path, 1, 200)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: remove_old(History(str(tmp_path)), keep_runs=2), range(4)))
    assert sum(len(one.runs) for one in found) == 198
    assert len(History(str(tmp_path)).names()) == 2
    assert not any(one.is_file() for one in tmp_path.iterdir())


def test_claims_of_killed_runs_go_with_their_notes(tmp_path: Path) -> None:
    history = fleet_history(tmp_path, 1, 1)
    with noted(history, "case"):
        (note,) = (Path(place) for place in history.files_of(STARTED) if place.endswith(".json"))
        raw = note.read_bytes()
        remove_old(history, keep_runs=1)
        assert {Path(place) for place in history.files_of(STARTED)} == {note, claim_of(note)}
    claim_of(note).touch()
    note.write_bytes(raw)
    remove_old(history, keep_runs=1)
    assert claim_of(note).exists()
    note.unlink()
    remove_old(history, keep_runs=1)
    assert history.files_of(STARTED) == []


def test_what_a_killed_writer_left_is_removed_by_the_next_run(tmp_path: Path) -> None:
    history = fleet_history(tmp_path, 1, 1)
    for folder in ("runs", "tables", "started"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f".consistency-{'0' * 32}.tmp").write_bytes(b"{ cut sho")
    (run,) = fleet_runs(1, 1, case="other")
    history.append(run, {})
    assert list(tmp_path.rglob("*.tmp")) == []
