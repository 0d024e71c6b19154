"""Steps that the stages of a group share: joining it, and finding inputs and references, or why there are none."""

from __future__ import annotations

from collections.abc import Callable

from consistency.capture.names import SUM_OVER_RANKS
from consistency.case.stage import Stage
from consistency.case.stages import SPECS
from consistency.extras.training.ranks.group import GroupError, JoinedGroup, joined_group
from consistency.extras.training.ranks.nodes import meet_nodes
from consistency.worker.context import Context, Machine
from consistency.worker.decisions.track import Table
from consistency.worker.model.float64_reference import Reference, wait_for
from consistency.worker.model.inputs import fixed_inputs
from consistency.worker.protocol import DECISIONS_FILE, RankGroup
from consistency.worker.quantized.held import quantized_layers
from consistency.worker.recorder import Skip
from consistency.worker.training.backward import Tensors, trained


def run_in_group(
    context: Machine,
    stage: Stage,
    run: Callable[[JoinedGroup], None],
    *,
    choose: Callable[[RankGroup], RankGroup] = lambda group: group,
) -> None:
    """Run a stage as a rank of its group; `Skip` where there is none, where one is lost, and where all refuse it.

    Parameters
    ----------
    choose : callable, optional
        Returns the part of the group that this rank joins, or raises `Skip`.
    """
    if context.job.group is None:
        raise Skip("no other worker runs beside this one on a device of its type")
    # The skip is raised last: `ranks` keeps the process group for longer than what an error keeps of `run`. The reducer
    # of DistributedDataParallel, if it is the last to hold it, joins its threads with the interpreter's lock held.
    reason = ""
    try:
        group = choose(meet_nodes(context.job.group, context.events))
        with joined_group(group, context.device, context.events, stage) as ranks:
            # What is computed here follows from gradients or activations that were added up over the ranks. Where one
            # group spans all nodes, all hosts share each sum and have to agree. Of collectives some add up nothing:
            # their stage tells which.
            if SPECS[stage].multiplies and ranks.world > 2 and not ranks.group.nodes:
                context.record.operations.note(SUM_OVER_RANKS)
            run(ranks)
    except Skip as skip:
        reason = str(skip)
    except GroupError as error:
        if not error.lost:
            raise
        reason = str(error)  # that a rank is lost is a finding of its own
    if reason:
        raise Skip(reason)


def training_inputs(context: Context) -> tuple[Tensors, list[str]]:
    """Return the case's inputs and the names of the parameters that its adapter trains, or raise `Skip`."""
    inputs, reason = fixed_inputs(context.job.case, context.base.model)
    names = trained(context.model, context.expected)
    if context.base.offload is not None:
        reason = "the base is offloaded to the host"
    elif any(quantized_layers(context.base.model)):
        reason = "the base is quantized"
    elif not reason and not names:
        reason = "the adapter has no floating-point tensor to train"
    if inputs is None or reason:
        raise Skip(reason)
    return inputs, names


UNFOLLOWED = "the model makes decisions (a router, a selection), which are not followed in a model that is split"


def float64_reference(context: Context, stage: Stage) -> Reference | str:
    """Return the float64 results of another stage, or why they cannot judge a model that several ranks train or hold.

    Its passes may have made decisions, which another pass may make otherwise.
    """
    if stage not in context.job.case.stages:
        return f"the stage {stage}, whose float64 results judge it, is not run"
    answer = wait_for(context.scratch, context.events, SPECS[stage].reference_file)
    decisions = Table.of(context.scratch / DECISIONS_FILE.format(stage)).passes
    if not isinstance(answer, str) and any(decisions.values()):
        return UNFOLLOWED
    return answer
