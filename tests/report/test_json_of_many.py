"""The report of a fleet: its size, and what it still names."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from consistency.comparison.result import Comparison, Consequence, Finding
from consistency.report.html import as_html
from consistency.report.json import as_bytes, read
from consistency.report.markdown import as_markdown
from tests.report.made_fleets import KINDS, many
from tests.report.printed import printed

ODD = ("node-0007:cuda:3", "node-0011:cuda:5")


def written(found: Comparison) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(as_bytes(found))
    return table


def test_the_size_is_not_the_fleets() -> None:
    """What is left per worker is its own entry, of some 250 bytes, and that of its host's capture."""
    small, large = (many(hosts, 40, wrong=ODD) for hosts in (80, 220))  # no part of the page has room for more than 64
    sizes = [len(json.dumps(written(found))) for found in (small, large)]
    assert sizes[1] - sizes[0] < 1120 * 350
    rows = [len(written(found)["outcomes"]) for found in (small, large)]
    assert rows[0] == rows[1] == 40 * 4
    for text in (as_html, as_markdown, printed):
        lengths = [len(text(found)) for found in (small, large)]
        assert lengths[1] < 1.02 * lengths[0]


@pytest.mark.parametrize("hosts", [20, 160])
def test_the_odd_ones_are_named(hosts: int) -> None:
    found = many(hosts, 3, wrong=ODD)
    table = written(found)
    kinds = [table["cohorts"][int(kind["workers"][0].removeprefix("@"))] for kind in table["environments"]]
    assert [kind["count"] for kind in kinds] == [hosts * 4] * 2
    wrong = next(row for row in table["outcomes"] if row["status"] == "outside")
    assert table["cohorts"][wrong["cohort"]] == {"number": wrong["cohort"], "workers": list(ODD), "count": 2}
    assert table["findings"][0]["workers"] == list(ODD)
    for text in (as_html(found), as_markdown(found), printed(found)):
        assert all(name in text for name in ODD)


def test_it_is_said_how_many_agree() -> None:
    found = many(20, 3, wrong=ODD)
    text = "158 of 160 workers agree bitwise within their architectures; node-0007:cuda:3, node-0011:cuda:5 differ"
    for shown in (as_html(found), printed(found, width=200), as_markdown(found)):
        assert text in shown
    assert "160 of 160 workers agree bitwise within their architectures" in printed(many(20, 1), width=200)
    assert "workers agree" not in printed(many(20, 1, apart=True)) + printed(many(8, 1))


def test_rows_that_differ_in_figures_alone_are_joined() -> None:
    """The worst of an architecture keeps its figures; the others share a row without any."""
    table = written(many(20, 2, apart=True))
    rows = [one for one in table["outcomes"] if one["stage"] == "merged" and one["layer"] == "layers.0"]
    counts = [(table["cohorts"][row["cohort"]]["count"], row.get("left_out", 0)) for row in rows]
    assert counts == [(1, 0), (79, 79)] * len(KINDS)
    assert [row["ratio"] for row in rows] == [152 / 9999, None, 160 / 9999, None]
    (layer, *_) = (one for one in table["layers"] if one["stage"] == "merged")
    assert [len(cell["classes"]) for cell in layer["architectures"].values()] == [16, 16]


def test_of_many_hosts_those_with_a_problem_are_written() -> None:
    table = written(many(80, 1))
    assert [host["host"] for host in table["hosts"]] == ["node-0003"]
    assert table["hosts_left_out"] == 79
    assert len(written(many(10, 1))["hosts"]) == 10


def test_workers_of_a_consequence_are_written_and_read_as_those_of_its_finding() -> None:
    found = many(20, 3, wrong=ODD)
    workers = tuple(worker.name for worker in found.workers)
    led_to = Consequence(stage="merged", message="merged is wrong", workers=workers, tensors=("merged::a.weight",))
    finding = Finding(
        kind="zeros", severity="error", message="zeros", workers=workers, cause="a copy", consequences=(led_to,)
    )
    found = msgspec.structs.replace(found, findings=(finding,))
    ((entry,),) = [written(found)["findings"]]
    assert entry["workers"] == entry["consequences"][0]["workers"] == [entry["workers"][0]]
    assert read(as_bytes(found)).findings == (finding,)
