"""A stage that raises loses itself and no more.

Its error is recorded in its place. The model is as it was before, or the stages that need it say what is not.
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
    """Report whether an error is that of a stage's code alone, so that the worker can go on.

    It is not where the input is invalid, where a disk is full, and where the device or its memory fails.
    """
    return not isinstance(error, (ConsistencyError, OSError)) and ends_the_worker(error, device) is None


def stated(error: BaseException) -> str:
    """Return the first line of an error, where it was raised, without folders that differ by machine, and a meaning."""
    frames, said = traceback.extract_tb(error.__traceback__), device_error(error)
    found = first_line(error)
    if frames:
        found += f" (in {frames[-1].name}, {'/'.join(Path(frames[-1].filename).parts[-2:])}:{frames[-1].lineno})"
    if said is not None and said.trouble is not Trouble.OPERATION:  # else the worker would have ended
        return f"{found}: another device than this worker's fails, whose own worker says what it means"
    return f"{found}: {said.meaning}" if said is not None and said.meaning else found


def record_blocked(record: Recorder, spec: StageSpec, reason: str, *, raised: str) -> None:
    """Record why a stage ended before it was done, or could not begin, in the place of what it would have recorded."""
    row = TensorRecord(
        spec.stage, WHOLE_MODEL, spec.whole, status="blocked", rule=spec.rule, reason=reason, evidence={RAISED: raised}
    )
    record.write(row)


class Unchanged:
    """A loaded model as no stage may leave it otherwise: its structure, and the digests of its tensors.

    Parameters
    ----------
    of_base : mapping of str to TensorDigest
        What the base's tensors have now, by name, as far as that is known.
    """

    def __init__(self, context: Context, of_base: Mapping[str, TensorDigest]) -> None:
        self._context = context
        self._structure = Structure(context.model)
        self._of_base = of_base
        known = context.base.addresses()
        model = context.model
        self._of_adapter = {
            name: (tensor, digest(tensor).value)
            for name, tensor in chain(model.named_parameters(), model.named_buffers())
            if not tensor.is_meta and tensor.layout is torch.strided and not is_composite(tensor)
            if start_of(tensor) not in known
        }

    def restore(self) -> str:
        """Put the structure back; return what cannot be: the first tensor with other bytes, or nothing."""
        if not self._structure.restore():
            return "its tensors no longer have the shape, dtype or memory that they had"
        for name, (tensor, before) in self._of_adapter.items():
            if digest(tensor).value != before:
                return f"{name} has other bytes"
        for name, tensor in self._context.base.on_device():
            before_stage = self._of_base.get(name)
            if before_stage is not None and digest(tensor).value != before_stage.value:
                return f"{name} has other bytes"
        return ""
