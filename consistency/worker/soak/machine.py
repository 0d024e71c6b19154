"""Soak of the stages that need no model: `operators` and `transfer`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from consistency.capture.names import pair_name
from consistency.capture.records import TensorRecord
from consistency.case import standard
from consistency.numerics.diagnosis import Diagnosis
from consistency.numerics.digest import TensorDigest
from consistency.numerics.measure import Measure
from consistency.stages.operators import worker as of_operators
from consistency.stages.operators.table import Operation, operations
from consistency.stages.transfer.worker import Copies
from consistency.worker.context import Machine
from consistency.worker.recorder import KEEP_BYTES, Recorder
from consistency.worker.soak.ledger import Again, Ledger


def operators(context: Machine, ledger: Ledger) -> Again:
    """Do every operation again on the same inputs, which stay on the device as far as they are small together."""
    wanted = [
        (operation, dtype)
        for operation in operations(context.job.case.level)
        for dtype in operation.dtypes
        if ledger.knows((standard.OPERATORS, operation.name, operation.row(dtype)))
    ]
    held: dict[tuple[str, str], list[torch.Tensor]] = {}
    # on the CPU the first run has computed from NumPy's memory, which is aligned otherwise
    own = context.device.type == "cpu"

    def inputs_of(operation: Operation, dtype: str) -> list[torch.Tensor]:
        key = (operation.name, operation.row(dtype))
        if key in held:
            return held[key]
        host = [of_operators.given(values, dtype) for values in operation.inputs()]
        inputs = [tensor.to(context.device, copy=True) for tensor in host]
        size = sum(tensor.nbytes for tensor in inputs)
        if size + sum(tensor.nbytes for tensors in held.values() for tensor in tensors) <= KEEP_BYTES:
            held[key] = inputs
        return inputs

    def again() -> Iterator[None]:
        for operation, dtype in wanted:
            result = of_operators.compute(operation, inputs_of(operation, dtype))
            ledger.see((standard.OPERATORS, operation.name, operation.row(dtype)), result, own=own)
            yield

    return again


def transfer(context: Machine, ledger: Ledger) -> Again:
    """Make every copy again, with the same bytes."""

    def again() -> Iterator[None]:
        copies = Copies(context.job, _Deliveries(context.record, ledger))
        for source, destination in copies.pairs():
            if context.record.wants(standard.TRANSFER, pair_name(source.name, destination.name)):
                copies.pair(source, destination)
                yield
        copies.end()

    return again


class _Deliveries(Recorder):
    """Take the stage's rows, and compare instead of writing them."""

    def __init__(self, record: Recorder, ledger: Ledger) -> None:
        self._of_worker = record
        self._ledger = ledger

    def wants(self, stage: str, layer: str) -> bool:
        return self._of_worker.wants(stage, layer)

    def write(self, record: TensorRecord) -> None:
        if record.digest is not None:
            self._ledger.see(record.key, TensorDigest(value=record.digest, blocks=()))
        elif record.status == "missing" and self._ledger.knows(record.key):
            raise RuntimeError(f"{' '.join(record.key)}: {record.reason}")  # it was possible in the first run

    def differs(
        self,
        row: TensorRecord,
        actual: torch.Tensor,
        expected: torch.Tensor,
        found: Measure | None,  # noqa: ARG002 - the ledger measures what it stores
        diagnosis: Diagnosis,  # noqa: ARG002 - and names it
        *,
        evidence: Mapping[str, Any],  # noqa: ARG002 - as above
        keep: bool,  # noqa: ARG002 - as above
    ) -> None:
        assert row.digest is not None
        assert row.reference_digest is not None
        # a device that could be filled and read in the first run has no row of that there
        self._ledger.learn(row.key, row.reference_digest)
        self._ledger.see(row.key, TensorDigest(value=row.digest, blocks=()), held=actual, expected=lambda: expected)
