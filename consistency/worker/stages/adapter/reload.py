"""Load the adapter again over poison: a copy that never arrives cannot look right by chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from consistency.capture.names import LOADED_AGAIN, SETTINGS_LAYER
from consistency.errors import first_line
from consistency.numerics.digest import digest
from consistency.worker.model.loading import ADAPTER_NAME, UNUSABLE
from consistency.worker.model.poison import as_it_was, poison
from consistency.worker.stages.adapter.load_paths import refusal
from consistency.worker.stages.context import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """The results of later loads of the adapter's file for one parameter."""

    digests: tuple[str, ...] = ()
    """One per load."""
    wrong: torch.Tensor | None = None
    """The first that differs from the first load of all, on the CPU."""


def reload(context: Context, state: dict[str, Any]) -> dict[str, Loads]:
    """Load the adapter again under the same name, over parameters filled with NaN, and return the results by name.

    The parameters are left as the first load set them.
    """
    names = [n for n in context.expected if n in state and state[n].is_floating_point() and not state[n].is_meta]
    right = {name: digest(state[name]).value for name in names}
    found = dict.fromkeys(names, Loads())
    with as_it_was(context.model, set(names)) as held:
        for _ in range(max(1, context.job.case.repeat - 1)):
            poison(held.values())
            try:
                context.model.load_adapter(context.job.case.adapter, ADAPTER_NAME)  # type: ignore[operator]
            except UNUSABLE as error:
                raise refusal(context, error, f"PEFT cannot load this adapter twice: {first_line(error)}") from error
            for name, before in found.items():
                value, wrong = digest(state[name]).value, before.wrong
                if wrong is None and value != right[name]:
                    wrong = state[name].detach().to("cpu", copy=True)
                found[name] = Loads(digests=(*before.digests, value), wrong=wrong)
    if context.record.wants("adapter", SETTINGS_LAYER):
        done = torch.ones((), dtype=torch.uint8)
        context.record.computed("adapter", SETTINGS_LAYER, LOADED_AGAIN, actual=done, digests=[digest(done)])
    return found
