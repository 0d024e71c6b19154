"""A report of a fleet is read as it was written, and a stranger's is refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from consistency.comparison.result import Comparison
from consistency.errors import UsageError
from consistency.extras.operations.status.make import of_comparison, of_file
from consistency.report.html import as_html
from consistency.report.json import as_bytes, read
from consistency.workflows.report_folder import read_comparison, read_redacted
from tests.report.made_comparisons import faulty
from tests.report.made_fleets import many
from tests.report.printed import printed

ODD = ("node-0001:cuda:3",)


@pytest.mark.parametrize("found", [faulty(), many(3, 4, wrong=ODD), many(2, 3)], ids=["faulty", "odd", "alike"])
def test_what_was_written_is_read(found: Comparison) -> None:
    again = read(as_bytes(found))
    for name in found.__struct_fields__:
        if name != "tensors":
            assert getattr(again, name) == getattr(found, name), name
    before, after = ({(one.load_path, one.name): one for one in of.tensors} for of in (found, again))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert sorted(after[key].workers) == sorted(tensor.workers)
        assert str(after[key]) == str(msgspec.structs.replace(tensor, workers=after[key].workers))
    assert as_html(again) == as_html(msgspec.structs.replace(found, tensors=again.tensors))


def test_a_fleet_reads_back_but_for_what_was_left_out(tmp_path: Path) -> None:
    found = many(80, 3, wrong=ODD, apart=True)
    (tmp_path / "report.json").write_bytes(as_bytes(found))
    again, _ = read_comparison(tmp_path)
    assert again.workers == found.workers
    assert again.findings == found.findings
    assert [row.status for tensor in again.tensors for _, row in tensor.by_worker()].count("within") == 3 * 640
    assert printed(again).splitlines()[:8] == printed(found).splitlines()[:8]
    assert again.captures == found.captures
    status = of_file(tmp_path / "report.json")
    devices = [[(one.name, one.uuid, one.verdict) for one in of.devices] for of in (status, of_comparison(found))]
    assert devices[0] == devices[1]


def test_names_within_ranges_are_redacted(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_bytes(as_bytes(many(9, 1, wrong=ODD)))
    found, _ = read_redacted(tmp_path)
    for content in (as_bytes(found), as_html(found).encode()):
        assert b"node-" not in content
        assert b"GPU-0000" not in content
        assert b"/data/fleet" not in content
    assert len(found.workers) == 72
    assert found.findings[0].workers == (found.workers[11].name,)


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(table: dict[str, Any]) -> None:
        *above, last = path.split(".")
        into: Any = table
        for part in above:
            into = into[int(part) if part.isdecimal() else part]
        into[int(last) if last.isdecimal() else last] = value

    return apply


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (change("outcomes.0.cohort", 99), "there is no cohort 99"),
        (change("outcomes.0.cohort", -1), "there is no cohort -1"),
        (change("cohorts.0.count", 3), "a cohort of 3 names"),
        (change("cohorts.0.workers", ["a[0-99999999]"]), "more than"),
        (change("cohorts.0", {"number": 0, "workers": [], "count": 0}), "a cohort of no worker"),
        (change("cohorts.0", {"number": 0, "workers": ["x"], "count": 1}), "none of the report's: x"),
        (change("findings.0.workers", ["@99"]), "there is no cohort 99"),
        (change("environments", []), "node-0000:cuda:0"),
        (change("outcomes.1.cohort", 0), "a worker with two outcomes"),
        (change("outcomes.0.status", "fine"), "Invalid enum value"),
        (change("schema", "consistency.report/3"), "unsupported report schema"),
    ],
)
def test_a_damaged_report_is_refused(damage: Callable[[dict[str, Any]], None], reason: str, tmp_path: Path) -> None:
    table = json.loads(as_bytes(many(9, 2, wrong=ODD)))
    damage(table)
    (tmp_path / "report.json").write_text(json.dumps(table))
    with pytest.raises(UsageError, match=reason):
        read_comparison(tmp_path)
