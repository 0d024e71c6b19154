"""The test items of the stage `base`, from headers alone. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

from consistency.capture.names import split_name
from consistency.capture.names_in_files import base_tensors
from consistency.case.case import Case
from consistency.case.quantized import states_settings


def base_items(case: Case) -> Iterator[tuple[str, str]]:
    """Yield layer and tensor of the stage `base`."""
    yield from (split_name(name) for name in base_tensors(case) if not states_settings(name))
