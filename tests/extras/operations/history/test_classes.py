"""The page of a fleet: rows are classes of devices, with those that are odd first."""

from __future__ import annotations

from pathlib import Path

import msgspec

from consistency.extras.operations.history.page import MOST_CLASSES, Classes, class_lines, history_as_html, nights
from consistency.extras.operations.history.records import WorkerRecord
from tests.extras.operations.history.made_fleets import BITS, GPUS, Happens, drifted, fleet_history, incidents


def classes(tmp_path: Path, nodes: int, runs: int, happens: Happens = lambda _, w: w) -> Classes:
    history = fleet_history(tmp_path / "history", nodes, runs, happens)
    return class_lines(nights(history.runs(), 0))


def test_devices_that_were_alike_are_one_row_and_odd_ones_come_first(tmp_path: Path) -> None:
    found = classes(tmp_path, 9, 12, incidents)
    rows = [(row.count, row.names, "".join(c.letter if c else "." for c in row.cells)) for row in found.lines]
    assert rows == [
        (1, "gpu-0004:cuda:3", "AAAAAABBBBBB"),
        (8, "gpu-0008:cuda:[0-7]", "AAAAAAAAA..."),
        (47, "gpu-[0000-0001]:cuda:[0-7], gpu-0004:cuda:[0-2,4-7], gpu-[0005-0007]:cuda:[0-7]", "A" * 12),
        (16, "gpu-[0002-0003]:cuda:[0-7]", "AAAAAAAABBBB"),
    ]
    assert (found.devices, found.left_out) == (72, "")


def test_what_does_not_fit_is_counted(tmp_path: Path) -> None:
    def happens(_: int, worker: WorkerRecord) -> WorkerRecord:
        apart = msgspec.structs.replace(worker, bits={**BITS, "merged": worker.device})
        return drifted(apart, worker.device) if worker.host < "gpu-0004" else apart

    found = classes(tmp_path, 9, 1, happens)
    verdicts = [cell.verdict for row in found.lines for cell in row.cells if cell]
    assert verdicts == ["inconsistent"] * 24 + ["consistent"] * 8
    assert len(found.lines) == MOST_CLASSES
    assert found.left_out == (
        "40 devices in 40 further classes are not shown; in 8 of these classes they are inconsistent, lost or missing"
    )


def test_the_page_does_not_grow_with_the_fleet(tmp_path: Path) -> None:
    sizes = []
    for nodes in (9, 36):
        history = fleet_history(tmp_path / str(nodes), nodes, 12, incidents)
        page = history_as_html(history, 0, place=tmp_path)
        assert "47 devices" in page or nodes > 9
        assert f"12 runs · {nodes * GPUS} devices · {nodes} hosts" in page
        assert "since 2026-01-07 02:00:00 UTC · drift in merged · gpu-0004:cuda:3" in page
        assert "2026-01-09 02:00:00 UTC · other software or settings: driver 570.1 -&gt; 580.2 · 16 devices" in page
        assert "since 2026-01-10 02:00:00 UTC · missing · 8 devices: gpu-0008:cuda:[0-7]" in page
        sizes.append(len(page))
    assert abs(sizes[1] - sizes[0]) < 100
