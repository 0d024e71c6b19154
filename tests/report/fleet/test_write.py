"""The report of a fleet: its size, and what it still names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from consistency.comparison.result import Comparison
from consistency.report import json as report_json
from consistency.report.formats import View
from consistency.report.html import as_html
from consistency.report.markdown import as_markdown
from tests.report.fleet.made_fleets import KINDS, many
from tests.report.printed import printed

ODD = ("node-0007:cuda:3", "node-0011:cuda:5")


def written(found: Comparison) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(b"".join(report_json.render(found, View(schema=2))))
    return table


def test_the_number_of_workers_chooses_the_schema() -> None:
    schemas = [json.loads(report_json.as_bytes(many(hosts, 1)))["schema"] for hosts in (8, 9)]
    assert schemas == ["consistency.report/1", "consistency.report/2"]
    assert json.loads(b"".join(report_json.render(many(9, 1), View(schema=1))))["schema"] == "consistency.report/1"


def test_the_size_is_not_the_fleets() -> None:
    """What is left per worker is its identity: here a UUID, a host and a time, of some 60 bytes."""
    small, large = (many(hosts, 40, wrong=ODD) for hosts in (80, 220))  # no part of the page has room for more than 64
    sizes = [len(json.dumps(written(found))) for found in (small, large)]
    assert sizes[1] - sizes[0] < 1120 * 80
    rows = [sum(len(tensor["rows"]) for tensor in written(found)["tensors"]) for found in (small, large)]
    assert rows[0] == rows[1] == 40 * 4
    for text in (as_html, as_markdown, printed):
        lengths = [len(text(found)) for found in (small, large)]
        assert lengths[1] < 1.02 * lengths[0]


@pytest.mark.parametrize("hosts", [20, 160])
def test_the_odd_ones_are_named(hosts: int) -> None:
    found = many(hosts, 3, wrong=ODD)
    table = written(found)
    groups = table["groups"]
    assert groups[0] == {"workers": [f"node-[0000-{hosts - 1:04}]:cuda:[0-7]"], "count": hosts * 8}
    wrong = next(row for tensor in table["tensors"] for row in tensor["rows"] if row["status"] == "outside")
    assert groups[wrong["workers"]] == {"workers": list(ODD), "count": 2}
    assert groups[table["findings"][0]["workers"]] == {"workers": list(ODD), "count": 2}
    for text in (as_html(found), as_markdown(found), printed(found)):
        assert all(name in text for name in ODD)


def test_it_is_said_how_many_agree() -> None:
    found = many(20, 3, wrong=ODD)
    text = "158 of 160 workers agree bitwise within their architectures; node-0007:cuda:3, node-0011:cuda:5 differ"
    for shown in (as_html(found), printed(found, width=200), as_markdown(found)):
        assert text in shown
    assert "160 of 160 workers agree bitwise within their architectures" in printed(many(20, 1), width=200)
    assert "workers agree" not in printed(many(20, 1, apart=True)) + printed(many(8, 1))


def test_names_stand_once() -> None:
    table = written(many(20, 30, wrong=ODD))
    text = json.dumps({**table, "groups": [], "sources": [], "captures": [], "workers": [], "hosts": []})
    assert "node-0012" not in text
    assert len(table["groups"]) < 20


def test_equal_tensors_are_one_entry() -> None:
    folded = [tensor for tensor in written(many(10, 6))["tensors"] if "count" in tensor]
    assert [(one["stage"], one["count"], len(one["layers"])) for one in folded] == [("adapter", 6, 6)]


def test_rows_that_differ_in_figures_alone_are_joined() -> None:
    """The worst of an architecture keeps its figures; the others share a row without any."""
    table = written(many(20, 2, apart=True))
    tensor = next(one for one in table["tensors"] if one["stage"] == "merged")
    counts = [(table["groups"][row["workers"]]["count"], row.get("left_out", 0)) for row in tensor["rows"]]
    assert counts == [(1, 0), (79, 79)] * len(KINDS)
    assert [row.get("ratio") for row in tensor["rows"]] == [152 / 9999, None, 160 / 9999, None]
    assert (len(tensor["classes"]), tensor["classes_left_out"]) == (16, 144)


def test_of_many_hosts_those_with_a_problem_are_written() -> None:
    table = written(many(80, 1))
    assert [host["host"] for host in table["hosts"]] == ["node-0003"]
    assert table["hosts_left_out"] == 79
    assert len(written(many(10, 1))["hosts"]) == 10


def test_a_report_of_one_schema_is_written_in_the_other() -> None:
    """What was folded when it was written is read as one entry for each tensor, and folded again."""
    found = many(2, 40)
    first = b"".join(report_json.render(found, View(schema=1)))
    second = b"".join(report_json.render(found, View(schema=2)))
    assert any(tensor.get("count", 1) > 1 for tensor in json.loads(second)["tensors"])
    wanted = [_folded(tensor) for tensor in json.loads(second)["tensors"]]
    for raw in (first, second):
        again = json.loads(b"".join(report_json.render(report_json.read(raw), View(schema=2))))
        assert [_folded(tensor) for tensor in again["tensors"]] == wanted


def _folded(tensor: dict[str, Any]) -> tuple[object, ...]:
    return tuple(tensor.get(field) for field in ("stage", "layer", "tensor", "count", "layers"))
