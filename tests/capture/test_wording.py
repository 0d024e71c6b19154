"""Counts, lists of names and sizes, as reasons and findings write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consistency.capture.wording import and_more, counted, layers_text, listed, numbers_text, shortened, size, some


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


@given(st.integers(max_value=10_000), st.sampled_from(["", "finding"]))
def test_nothing_is_left_out_where_none_is(left_out: int, what: str) -> None:
    text = and_more(left_out, what)
    assert bool(text) == (left_out > 0)
    assert "-" not in text
    assert not text.startswith("and 0")
    if text:
        assert text == f"and {left_out} more{what and f' {what}'}{'s' if what and left_out != 1 else ''}"


@given(st.lists(st.text("ab", max_size=2)), st.integers(2, 9))
def test_every_name_is_shown_or_counted(names: list[str], most: int) -> None:
    """Whatever the names: those of seven and eight workers are no special numbers."""
    distinct = list(dict.fromkeys(names))
    shown = shortened(distinct, most)
    left = int(shown[-1].split()[1]) if len(distinct) > most else 0
    assert len(shown) - (left > 0) + left == len(distinct)
    assert some(names, most).count(" more") == (left > 0)


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


@given(st.sets(st.integers(0, 40)))
def test_ranges_stand_for_the_same_numbers(numbers: set[int]) -> None:
    text = numbers_text(numbers)
    unfolded: list[int] = []
    for part in text.split(", ") if text else []:
        first, _, last = part.partition("-")
        unfolded += range(int(first), int(last or first) + 1)
    assert unfolded == sorted(numbers)


def test_layers_by_kind_and_block() -> None:
    names = [f"model.layers.{n}.mlp.{kind}" for n in (0, 1, 2, 5, 7, 8) for kind in ("up_proj", "down_proj")]
    assert layers_text(names) == "up_proj, down_proj in layers 0-2, 5, 7-8"
    assert layers_text(["lm_head"]) == "lm_head"
