"""The stage `operators` again, as a soak repeats it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from consistency.case import standard
from consistency.stages.operators import worker as of_operators
from consistency.stages.operators.model_shapes import operations_of
from consistency.stages.operators.table import Operation, operations
from consistency.worker.context import Machine
from consistency.worker.ledger import Again, Ledger
from consistency.worker.recorder import KEEP_BYTES


def operators(context: Machine, ledger: Ledger) -> Again:
    """Return what computes every operation again on the same inputs.

    The inputs stay on the device as far as they are small together.
    """
    recorded = [*_recorded_operations(context, ledger)]
    kept_inputs: dict[tuple[str, str], list[torch.Tensor]] = {}
    # on the CPU the first run has computed from NumPy's memory, which is aligned otherwise
    own = context.device.type == "cpu"

    def inputs_on_device(operation: Operation, dtype: str) -> list[torch.Tensor]:
        key = (operation.name, operation.row(dtype))
        if key in kept_inputs:
            return kept_inputs[key]
        host = [of_operators.given(values, dtype) for values in operation.inputs()]
        inputs = [tensor.to(context.device, copy=True) for tensor in host]
        kept_bytes = sum(_count_bytes(tensors) for tensors in kept_inputs.values())
        if _count_bytes(inputs) + kept_bytes <= KEEP_BYTES:
            kept_inputs[key] = inputs
        return inputs

    def again() -> Iterator[None]:
        for operation, dtype in recorded:
            result = of_operators.compute(operation, inputs_on_device(operation, dtype))
            ledger.see((standard.OPERATORS, operation.name, operation.row(dtype)), result, own=own)
            yield

    return again


def _recorded_operations(context: Machine, ledger: Ledger) -> Iterator[tuple[Operation, str]]:
    """Yield the operations that the stage has recorded, in each dtype."""
    case = context.job.case
    for operation in (*operations(case.level), *operations_of(case)):
        for dtype in operation.dtypes:
            if ledger.knows((standard.OPERATORS, operation.name, operation.row(dtype))):
                yield operation, dtype


def _count_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
