"""The stage `transfer` again, as a soak repeats it."""

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
from consistency.stages.transfer.worker import Copies
from consistency.worker.context import Machine
from consistency.worker.ledger import Again, Ledger
from consistency.worker.recorder import Recorder


def transfer(context: Machine, ledger: Ledger) -> Again:
    """Return what makes every copy again, with the same bytes."""

    def again() -> Iterator[None]:
        copies = Copies(context.job, _Deliveries(context.record, ledger))
        for source, destination in copies.pairs():
            if context.record.wants(standard.TRANSFER, pair_name(source.name, destination.name)):
                copies.pair(source, destination)
                yield
        copies.end()

    return again


class _Deliveries(Recorder):
    """A recorder that shows the rows of the stage to the ledger, and writes none."""

    def __init__(self, record: Recorder, ledger: Ledger) -> None:
        self._worker_record = record
        self._ledger = ledger

    def wants(self, stage: str, layer: str) -> bool:
        return self._worker_record.wants(stage, layer)

    def write(self, record: TensorRecord) -> None:
        """Show a copy that arrived to the ledger; raise where one fails that was possible in the first run."""
        if record.digest is not None:
            self._ledger.see(record.key, TensorDigest(value=record.digest, blocks=()))
        elif record.status == "missing" and self._ledger.knows(record.key):
            raise RuntimeError(f"{' '.join(record.key)}: {record.reason}")

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
        """Show a copy that did not arrive to the ledger."""
        assert row.digest is not None
        assert row.reference_digest is not None
        # a device that could be filled and read in the first run has no row of that there
        self._ledger.learn(row.key, row.reference_digest)
        arrived = TensorDigest(value=row.digest, blocks=())
        self._ledger.see(row.key, arrived, held=actual, expected=lambda: expected)
