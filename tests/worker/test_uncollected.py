"""The collector is held back while libraries are imported, and is as it was afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from consistency.worker.uncollected import uncollected


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    yield
    if not frozen:  # what the imports of these tests made stays frozen
        gc.unfreeze()
    (gc.enable if enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled() is enabled


def test_what_was_made_meanwhile_is_not_visited_again() -> None:
    before = gc.get_freeze_count()
    with uncollected():
        made = [[] for _ in range(100)]  # type: list[list[int]]
    assert gc.get_freeze_count() - before > len(made)
    assert not any(one is made for one in gc.get_objects())


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    gc.enable()
    with pytest.raises(ImportError), uncollected():
        raise ImportError
    assert gc.isenabled()
