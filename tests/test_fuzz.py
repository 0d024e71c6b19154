"""Mutations of what the tool reads: none turns a finding into a consistent result, and none is a traceback."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.fuzz import Surface, damaged, fuzz, run
from tests.accelerator.fixtures import Warm
from tests.launch.warm import forked_workers

pytestmark = pytest.mark.process

SEED = 20_261_123


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_damage_reads_as_consistent_and_none_is_a_traceback(warm: Warm) -> None:
    with forked_workers(warm().address):
        found = run(2000, SEED)
    assert sum(one.mutations for one in found.values()) > 1500
    assert not [text for one in found.values() for text in (*one.false_consistent, *one.slow)]
    assert not {key: text for one in found.values() for key, text in one.tracebacks.items()}


def test_what_would_be_wrong_is_seen(tmp_path: Path) -> None:
    """A reader that believes what it reads is told of, and one that raises what no user can act on."""
    (tmp_path / "surface").mkdir()
    (tmp_path / "surface" / "a.json").write_text('{"verdict": "inconsistent", "status": "outside"}')

    def believing(folder: Path) -> str:
        text = (folder / "a.json").read_text(errors="replace")
        return "inconsistent" if '"status": "outside"' in text else "consistent"

    def brittle(folder: Path) -> str | None:
        if '"status"' not in (folder / "a.json").read_text(errors="replace"):
            raise KeyError("status")
        return None

    by = random.Random(0)
    surface = Surface(name="believing", folder=tmp_path / "surface", read=believing)
    assert fuzz(surface, 200, by, tmp_path / "one").false_consistent
    surface = Surface(name="brittle", folder=tmp_path / "surface", read=brittle)
    assert fuzz(surface, 200, by, tmp_path / "two").tracebacks


def test_every_mutation_takes_any_bytes() -> None:
    by = random.Random(0)
    for raw in (b"", b"\n", b"{}", b'{"a": [1, {"b": null}]}\n{"c": 1}\n', bytes(range(256))):
        kinds = {damaged(raw, by)[1] for _ in range(200)}
        assert len(kinds) == 7
