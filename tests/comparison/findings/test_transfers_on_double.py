"""The matrix of pairs on several devices in software: real workers and report, with copies that are dropped."""

from __future__ import annotations

import pytest

from consistency.comparison.findings.transfers import matrices
from tests.accelerator.fixtures import RunsOnDouble

pytestmark = pytest.mark.slow

DROPPED = [{"from": "npu:0", "to": "npu:1", "does": "drop"}, {"from": "npu:0", "to": "npu:2", "does": "drop"}]


def test_dropped_pairs_are_told_apart_from_the_others(run_on_double: RunsOnDouble) -> None:
    found = run_on_double(
        {"devices": 3, "copies": DROPPED},
        devices="npu:0,npu:1,npu:2", stages="transfer", load_paths="shared", level="quick",
    )  # fmt: skip
    assert found.process.returncode == 1, found.process.stdout + found.process.stderr
    (matrix,) = matrices(found.comparison.tensors)
    assert matrix.places == ("cpu", "npu:0", "npu:1", "npu:2")
    assert set(matrix.wrong) == {("npu:0", "npu:1"), ("npu:0", "npu:2")}
    assert len(matrix.cells) == 15
    assert all(cell.is_fine for pair, cell in matrix.cells.items() if pair not in matrix.wrong)
    (error,) = [f for f in found.comparison.findings if f.severity == "error"]
    assert (error.kind, error.workers) == ("never-written", ("npu:1", "npu:2"))
    assert "copies npu:0→npu:1 and npu:0→npu:2 deliver nothing" in error.message
    assert "are fine" in error.message
    lines = [line.split() for line in found.process.stdout.splitlines() if line.startswith("  npu:0 ")]
    assert [words.count("✗") for words in lines if "✗" in words] == [2]
