"""The test items of the stage `merged`, from headers alone. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

from consistency.capture.names import DELTA, SAFE_WEIGHT, WEIGHT, adapter_place, is_method_tensor
from consistency.capture.names_in_files import adapter, expected
from consistency.case.case import Case


def merged_items(case: Case) -> Iterator[tuple[str, str]]:
    """Yield layer and tensor of the stage `merged`."""
    layers = dict.fromkeys(adapter_place(key)[0] for key in adapter(case)[1] if is_method_tensor(key))
    layers |= dict.fromkeys(layer for layer, _ in expected(case))
    tensors = (DELTA, WEIGHT, SAFE_WEIGHT) if case.plan.safe_merge else (DELTA, WEIGHT)
    for layer in layers:
        for tensor in tensors:
            yield layer, tensor
