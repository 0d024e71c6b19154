"""The test items of the stage `adapter`, from headers alone. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

from consistency.capture.names import LOADED_AGAIN, RANK_AND_SCALING, SETTINGS_LAYER, adapter_place
from consistency.capture.names_in_files import adapter, expected
from consistency.case.case import Case


def adapter_items(case: Case) -> Iterator[tuple[str, str]]:
    """Yield layer and tensor of the stage `adapter`."""
    yield from (adapter_place(key) for key in adapter(case)[1])
    yield from expected(case)
    yield SETTINGS_LAYER, RANK_AND_SCALING
    if case.reloads:
        yield SETTINGS_LAYER, LOADED_AGAIN
