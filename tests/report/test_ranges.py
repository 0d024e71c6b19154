"""Names folded to ranges are the same names again, in the same order."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from consistency.report.ranges import MOST_NAMES, folded, unfolded

devices = st.builds(
    "{}{:0{}}:{}:{}".format,
    st.sampled_from(["node-", "rack-2-gpu", "[a]", "", "x[1-3]", "é"]),
    st.integers(0, 130),
    st.integers(1, 3),
    st.sampled_from(["cuda", "cpu@avx2", "npu[", "a,b"]),
    st.integers(0, 12),
)


@pytest.mark.slow
@given(st.lists(st.one_of(devices, st.text(max_size=8)), max_size=40))
@example(["node-009:cuda:0", "node-010:cuda:0", "node-10:cuda:0", "node-11:cuda:0"])
@example(["a٣", "a٤"])
def test_what_was_folded_unfolds_to_itself(names: list[str]) -> None:
    assert list(unfolded(folded(names))) == names


def test_a_fleet_is_one_pattern() -> None:
    names = [f"gpu{node:03}:cuda:{device}" for node in range(1, 129) for device in range(8)]
    assert folded(names) == ["gpu[001-128]:cuda:[0-7]"]
    names.remove("gpu017:cuda:3")
    assert folded(names) == ["gpu[001-016]:cuda:[0-7]", "gpu017:cuda:[0-2,4-7]", "gpu[018-128]:cuda:[0-7]"]


def test_every_number_of_a_name_may_run() -> None:
    names = [f"rack-{r}-node-{n}:cuda:{d}" for r in (1, 2, 4) for n in range(8, 12) for d in (0, 2)]
    assert folded(names) == ["rack-[1-2,4]-node-[8-11]:cuda:[0,2]"]


@pytest.mark.parametrize("patterns", [[f"a[0-{10**9}]"], ["a[0-999][0-999]", "b"], [f"a[0-{MOST_NAMES}]"]])
def test_a_stranger_cannot_fill_the_memory(patterns: list[str]) -> None:
    with pytest.raises(ValueError, match="more than"):
        list(unfolded(patterns))
