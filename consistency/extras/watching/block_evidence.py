"""What shows a wrong block to others: its worst result beside the exact one, and the calls of torch that made it.

The rank that found the block makes it and gives it to the first rank, which writes it into the capture beside the
report. `consistency reproduce` makes a folder of it that needs torch alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from consistency.capture.names import COMPUTED_AGAIN, DEVICE, LIMITS, NOT_RECOMPUTED
from consistency.capture.records import TensorRecord, WorkerInfo
from consistency.errors import first_line
from consistency.extras.watching.block_function import BlockFunction, without_dropout
from consistency.extras.watching.block_on_cpu import judge_block, title_of
from consistency.extras.watching.report import WATCH, worker_name
from consistency.numerics.aten_calls import largest_ratio
from consistency.numerics.digest import digest
from consistency.numerics.dtype import name_of
from consistency.numerics.error import measure_against_exact
from consistency.numerics.error_spread import Spread
from consistency.numerics.real import Real
from consistency.numerics.rules import RoundingError, Rule
from consistency.worker import determinism, environment
from consistency.worker.judging.block_rule import rows_of
from consistency.worker.model.call_trace import CallTrace, NotTracedError, kept_parts
from consistency.worker.precision import products_of
from consistency.worker.recorder import KEEP_BYTES

ACTUAL, EXACT = "actual", "exact"
"""Names of the result of the device, and of that in float64, among the tensors of an evidence."""


_MOST_BYTES = 2**30
"""Most bytes of a block's weights and inputs that are given to the first rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEvidence:
    """One wrong result of a block, with what it was judged by.

    Attributes
    ----------
    record : TensorRecord
        The result as a capture records it, without the names of stored tensors.
    tensors : mapping of str to torch.Tensor
        `ACTUAL` and `EXACT`; the error that each element may have; and where the calls that made the result are known,
        these and what they take. All on the CPU.
    worker : WorkerInfo
        The rank, its device and its settings.
    """

    record: TensorRecord
    tensors: Mapping[str, torch.Tensor]
    worker: WorkerInfo


def evidence_of(function: BlockFunction, layer: str, rank: int, place: str) -> BlockEvidence | None:
    """Compute a wrong block once more, and return the evidence of its worst result that can be stored.

    Parameters
    ----------
    function : BlockFunction
        The block with the inputs that it was judged by.
    layer : str
        Name of the block.
    place : str
        Host and device of the rank.

    Returns
    -------
    BlockEvidence or None
        None where the results are right now, or too large.
    """
    device = function.device
    results, noisy_passes, computed = judge_block(function)
    wrong = [result for result in results if result.status == "outside"]
    for result in sorted(wrong, key=lambda result: -result.ratio):
        got = computed.get(result.name)
        if not isinstance(got, torch.Tensor) or got.nbytes > KEEP_BYTES:
            continue
        truth, spread = noisy_passes.spread(result.name, got.dtype)
        figures = spread.figures(got, truth)
        allowed = spread.allowed(truth, got.dtype)
        calls, evidence = _made_by(function, result.name, device, truth, allowed, spread)
        record = TensorRecord(
            WATCH,
            layer,
            title_of(result.name),
            shape=tuple(got.shape),
            dtype=name_of(got.dtype),
            rule=Rule.BLOCK,
            status="outside",
            digest=digest(got).value,
            reference="float64",
            rounding=RoundingError(largest=spread.limits.largest, samples=rows_of(truth), drawn=spread.limits.drawn),
            measure=figures.stated(measure_against_exact(got, truth, allowed)),
            word=figures.word,
            evidence={**figures.evidence(), LIMITS: spread.limits.of_figures(), **evidence},
        )
        tensors = {ACTUAL: got, EXACT: truth, "allowed": allowed, **calls}
        return BlockEvidence(record=record, tensors=tensors, worker=_worker(rank, place, device))
    return None


def _made_by(
    function: BlockFunction,
    name: str,
    device: torch.device,
    truth: torch.Tensor,
    allowed: torch.Tensor,
    spread: Spread,
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]:
    """Return the calls that made a result and what they take, and what is known of them."""

    def ratio_of(result: torch.Tensor) -> float:
        limits = {key: float(limit) for key, limit in spread.limits.of_figures().items()}
        return largest_ratio(result, truth, allowed, limits)[0]

    trace = CallTrace(device)
    for path, tensor in function.state.items():
        trace.know(tensor, path)
    try:
        with without_dropout(function.block), trace:
            results = function.compute(*function.inputs)
        traced = trace.finish(results[title_of(name)])
        with torch.no_grad():
            tensors, ratio = kept_parts(traced, device, products_of(device), ratio_of, most_bytes=_MOST_BYTES)
    except NotTracedError as error:
        return {}, {NOT_RECOMPUTED: str(error)}
    except Exception as error:  # model code may raise anything, and the result is shown nevertheless
        return {}, {NOT_RECOMPUTED: first_line(error)}
    return tensors, {COMPUTED_AGAIN: Real(ratio)}


def _worker(rank: int, place: str, device: torch.device) -> WorkerInfo:
    """Describe this rank as a capture does a worker."""
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return WorkerInfo(
        name=worker_name(rank),
        load_path=WATCH,
        status="ok",
        architecture=place,
        model=chip,
        environment={**environment.describe(device), DEVICE: str(device)},
        in_force=determinism.in_force(),
    )
