"""What things share is written once, and every thing comes back as it was."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consistency.report.fleet.entries import MOST_KINDS, gathered, spread

things = st.lists(
    st.fixed_dictionaries(
        {
            "architecture": st.sampled_from(["a", "b"]),
            "uuid": st.integers(0, 20).map(str),
            "environment": st.fixed_dictionaries(
                {"torch": st.sampled_from(["1", "2"]), "uuid": st.integers(0, 9)},
                optional={"variables": st.dictionaries(st.sampled_from("xyz"), st.integers(0, 9)), "a.b": st.none()},
            ),
        }
    ),
    max_size=20,
)


@given(things, st.sets(st.integers(0, 19)))
def test_every_thing_comes_back(found: list[dict[str, Any]], alone: set[int]) -> None:
    places: dict[int, dict[str, Any]] = {}
    for where, entry in gathered(found, alone=sorted(alone), kinds=("architecture",)):
        places.update(zip(where, spread(entry, len(where)), strict=True))
    assert [places[place] for place in range(len(found))] == found


def test_what_is_shared_stands_once() -> None:
    found = [{"kind": "a", "uuid": f"{n}", "device": f"{n}", "environment": {"x": n, "y": 1}} for n in range(99)]
    ((places, entry),) = gathered(found)
    assert places == list(range(99))
    numbers = list(range(99))
    each = {"uuid": list(map(str, numbers)), "device": "uuid", "environment.x": numbers}
    assert entry == {"kind": "a", "environment": {"y": 1}, "each": each}


def test_few_values_make_kinds_of_things() -> None:
    found = [{"torch": str(n % MOST_KINDS)} for n in range(20)]
    assert [entry for _, entry in gathered(found)] == [{"torch": str(n)} for n in range(MOST_KINDS)]


def test_lists_have_a_value_for_each() -> None:
    with pytest.raises(ValueError, match="uuid has not 3 values"):
        list(spread({"each": {"uuid": ["a"]}}, 3))
