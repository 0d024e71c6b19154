"""The test items of the stage `forward`, from headers alone. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from consistency.capture.names import (
    ADAPTER_MERGED,
    ADAPTER_OFF,
    ADAPTER_ON,
    END_TO_END,
    adapter_place,
    is_method_tensor,
)
from consistency.capture.names_in_files import adapter, base_tensors, in_model
from consistency.case.case import Case
from consistency.case.checkpoint import read_json
from consistency.case.quantized import weights_of

_BLOCK = re.compile(r"(?P<block>.*?\.\d+)(?:\.(?P<part>[^.]+))?")
_WITH_LOGITS = re.compile(r"For(CausalLM|MaskedLM)$|LMHeadModel$")


def forward_items(case: Case) -> Iterator[tuple[str, str]]:
    """Yield layer and tensor of the stage `forward`: blocks and their modules, by the names of the base's weights."""
    # a base that a function makes has no files to read names from
    if case.factory is not None:
        return
    config = read_json(Path(case.base) / "config.json")
    modules = {name.rpartition(".")[0]: None for name in weights_of(base_tensors(case))}
    adapted = (adapter_place(key)[0] for key in adapter(case)[1] if is_method_tensor(key))
    layers: dict[str, None] = {}
    for module in in_model(modules, adapted):
        match = _BLOCK.match(module)
        if match is not None:
            layers |= dict.fromkeys([match["block"], match[0]])
    modes = (ADAPTER_ON, ADAPTER_OFF, ADAPTER_MERGED) if case.adapter else (ADAPTER_OFF,)
    for layer in layers:
        for mode in modes:
            yield layer, mode
    if any(_WITH_LOGITS.search(str(name)) for name in config.get("architectures") or ()):
        for mode in modes:
            yield "logits", mode
            yield "logits", f"{mode}.{END_TO_END}"
