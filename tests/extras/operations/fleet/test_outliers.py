"""Of a fleet whose devices differ only the odd node is named to whoever drains nodes by findings."""

from __future__ import annotations

import json
from pathlib import Path

from consistency.case.requirements import Requirements
from consistency.comparison.site_groups import SiteGroups
from consistency.extras.operations.fleet.run import FleetPlan, run_fleet
from consistency.extras.operations.fleet.schedulers.options import FleetOptions
from tests.comparison.made_records import computed, moved
from tests.conftest import MakeCapture
from tests.extras.operations.fleet.delivering import Delivering
from tests.golden.executed import shows


def outcomes(out: Path) -> dict[str, list[str]]:
    return {name: node["findings"] for name, node in json.loads((out / "fleet.json").read_bytes())["nodes"].items()}


def check(make_capture: MakeCapture, out: Path, bits: str) -> dict[str, list[str]]:
    program = {"kernel_key": "torch 2", "model": "H100"}
    made = {
        f"n{place}": make_capture(f"{bits}-{place}", {"cuda:0": [moved(), computed(bit)]}, info={"cuda:0": program})
        for place, bit in enumerate(bits)
    }
    plan = FleetPlan(
        scheduler=Delivering(made), options=FleetOptions(engine="slurm"), nodes=tuple(made), command=("consistency",),
        words=(), requirements=Requirements(),
    )  # fmt: skip
    racks = SiteGroups(hosts={name: {"rack": "r1" if name in ("n0", "n2") else "r2"} for name in made})
    comparison = run_fleet(plan, out, watch=lambda *_: None, groups=racks)
    assert comparison.verdict == "inconsistent"
    return outcomes(out)


def test_the_odd_nodes_alone_are_named(make_capture: MakeCapture, tmp_path: Path) -> None:
    found = check(make_capture, tmp_path / "out", "babaaa")
    assert {node for node, texts in found.items() if texts} == {"n0", "n2"}
    assert found["n0"] == [
        "merged · n0:cuda:0, n2:cuda:0 differ bitwise in 1 tensor from 4 others of the same device type with the same "
        "software, which agree; all of them have rack r1, and no other has"
    ]
    assert shows(Path(__file__).parents[4] / "docs" / "fleet.md", found["n0"][0])


def test_two_halves_name_all_nodes(make_capture: MakeCapture, tmp_path: Path) -> None:
    assert all(check(make_capture, tmp_path / "out", "abab").values())
