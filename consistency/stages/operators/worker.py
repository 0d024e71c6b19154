"""Stage `operators`: a fixed list of small operations on this device, each against its float64 value.

It needs no model: what differs here is the device, its driver or its libraries. Each operation has a derived bound
(`table`, `consistency.numerics.running_error`), which a user's tolerance replaces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from consistency.capture.records import RecordStatus
from consistency.case.stage import Level
from consistency.devices.backends import backend_of
from consistency.devices.products import Products
from consistency.errors import first_line
from consistency.numerics.digest import digest
from consistency.numerics.dtype import name_of, named
from consistency.numerics.measure import Measure
from consistency.numerics.precision import Precision
from consistency.numerics.running_error import Arithmetic, Tracked, measure_tracked
from consistency.stages.operators.table import Operation, operations
from consistency.worker.attention_kernels import AttentionKernels
from consistency.worker.context import Machine
from consistency.worker.device_error import ends_the_worker
from consistency.worker.judging.bound_rule import record_bounded
from consistency.worker.precision import products_of
from consistency.worker.protocol import EventLog
from consistency.worker.recorder import Recorder

_STAGE = "operators"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """What is tried, and how."""

    device: torch.device
    products: Products = Products()
    """What the settings in force permit on the device."""
    level: Level = Level.STANDARD
    repeat: int = 1
    """How often each operation is run."""

    def arithmetic(self, operation: Operation, dtype: torch.dtype, *, tf32: bool = False) -> Arithmetic:
        """Return how the device may compute in a dtype; `tf32`: as if its float32 products ran in TF32."""
        permitted = self.products.convolution if operation.name.startswith("conv") else self.products.matmul
        return Arithmetic.of(
            dtype,
            truncating=self.device.type != "cpu",
            products=Precision.TF32 if tf32 else permitted,
            partial_terms=self.products.partial_terms.get(name_of(dtype)),
            steps=backend_of(self.device.type).rounds_each_step,
        )


def run(context: Machine) -> None:
    """Record every operation of the level in every dtype."""
    job = context.job
    permitted = products_of(context.device)
    trials = Trials(device=context.device, products=permitted, level=job.case.level, repeat=job.case.repeat)
    try_all(trials, context.record, context.events)


def try_all(trials: Trials, record: Recorder, events: EventLog) -> None:
    """Record every operation of the level in every dtype."""
    wanted = [operation for operation in operations(trials.level) if record.wants(_STAGE, operation.name)]
    missing: dict[str, str] = {}
    for done, operation in enumerate(wanted):
        events.step(f"{operation.name} {operation.size}", done, len(wanted))
        for dtype in operation.dtypes:
            if dtype not in missing:
                missing[dtype] = _why_not(trials.device, dtype)
            reason = missing[dtype] or _composed(trials.device, operation, dtype)
            if reason:
                _absent(record, operation, dtype, "skipped", reason)
                continue
            with record.operations.apart():
                _look(trials, record, operation, dtype)


def compute(operation: Operation, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Do one operation on the device of its inputs."""
    with torch.no_grad():
        return operation.compute(*inputs)


def _look(trials: Trials, record: Recorder, operation: Operation, dtype: str) -> None:
    host = [given(values, dtype) for values in operation.inputs()]
    attention = AttentionKernels()
    try:
        inputs = [tensor.to(trials.device) for tensor in host]
        with attention:
            results = [compute(operation, inputs) for _ in range(trials.repeat)]
        actual = results[0].to("cpu")
    except (NotImplementedError, AttributeError) as error:  # no kernel for this dtype, or no such function yet
        _absent(record, operation, dtype, "skipped", f"no {operation.name} on this device: {first_line(error)}")
        return
    except RuntimeError as error:
        if ends_the_worker(error, trials.device):
            raise
        _absent(record, operation, dtype, "missing", f"it failed: {first_line(error)}")
        return
    if why := attention.missed():
        _absent(record, operation, dtype, "skipped", why)
        return
    by = trials.arithmetic(operation, named(dtype))
    exact = _exact(operation, host, by)
    if tuple(actual.shape) != exact.value.shape:
        reason = f"the result has shape {tuple(actual.shape)}, wanted {exact.value.shape}"
        _absent(record, operation, dtype, "missing", reason)
        return
    if (by.partial_terms is not None or by.steps) and not np.any(exact.allowed < np.abs(exact.value)):
        sums = f"{'sums are added up' if by.steps else 'partial sums may be stored'} in {dtype}"
        reason = f"{sums}: the bound of so long a sum would let a tensor of zeros pass"
        _absent(record, operation, dtype, "skipped", reason)
        return
    tf32 = operation.multiplies and dtype == "float32" and by.products is Precision.FLOAT32
    record_bounded(
        record,
        _STAGE,
        operation.name,
        operation.row(dtype),
        actual=actual,
        exact=exact,
        digests=[digest(result) for result in results],
        in_tf32=(lambda: _in_tf32(trials, operation, host, actual)) if tf32 else None,
    )


def given(values: np.ndarray, dtype: str) -> torch.Tensor:
    """Return an operand as the device is given it, on the CPU."""
    return torch.from_numpy(values) if values.dtype.kind == "i" else torch.from_numpy(values).to(named(dtype))


def _exact(operation: Operation, host: Sequence[torch.Tensor], by: Arithmetic) -> Tracked:
    """Return the exact result for the values that the device is given."""

    def known() -> Iterator[Tracked | np.ndarray]:
        for tensor in host:
            yield by.known(tensor.to(torch.float64).numpy()) if tensor.is_floating_point() else tensor.numpy()

    return operation.exact(*known())


def _in_tf32(trials: Trials, operation: Operation, host: Sequence[torch.Tensor], actual: torch.Tensor) -> Measure:
    return measure_tracked(actual, _exact(operation, host, trials.arithmetic(operation, torch.float32, tf32=True)))


def _why_not(device: torch.device, dtype: str) -> str:
    """Return why a device lacks a dtype, nothing where it has it; every device has float32."""
    if dtype == "float32":
        return ""
    try:
        one = torch.ones(2, dtype=named(dtype)).to(device)
        (one + one).to("cpu")
    except (TypeError, RuntimeError) as error:
        if ends_the_worker(error, device):
            raise
        return f"no {dtype} on this device: {first_line(error)}"
    return ""


def _composed(device: torch.device, operation: Operation, dtype: str) -> str:
    """Return why an operation is skipped: the backend composes it of several, and rounds to a half type in between."""
    if operation.kernel is None or dtype not in ("bfloat16", "float16"):
        return ""
    key = torch._C._dispatch_key_for_device(device.type)
    if torch._C._dispatch_has_kernel_for_dispatch_key(operation.kernel, key):
        return ""
    return f"{device.type} has no {operation.name} kernel: torch composes one that rounds in between to {dtype}"


def _absent(record: Recorder, operation: Operation, dtype: str, status: RecordStatus, reason: str) -> None:
    record.skipped(
        _STAGE,
        reason,
        operation.row(dtype),
        layer=operation.name,
        status=status,
        dtype=dtype,
        unsupported=status == "skipped",
    )
