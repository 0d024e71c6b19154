"""The harness that runs old and new code on the same inputs: what it keeps tells changes apart."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from consistency.cli.main import build_parser
from tests.golden.side_by_side import _kept, builtin_cases, differences, drill, nights
from tests.report.made_comparisons import faulty


def test_what_is_kept_of_a_report_tells_a_change() -> None:
    found = faulty()
    assert list(differences(_kept(found), _kept(found))) == []
    for changes in ({"verdict": "incomplete"}, {"findings": ()}, {"tensors": found.tensors[1:]}):
        assert list(differences(_kept(found), _kept(msgspec.structs.replace(found, **changes))))
    row = msgspec.structs.replace(found.tensors[0].outcomes[0], max_ulp=77)
    tensor = msgspec.structs.replace(found.tensors[0], outcomes=(row, *found.tensors[0].outcomes[1:]))
    other = msgspec.structs.replace(found, tensors=(tensor, *found.tensors[1:]))
    assert "77" in next(differences(_kept(found), _kept(other)))


def test_an_input_that_one_of_both_lacks_is_told() -> None:
    assert list(differences({"a": 1}, {"b": 1})) == ["a: only before", "b: only after"]


@pytest.mark.parametrize("inputs", [builtin_cases, nights, drill])
def test_every_command_is_one(inputs: object, tmp_path: Path) -> None:
    assert callable(inputs)
    for _, words in inputs(tmp_path):
        build_parser().parse_args([str(word) for word in words])
