"""What the stages of a group have in common: whether a group is there, what it trains, and why it cannot."""

from __future__ import annotations

from collections.abc import Callable

from consistency.capture.names import WHOLE_MODEL
from consistency.case.stages import SPECS, Stage
from consistency.worker.decisions.track import Table
from consistency.worker.model.inputs import fixed_inputs
from consistency.worker.protocol import DECISIONS_FILE, RankGroup
from consistency.worker.quantized.held import quantized_layers
from consistency.worker.ranks.group import GroupError, Joined, RefusedError, joined
from consistency.worker.stages.context import Context, Machine
from consistency.worker.training.backward import Tensors, trained


def skip(context: Machine, stage: Stage, reason: str, *, what: str = "") -> None:
    """Record why a stage, or a part of it, is not run."""
    spec = SPECS[stage]
    context.record.absent(stage, WHOLE_MODEL, what or spec.whole, status="skipped", reason=reason, rule=spec.rule)


def in_group(context: Machine, stage: Stage, run: Callable[[Joined], None], *, group: RankGroup | None = None) -> None:
    """Run a stage as a rank of its group; skip it where there is none, where one is lost, and where all refuse it.

    Parameters
    ----------
    group : RankGroup, optional
        Without one, all ranks.
    """
    group = group or context.job.group
    if group is None:
        skip(context, stage, "no other worker runs beside this one on a device of its type")
        return
    try:
        with joined(group, context.device, context.events, stage) as ranks:
            run(ranks)
    except RefusedError as error:
        skip(context, stage, str(error))
    except GroupError as error:
        if not error.lost:
            raise
        skip(context, stage, str(error))  # that a rank is lost is a finding of its own


def to_train(context: Context, stage: Stage) -> tuple[Tensors, list[str]] | None:
    """Return the case's inputs and the names of what its adapter trains; None where there is a reason, recorded."""
    inputs, reason = fixed_inputs(context.job.case, context.base.model)
    names = trained(context.model, context.expected)
    if context.base.offload is not None:
        reason = "the base is offloaded to the host"
    elif any(quantized_layers(context.base.model)):
        reason = "the base is quantized"
    elif not reason and not names:
        reason = "the adapter has no floating-point tensor to train"
    if inputs is None or reason:
        skip(context, stage, reason)
        return None
    return inputs, names


UNFOLLOWED = "the model makes decisions, and those of a model in parts are not followed"


def decides(context: Context, stage: Stage) -> bool:
    """Report whether the float64 passes of a stage made decisions, which another pass may make otherwise."""
    table = Table.of(context.scratch / DECISIONS_FILE.format(stage))
    return any(table.passes.values())
