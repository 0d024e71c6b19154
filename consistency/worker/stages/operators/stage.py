"""Stage `operators`: a fixed list of small operations on this device, each against its float64 value.

It needs no model: what is off here is the device, its driver or its libraries. Each operation has a derived bound
(`operator_table`, `consistency.numerics.running_error`), which a tolerance of the user's own replaces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from consistency.capture.names import UNSUPPORTED
from consistency.capture.records import RecordStatus
from consistency.case.case import Case
from consistency.case.stages import Level
from consistency.case.tolerance import Override
from consistency.numerics.bound import measure_against_exact
from consistency.numerics.diagnosis_computed import diagnose_computed, exact_chunks
from consistency.numerics.digest import digest
from consistency.numerics.distance import Measure
from consistency.numerics.dtype import named
from consistency.numerics.rules import Rule, passes
from consistency.numerics.running_error import Arithmetic, Tracked, measure_tracked
from consistency.worker.memory.host_memory import is_out_of_memory
from consistency.worker.protocol import EventLog
from consistency.worker.recorder import Recorder
from consistency.worker.stages.operators.table import Operation, operations
from consistency.worker.stages.user_tolerance import Given

_STAGE = "operators"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """What is tried, and how.

    Attributes
    ----------
    device : torch.device
    settings : mapping
        Of the device's variant, where they differ from the pinned ones.
    level : Level
    repeat : int
        How often each operation is run.
    tolerance : sequence of Override
    keep : bool
        Keep every result in full.
    """

    device: torch.device
    settings: Mapping[str, Any]
    level: Level = Level.STANDARD
    repeat: int = 1
    tolerance: Sequence[Override] = ()
    keep: bool = False

    @classmethod
    def of(cls, case: Case, device: str, settings: Mapping[str, Any]) -> Trials:
        """Return what a case asks for."""
        return cls(
            device=torch.device(device), settings=settings, level=case.level, repeat=case.repeat,
            tolerance=case.tolerance, keep=case.keep,
        )  # fmt: skip

    def arithmetic(self, dtype: torch.dtype, *, tf32: bool = False) -> Arithmetic:
        """Return what the device may do with a dtype; `tf32`: as if its float32 products ran in TF32."""
        on_units = self.device.type != "cpu"
        allowed = on_units and bool(self.settings.get("matmul_allow_tf32") or self.settings.get("cudnn_allow_tf32"))
        return Arithmetic.of(dtype, truncating=on_units, tf32=tf32 or allowed)


def run(trials: Trials, record: Recorder, events: EventLog) -> None:
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
            _look(trials, record, operation, dtype)


def compute(operation: Operation, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Do one operation on the device of its inputs."""
    with torch.no_grad():
        return operation.compute(*inputs)


def _look(trials: Trials, record: Recorder, operation: Operation, dtype: str) -> None:
    host = [_given(values, dtype) for values in operation.inputs()]
    try:
        inputs = [tensor.to(trials.device) for tensor in host]
        results = [compute(operation, inputs) for _ in range(trials.repeat)]
        actual = results[0].to("cpu")
    except (NotImplementedError, AttributeError) as error:  # no kernel for this dtype, or no such function yet
        _absent(record, operation, dtype, "skipped", f"there is no {operation.name} here: {_text(error)}")
        return
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        _absent(record, operation, dtype, "missing", f"it failed: {_text(error)}")
        return
    exact = _exact(operation, host, trials.arithmetic(named(dtype)))
    given = Given.among(trials.tolerance, stage=_STAGE, layer=operation.name, dtype=actual.dtype)
    if tuple(actual.shape) != exact.value.shape:
        reason = f"the result has shape {tuple(actual.shape)}, wanted {exact.value.shape}"
        _absent(record, operation, dtype, "missing", reason)
        return
    found = measure_against_exact(actual, torch.from_numpy(exact.value), given.allowance) if given else (
        measure_tracked(actual, exact)
    )  # fmt: skip
    status = _status(found)
    cause = None
    if status == "outside" or given is None:
        allowed = given.allowance if given else torch.from_numpy(exact.allowed)
        cause = diagnose_computed(
            found,
            lambda: exact_chunks(actual, torch.from_numpy(exact.value), allowed),
            in_tf32=(lambda: _in_tf32(trials, operation, host, actual))
            if operation.multiplies and dtype == "float32" and given is None
            else None,
        )
    record.computed(
        stage=_STAGE,
        layer=operation.name,
        tensor=f"{dtype} {operation.size}",
        actual=actual,
        rule=Rule.USER if given else Rule.BOUND,
        found=found,
        status=status,
        diagnosis=None if cause is None else cause.word,
        digests=[digest(result) for result in results],
        evidence={**(given.evidence if given else {}), **(cause.evidence if cause else {})},
        keep=trials.keep,
        exact=torch.from_numpy(exact.value),
        ingredients={} if given else {"allowed": torch.from_numpy(exact.allowed)},
    )


def _given(values: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(values) if values.dtype.kind == "i" else torch.from_numpy(values).to(named(dtype))


def _exact(operation: Operation, host: Sequence[torch.Tensor], by: Arithmetic) -> Tracked:
    """Return the exact result of the very numbers that the device is given."""

    def known() -> Iterator[Tracked | np.ndarray]:
        for tensor in host:
            yield by.known(tensor.to(torch.float64).numpy()) if tensor.is_floating_point() else tensor.numpy()

    return operation.exact(*known())


def _in_tf32(trials: Trials, operation: Operation, host: Sequence[torch.Tensor], actual: torch.Tensor) -> Measure:
    return measure_tracked(actual, _exact(operation, host, trials.arithmetic(torch.float32, tf32=True)))


def _status(found: Measure) -> RecordStatus:
    if float(found.max_abs) == 0 and found.mismatched == 0:
        return "equal"
    return "within" if found.bound_ratio is not None and passes(found.bound_ratio) else "outside"


def _why_not(device: torch.device, dtype: str) -> str:
    """Say why a device does not know a dtype at all, nothing where it does; every device knows float32."""
    if dtype == "float32":
        return ""
    try:
        one = torch.ones(2, dtype=named(dtype)).to(device)
        (one + one).to("cpu")
    except (TypeError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        return f"there is no {dtype} here: {_text(error)}"
    return ""


def _composed(device: torch.device, operation: Operation, dtype: str) -> str:
    """Say where a backend has no kernel for an operation as a whole, and a half type rounds what is between."""
    if operation.kernel is None or dtype not in ("bfloat16", "float16"):
        return ""
    key = torch._C._dispatch_key_for_device(device.type)
    if torch._C._dispatch_has_kernel_for_dispatch_key(operation.kernel, key):
        return ""
    return f"{device.type} has no {operation.name} of its own: torch composes one that rounds in between to {dtype}"


def _absent(record: Recorder, operation: Operation, dtype: str, status: RecordStatus, reason: str) -> None:
    record.absent(
        stage=_STAGE,
        layer=operation.name,
        tensor=f"{dtype} {operation.size}",
        status=status,
        reason=reason,
        rule=Rule.BOUND,
        dtype=dtype,
        evidence={UNSUPPORTED: True} if status == "skipped" else None,
    )


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"[:300]
