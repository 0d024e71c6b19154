"""Batch invariance of an engine: the first row alone, and first and last in batches of several sizes.

Where the engine promises it, the bits are the same. Where it does not, what batching changes is measured, and each is
held to the rule of the outputs themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from consistency.capture.names import BATCHES
from consistency.case.inference.outputs import batch_size
from consistency.case.stages import Stage
from consistency.numerics.digest import digest
from consistency.numerics.error import measure_against_exact
from consistency.numerics.independent_errors import independent_rows
from consistency.numerics.rules import judge_relative
from consistency.worker.cpu_error import rounding_error
from consistency.worker.recorder import Recorder
from consistency.worker.stages.engine_outputs.view import View


def record_batches(
    view: View, record: Recorder, *, drawn: Sequence[torch.Tensor] | None, exact: torch.Tensor | None, dtype: str
) -> None:
    """Record the first row in each batch of the file, `drawn` and `exact` being logits with the adapter."""
    names = view.outputs.batches
    if drawn is None or exact is None or not names:
        return
    for name in names:
        view.check_batch(name)
    promised = view.outputs.about.batch_invariant
    alone = view.actual(names[0])
    for name in names:
        values, truth = view.actual(name), view.model(name, exact[0])
        rounding = rounding_error([view.drawn(name, one[0], truth) for one in drawn], truth, independent_rows)
        found = measure_against_exact(values, truth)
        share = judge_relative(found, dtype, rounding).ratio
        same = digest(values).value == digest(alone).value
        moved = (values.to(torch.float64) - alone.to(torch.float64)).abs().nan_to_num(nan=torch.inf)
        where = _place(name)
        reason = None
        if not share <= 1:
            reason = f"row 0 {where} is {share:.3g} times as far from float64 as the rule allows"
        elif promised and not same:
            changed = int((values != alone).sum())
            reason = (
                f"row 0 {where} differs in {changed} of {values.numel()} values from row 0 {_place(names[0])}, by at "
                f"most {float(moved.max()):.3g}, although the engine promises that batching changes no bit"
            )
        record.fact(
            Stage.FORWARD, BATCHES, name, status="outside" if reason else "equal" if same else "within", reason=reason,
            evidence={"promised": promised, "same_bits": same, "max_abs": float(moved.max()), "rule_ratio": share},
        )  # fmt: skip


def _place(name: str) -> str:
    return "alone" if batch_size(name) == 1 else f"{name.rpartition('.')[2]} in a batch of {batch_size(name)}"
