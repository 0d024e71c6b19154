"""The stage `operators` again, in a soak."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from consistency.case import standard
from consistency.stages.operators import worker as of_operators
from consistency.stages.operators.table import Operation, operations
from consistency.worker.context import Machine
from consistency.worker.ledger import Again, Ledger
from consistency.worker.recorder import KEEP_BYTES


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
