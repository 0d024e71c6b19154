"""Stage `operators`: a fixed list of small operations on this device, each against its float64 value.

It needs no model: what differs here is the device, its driver or its libraries. Each operation has a derived bound
(`table`, `consistency.numerics.running_error`), which a user's tolerance replaces.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from consistency.stages.operators.model_shapes import operations_of
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
    """The device on which operations are tried, and how."""

    device: torch.device
    products: Products = Products()
    """Precisions of products that the settings in force permit on the device."""
    level: Level = Level.STANDARD
    repeat: int = 1
    """How often each operation is run."""

    def arithmetic(self, operation: Operation, dtype: torch.dtype, *, tf32: bool = False) -> Arithmetic:
        """Return how the device may compute in a dtype; `tf32`: as if its float32 products ran in TF32."""
        products = self.products.matmul
        if operation.name.startswith("conv"):
            products = self.products.convolution
        if tf32:
            products = Precision.TF32
        return Arithmetic.of(
            dtype,
            truncating=self.device.type != "cpu",
            products=products,
            partial_terms=self.products.partial_terms.get(name_of(dtype)),
            steps=backend_of(self.device.type).rounds_each_step,
        )


def run(context: Machine) -> None:
    """Record every operation of the level, and those of the model at its shapes."""
    job = context.job
    permitted = products_of(context.device)
    trials = Trials(device=context.device, products=permitted, level=job.case.level, repeat=job.case.repeat)
    try_all(trials, context.record, context.events, of_model=operations_of(job.case))


def try_all(trials: Trials, record: Recorder, events: EventLog, *, of_model: Sequence[Operation] = ()) -> None:
    """Record every operation of the level, and those of the model, in every dtype."""
    all_operations = (*operations(trials.level), *of_model)
    wanted = [operation for operation in all_operations if record.wants(_STAGE, operation.name)]
    missing: dict[str, str] = {}
    for done, operation in enumerate(wanted):
        events.step(f"{operation.name} {operation.size}", done, len(wanted))
        for dtype in operation.dtypes:
            # each dtype is tried once, whatever the number of its operations
            if dtype not in missing:
                missing[dtype] = _why_no_dtype(trials.device, dtype)
            reason = missing[dtype] or _why_composed(trials.device, operation, dtype)
            if reason:
                _record_absent(record, operation, dtype, "skipped", reason)
                continue
            with record.operations.apart():
                _try(trials, record, operation, dtype)


def compute(operation: Operation, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Do one operation on the device of its inputs."""
    with torch.no_grad():
        return operation.compute(*inputs)


def _try(trials: Trials, record: Recorder, operation: Operation, dtype: str) -> None:
    """Run an operation in a dtype on the device, and record its result against the exact one."""
    host = [given(values, dtype) for values in operation.inputs()]
    attention = AttentionKernels()
    try:
        inputs = [tensor.to(trials.device) for tensor in host]
        with attention:
            results = [compute(operation, inputs) for _ in range(trials.repeat)]
        actual = results[0].to("cpu")
    except (NotImplementedError, AttributeError) as error:  # no kernel for this dtype, or no such function yet
        reason = f"no {operation.name} on this device: {first_line(error)}"
        _record_absent(record, operation, dtype, "skipped", reason)
        return
    except RuntimeError as error:
        if ends_the_worker(error, trials.device):
            raise
        _record_absent(record, operation, dtype, "missing", f"it failed: {first_line(error)}")
        return
    if missed := attention.missed():
        _record_absent(record, operation, dtype, "skipped", missed)
        return
    arithmetic = trials.arithmetic(operation, named(dtype))
    exact = _exact(operation, host, arithmetic)
    if tuple(actual.shape) != exact.value.shape:
        reason = f"the result has shape {tuple(actual.shape)}, wanted {exact.value.shape}"
        _record_absent(record, operation, dtype, "missing", reason)
        return
    if zeros_reason := _why_zeros_pass(arithmetic, exact, dtype):
        _record_absent(record, operation, dtype, "skipped", zeros_reason)
        return

    def measure_in_tf32() -> Measure:
        arithmetic_in_tf32 = trials.arithmetic(operation, torch.float32, tf32=True)
        return measure_tracked(actual, _exact(operation, host, arithmetic_in_tf32))

    # an unexpected TF32 is a diagnosis only where the settings do not permit it anyway
    may_be_tf32 = operation.multiplies and dtype == "float32" and arithmetic.products is Precision.FLOAT32
    in_tf32 = measure_in_tf32 if may_be_tf32 else None
    record_bounded(
        record,
        _STAGE,
        operation.name,
        operation.row(dtype),
        actual=actual,
        exact=exact,
        digests=[digest(result) for result in results],
        in_tf32=in_tf32,
    )


def given(values: np.ndarray, dtype: str) -> torch.Tensor:
    """Return an operand as the device is given it, on the CPU; integers keep their dtype."""
    tensor = torch.from_numpy(values)
    return tensor if values.dtype.kind == "i" else tensor.to(named(dtype))


def _exact(operation: Operation, host: Sequence[torch.Tensor], arithmetic: Arithmetic) -> Tracked:
    """Return the exact result for the values that the device is given, with the bound of an arithmetic."""
    operands: list[Tracked | np.ndarray] = []
    for tensor in host:
        if tensor.is_floating_point():
            operands.append(arithmetic.known(tensor.to(torch.float64).numpy()))
        else:
            operands.append(tensor.numpy())
    return operation.exact(*operands)


def _why_zeros_pass(arithmetic: Arithmetic, exact: Tracked, dtype: str) -> str:
    """Return why a bound is too wide to judge by; empty where it finds a tensor of zeros wrong."""
    rounds_sums = arithmetic.partial_terms is not None or arithmetic.steps
    if not rounds_sums or np.any(exact.allowed < np.abs(exact.value)):
        return ""
    sums = "sums are added up" if arithmetic.steps else "partial sums may be stored"
    return f"{sums} in {dtype}: the bound for such a long sum would let zeros pass"


def _why_no_dtype(device: torch.device, dtype: str) -> str:
    """Return why a device does not compute in a dtype; empty where it does, as every device in float32."""
    if dtype == "float32":
        return ""
    try:
        ones = torch.ones(2, dtype=named(dtype)).to(device)
        (ones + ones).to("cpu")
    except (TypeError, RuntimeError) as error:
        if ends_the_worker(error, device):
            raise
        return f"no {dtype} on this device: {first_line(error)}"
    return ""


def _why_composed(device: torch.device, operation: Operation, dtype: str) -> str:
    """Return why an operation is skipped whose bound needs a kernel; empty where the backend has it.

    Without it torch composes the operation of several, and rounds to a half type in between.
    """
    if operation.kernel is None or dtype not in ("bfloat16", "float16"):
        return ""
    key = torch._C._dispatch_key_for_device(device.type)
    if torch._C._dispatch_has_kernel_for_dispatch_key(operation.kernel, key):
        return ""
    return f"{device.type} has no {operation.name} kernel: torch composes one that rounds in between to {dtype}"


def _record_absent(record: Recorder, operation: Operation, dtype: str, status: RecordStatus, reason: str) -> None:
    """Record that there is no result of an operation: `skipped` where the device does not have it, else `missing`."""
    record.skipped(
        _STAGE,
        reason,
        operation.row(dtype),
        layer=operation.name,
        status=status,
        dtype=dtype,
        unsupported=status == "skipped",
    )
