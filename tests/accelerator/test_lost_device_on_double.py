"""One of four devices fails in each phase of a run: it is lost with its own words, and the others are compared.

`python -m benchmarks.lost_device` runs every phase with every error.
"""

from __future__ import annotations

import pytest

from .fixtures import RunsOnDouble
from .lost_device import LOST, Loss

CHOSEN = [
    Loss(phase="load", error="ecc"),
    Loss(phase="adapter", error="no-kernel"),
    Loss(phase="merge", error="memory"),
    Loss(phase="forward", error="illegal-address"),
    Loss(phase="gradient", error="ecc"),
    Loss(phase="transfer", error="illegal-address"),
]
"""Each phase and each error at least once."""


@pytest.mark.parametrize("loss", CHOSEN, ids=lambda loss: f"{loss.phase}-{loss.error}")
def test_a_lost_device_takes_nobody_with_it(run_on_double: RunsOnDouble, loss: Loss) -> None:
    run = run_on_double(loss.settings, **loss.options)
    there = (run.folder / "report.json").exists()
    assert loss.wrong(run.process.returncode, run.report if there else None) == [], run.process.stderr
    (finding,) = (finding for finding in run.report["findings"] if finding["kind"] == "lost-worker")
    assert [name.partition(" ")[0] for name in finding["workers"]] == [LOST]
