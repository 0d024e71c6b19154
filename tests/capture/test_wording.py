"""Counts, lists of names and sizes, as reasons and findings write them."""

from __future__ import annotations

import pytest

from consistency.capture.wording import counted, listed, shortened, size, some


@pytest.mark.parametrize("number", range(1, 30))
@pytest.mark.parametrize("most", [2, 4, 6, 8])
def test_names_and_those_left_out_add_up(number: int, most: int) -> None:
    names = [f"cuda:{i}" for i in range(number)]
    texts = shortened(names, most)
    assert len(texts) <= most
    if number <= most:
        assert texts == names
    else:
        *few, last = texts
        assert few == names[: most - 1]
        assert last == f"and {number - len(few)} more"
        assert number - len(few) >= 2


def test_a_list_reads_as_a_sentence() -> None:
    names = list("abcdefg")
    assert some(names[:6]) == "a, b, c, d, e, f"
    assert some(names) == "a, b, c, d, e and 2 more"
    assert some(names, 3) == "a, b and 5 more"
    assert some([]) == ""
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"


def test_counts_take_the_plural() -> None:
    assert [counted(n, "tensor") for n in (0, 1, 2)] == ["0 tensors", "1 tensor", "2 tensors"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (150 << 10, "150 KiB"), (3 << 29, "1.5 GiB")],
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text
