"""What a node has delivered is read when it is seen, and that may be later than its status."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from consistency.case.requirements import Requirements
from consistency.extras.operations.fleet.run import FleetPlan, run_fleet
from consistency.extras.operations.fleet.schedulers.options import FleetOptions
from tests.comparison.made_records import moved
from tests.conftest import MakeCapture
from tests.extras.operations.fleet.delivering import Delivering


def test_captures_that_are_seen_late_or_in_part(
    make_capture: MakeCapture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third is never seen whole; time passes without being waited for."""
    made = {name: make_capture(name, {"cpu": [moved()]}) for name in ("n1", "n2", "n3", "n4")}
    scheduler = Delivering(made)
    store, hidden = tmp_path / "out" / "captures", tmp_path / "hidden"
    hidden.mkdir()
    whole: dict[str, bytes] = {}

    def cancel(nodes: object) -> None:  # comes last: all have delivered
        (store / "n1.zip").rename(hidden / "n1.zip")
        for name in ("n2", "n3"):
            whole[name] = (store / f"{name}.zip").read_bytes()
            (store / f"{name}.zip").write_bytes(whole[name][: len(whole[name]) // 2])

    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:
            (hidden / "n1.zip").rename(store / "n1.zip")
            (store / "n2.zip").write_bytes(whole["n2"])

    monkeypatch.setattr(scheduler, "cancel", cancel)
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: sum(waited))
    plan = FleetPlan(
        scheduler=scheduler, options=FleetOptions(engine="slurm"), nodes=tuple(made), command=("consistency",),
        words=(), requirements=Requirements(),
    )  # fmt: skip
    comparison = run_fleet(plan, tmp_path / "out", watch=lambda *_: None)
    assert [worker.name for worker in comparison.workers] == ["n1:cpu", "n2:cpu", "n4:cpu"]
    assert comparison.verdict == "incomplete"
    nodes = json.loads((tmp_path / "out" / "fleet.json").read_bytes())["nodes"]
    assert nodes["n3"]["reason"].startswith("its capture cannot be read: cannot unpack the capture")
    assert 58 <= sum(waited) <= 64
