"""Every format of a few reports is what it was: a change of one is seen in all."""

from __future__ import annotations

import pytest

from tests.golden.rendered import FILES, rendered

TEXTS = rendered()


@pytest.mark.parametrize("name", TEXTS)
def test_a_format_is_as_it_was(name: str) -> None:
    wanted = (FILES / name).read_text(encoding="utf-8")
    assert TEXTS[name] == wanted, "if that is meant: python -m tests.golden.rendered"


def test_no_golden_file_is_left_over() -> None:
    assert {path.name for path in FILES.iterdir()} == set(TEXTS)
