"""Confine a stage that raises to itself.

Its error is recorded in its place. The model is restored, or the stages that need it record what could not be.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import torch

from consistency.capture.names import RAISED, WHOLE_MODEL
from consistency.capture.records import TensorRecord
from consistency.case.stage import StageSpec
from consistency.errors import ConsistencyError, first_line
from consistency.numerics.digest import TensorDigest, digest
from consistency.numerics.identity import start_of
from consistency.worker.context import Context
from consistency.worker.device_error import Trouble, device_error, ends_the_worker
from consistency.worker.model.structure import Structure
from consistency.worker.quantized.held import is_composite
from consistency.worker.recorder import Recorder


def is_of_a_stage(error: Exception, device: torch.device) -> bool:
    """Report whether an error is of a stage's code alone, so that the worker can go on.

    Invalid input, a full disk, and a failure of the device or its memory concern more than the stage.
    """
    return not isinstance(error, (ConsistencyError, OSError)) and ends_the_worker(error, device) is None


def stated(error: BaseException) -> str:
    """Return a sentence on an error: its first line, the place where it was raised, and its meaning if known.

    The place has no folders that differ by machine: `ValueError: no (in forward, llama/modeling_llama.py:12)`.
    """
    frames, reported = traceback.extract_tb(error.__traceback__), device_error(error)
    sentence = first_line(error)
    if frames:
        file = "/".join(Path(frames[-1].filename).parts[-2:])
        sentence += f" (in {frames[-1].name}, {file}:{frames[-1].lineno})"
    if reported is None:
        return sentence
    if reported.trouble is not Trouble.OPERATION:  # of this worker's own device it would have ended the worker
        return f"{sentence}: another device than this worker's fails, and its own worker says why"
    return f"{sentence}: {reported.meaning}" if reported.meaning else sentence


def record_blocked(record: Recorder, spec: StageSpec, reason: str, *, raised: str) -> None:
    """Record in the place of a stage's rows why the stage ended before it was done, or could not begin."""
    row = TensorRecord(
        spec.stage, WHOLE_MODEL, spec.whole, status="blocked", rule=spec.rule, reason=reason, evidence={RAISED: raised}
    )
    record.write(row)


class Unchanged:
    """The state that every stage has to leave a loaded model in: its structure, and the digests of its tensors.

    Parameters
    ----------
    of_base : mapping of str to TensorDigest
        Digests of the base's tensors now, by name, as far as they are known.
    """

    def __init__(self, context: Context, of_base: Mapping[str, TensorDigest]) -> None:
        self._context = context
        self._structure = Structure(context.model)
        self._of_base = of_base
        base_addresses = context.base.addresses()
        model = context.model
        self._of_adapter: dict[str, tuple[torch.Tensor, str]] = {}
        """Tensors of the adapter, each with its digest, by name."""
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            has_bytes = not tensor.is_meta and tensor.layout is torch.strided and not is_composite(tensor)
            if has_bytes and start_of(tensor) not in base_addresses:
                self._of_adapter[name] = tensor, digest(tensor).value

    def restore(self) -> str:
        """Put the structure back; return what cannot be put back, such as the first tensor with other bytes, or ''."""
        if not self._structure.restore():
            return "its tensors no longer have the shape, dtype or memory that they had"
        for name, (tensor, before) in self._of_adapter.items():
            if digest(tensor).value != before:
                return f"{name} has other bytes"
        for name, tensor in self._context.base.on_device():
            expected = self._of_base.get(name)
            if expected is not None and digest(tensor).value != expected.value:
                return f"{name} has other bytes"
        return ""
