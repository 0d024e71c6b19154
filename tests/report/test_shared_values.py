"""What tables share is written once, and every table comes back as it was."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from consistency.report.shared_values import beside, joined, shared_by

tables = st.lists(
    st.fixed_dictionaries(
        {
            "torch": st.sampled_from(["1", "2"]),
            "one": st.sampled_from([1, True, 1.0, None, float("nan")]),
            "variables": st.dictionaries(st.sampled_from("xyz"), st.dictionaries(st.sampled_from("ab"), st.booleans())),
        },
        optional={"own": st.integers(0, 9), "either": st.one_of(st.just({}), st.just({"x": 1}), st.none())},
    ),
    max_size=6,
)


@given(tables)
def test_every_table_comes_back(found: list[dict[str, Any]]) -> None:
    shared = shared_by(found)
    assert [repr(_sorted(joined(shared, beside(table, shared)))) for table in found] == [
        repr(_sorted(table)) for table in found
    ]


def test_what_is_shared_stands_once() -> None:
    found = [{"torch": "2", "variables": {"VISIBLE": str(n), "ORDER": "pci"}} for n in range(9)]
    shared = shared_by(found)
    assert shared == {"torch": "2", "variables": {"ORDER": "pci"}}
    assert beside(found[3], shared) == {"variables": {"VISIBLE": "3"}}


def test_one_table_shares_all_of_it() -> None:
    assert beside({"a": {"b": 1}}, shared_by([{"a": {"b": 1}}])) == {}
    assert shared_by([]) == {}


def _sorted(table: Any) -> Any:
    return {name: _sorted(table[name]) for name in sorted(table)} if isinstance(table, dict) else table
