"""Load the adapter again over poison: a copy that never arrives cannot look right by luck."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from consistency.capture.names import LOADED_AGAIN, SETTINGS_LAYER
from consistency.numerics.digest import digest
from consistency.numerics.rules import Rule
from consistency.worker.memory.host_memory import is_out_of_memory
from consistency.worker.model.loading import ADAPTER_NAME
from consistency.worker.stages.context import Context

POISON = {1: 0x7F, 2: 0x7FCB, 4: 0x7FC0FFEE, 8: 0x7FF8C0FFEE15DEAD}
"""Bits of a NaN by size in bytes, in float8_e4m3fn, float8_e5m2 and every longer format; no computation makes these
payloads."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """What later loads of the adapter's file gave of one parameter.

    Attributes
    ----------
    digests : tuple of str
        One per load.
    wrong : torch.Tensor or None
        The first that was not what the first load of all gave, on the CPU.
    """

    digests: tuple[str, ...] = ()
    wrong: torch.Tensor | None = None


def reload(context: Context, state: dict[str, Any]) -> dict[str, Loads]:
    """Load the adapter again under the same name, over parameters filled with NaN, and return what that gives, by name.

    The parameters are left as the first load gave them.
    """
    names = [n for n in context.expected if n in state and state[n].is_floating_point() and not state[n].is_meta]
    saved = {n: state[n].detach().clone() for n in names}
    found: dict[str, Loads] = {}
    for _ in range(max(1, context.job.case.repeat - 1)):
        poison(state[name] for name in names)
        try:
            context.model.load_adapter(context.job.case.adapter, ADAPTER_NAME)  # type: ignore[operator]
        except (RuntimeError, ValueError, KeyError, IndexError, TypeError) as error:
            _restore(state, saved)
            if is_out_of_memory(error):  # torch's is a RuntimeError
                raise
            if not context.record.wants("adapter", SETTINGS_LAYER):
                return {}
            context.record.absent(
                stage="adapter", layer=SETTINGS_LAYER, tensor=LOADED_AGAIN, status="skipped",
                reason=f"PEFT cannot load this adapter twice: {type(error).__name__}: {error}",
            )  # fmt: skip
            return {}
        except BaseException:  # out of memory, stopped: whoever goes on from here must not meet the poison
            _restore(state, saved)
            raise
        for name in names:
            before, value = found.get(name, Loads()), digest(state[name]).value
            wrong = before.wrong
            if wrong is None and value != digest(saved[name]).value:
                wrong = state[name].detach().to("cpu", copy=True)
            found[name] = Loads(digests=(*before.digests, value), wrong=wrong)
    _restore(state, saved)
    if not context.record.wants("adapter", SETTINGS_LAYER):
        return found
    done = torch.ones((), dtype=torch.uint8)
    context.record.computed(
        stage="adapter", layer=SETTINGS_LAYER, tensor=LOADED_AGAIN, actual=done, rule=Rule.PEER, found=None,
        status="measured", diagnosis=None, digests=[digest(done)],
    )  # fmt: skip
    return found


def poison(tensors: Iterable[torch.Tensor]) -> None:
    """Fill tensors of numbers with NaN of a payload that no computation makes."""
    with torch.no_grad():
        for tensor in tensors:
            data = tensor.data
            data.view(_INTEGERS[data.element_size()]).fill_(POISON[data.element_size()])


def _restore(state: dict[str, Any], saved: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in saved.items():
            state[name].copy_(tensor)
