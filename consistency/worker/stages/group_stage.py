"""What the stages of a group have in common: whether a group is there, what it trains, and why it cannot."""

from __future__ import annotations

from collections.abc import Callable

from consistency.capture.names import WHOLE_MODEL
from consistency.case.stages import SPECS, Stage
from consistency.worker.decisions.track import Table
from consistency.worker.model.float64_reference import FILE_OF, Reference, wait_for
from consistency.worker.model.inputs import fixed_inputs
from consistency.worker.protocol import DECISIONS_FILE, RankGroup
from consistency.worker.quantized.held import quantized_layers
from consistency.worker.ranks.group import GroupError, Joined, RefusedError, joined
from consistency.worker.ranks.nodes import NodeLostError, met
from consistency.worker.stages.context import Context, Machine
from consistency.worker.training.backward import Tensors, trained


def skip(context: Machine, stage: Stage, reason: str, *, what: str = "") -> None:
    """Record why a stage, or a part of it, is not run."""
    spec = SPECS[stage]
    context.record.absent(stage, WHOLE_MODEL, what or spec.whole, status="skipped", reason=reason, rule=spec.rule)


def in_group(
    context: Machine,
    stage: Stage,
    run: Callable[[Joined], None],
    *,
    choose: Callable[[RankGroup], RankGroup] = lambda group: group,
) -> None:
    """Run a stage as a rank of its group; skip it where there is none, where one is lost, and where all refuse it.

    Parameters
    ----------
    choose : callable, optional
        Returns the part of the group that this rank joins, or raises `RefusedError`.
    """
    if context.job.group is None:
        skip(context, stage, "no other worker runs beside this one on a device of its type")
        return
    try:
        group = choose(met(context.job.group, context.events))
        with joined(group, context.device, context.events, stage) as ranks:
            # `ranks` keeps the process group for longer than what an error keeps of `run`: the reducer of
            # DistributedDataParallel, if it is the last to hold it, joins its threads with the interpreter's lock held
            run(ranks)
    except (RefusedError, NodeLostError) as error:
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


def float64_of(context: Context, stage: Stage) -> Reference | str:
    """Return the float64 results of another stage, or why they cannot judge a model that several ranks train or hold.

    Its passes may have made decisions, which another pass may make otherwise.
    """
    if stage not in context.job.case.stages:
        return f"the stage {stage}, whose float64 results judge it, is not run"
    found = wait_for(context.scratch, context.events, FILE_OF[stage])
    decided = Table.of(context.scratch / DECISIONS_FILE.format(stage)).passes
    return UNFOLLOWED if not isinstance(found, str) and any(decided.values()) else found
