"""Check 4: one block in turn, with the inputs and the arriving gradient that it really had, against the CPU.

The block computes once more on its device, forward and backward, and on the CPU in float64 and with noise. What it is
off by is judged by the rule `block`. One sequence of the batch is taken: so the CPU's part takes about as long as a
step of a training on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.utils import _pytree

from consistency.errors import first_line
from consistency.extras.watching.block_function import (
    BlockFunction,
    BlockInputs,
    function_of,
    inputs_of_block,
    whole_state,
    without_dropout,
)
from consistency.extras.watching.kinds import WRONG_BLOCK
from consistency.extras.watching.micro_batch import MicroBatch, WatchedModel, buffers_kept
from consistency.extras.watching.outcome import CheckOutcome, Discovery
from consistency.extras.watching.rank_talk import RankTalk, rank_names
from consistency.testing.calls import Computed, FunctionCall, FunctionRun
from consistency.testing.judged_calls import CallsJudge
from consistency.testing.options import Allow
from consistency.testing.passes import NoisyPasses
from consistency.testing.result import ResultError

CHECK = "the CPU says the same"

PASSES = 4
"""Passes with noise: a block's results have many rows, and the check must not take long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongBlock:
    """A block that was found wrong, as long as the weights are those of the pass.

    Attributes
    ----------
    function : BlockFunction
        The block with its inputs.
    name : str
        Name of the block.
    batch : MicroBatch
        The micro-batch whose autocast it computes in.
    """

    function: BlockFunction
    name: str
    batch: MicroBatch


def check_block(
    watched: WatchedModel,
    batch: MicroBatch | None,
    name: str,
    talk: RankTalk,
    between: str,
    noted: BlockInputs | None = None,
    keep_in: Path | None = None,
) -> CheckOutcome:
    """Judge one block of the model by the CPU.

    Parameters
    ----------
    noted : BlockInputs, optional
        What the block had in the training's own pass; by default a pass of the model once more tells it.
    keep_in : path, optional
        File for the tensors of a block that is wrong.
    """
    function = function_to_judge(watched, batch, name, noted)
    if batch is None or isinstance(function, str):
        return CheckOutcome(check=CHECK, figures={"block": name}, not_checked=str(function))
    return judged_block(function, batch, name, talk, between, keep_in)


def function_to_judge(
    watched: WatchedModel, batch: MicroBatch | None, name: str, noted: BlockInputs | None
) -> BlockFunction | str:
    """Return a block with what entered it and arrived at it; in words why it cannot be had, where it cannot."""
    why_not = _why_not(watched, batch, name, noted)
    if why_not or batch is None:
        return why_not
    try:
        block = watched.blocks[name]
        state = whole_state(block)  # first, since all ranks have to do it
        if noted is None and batch.marks is not None:
            noted = inputs_of_block(watched, batch, name, batch.marks.incoming)
        if noted is None or noted.kwargs is None or noted.incoming is None:
            return "no gradient arrived at the block"
        return function_of(block, state, noted)
    except Exception as error:  # model code may raise anything, and the training is to go on
        return _by_itself(error)


def judged_block(
    function: BlockFunction,
    batch: MicroBatch,
    name: str,
    talk: RankTalk,
    between: str,
    keep_in: Path | None,
    computed: Computed | None = None,
) -> CheckOutcome:
    """Judge a block with what entered it.

    Parameters
    ----------
    keep_in : Path or None
        File for its tensors where it is wrong.
    computed : dict, optional
        What the device has computed of it; by default it computes once more.
    """
    outcome = CheckOutcome(check=CHECK, figures={"block": name})
    try:
        with batch.conditions(function.device), buffers_kept(function.block):
            results, _, _ = judge_block(function, computed)
    except Exception as error:  # as above: model code, here with other tensors
        outcome.not_checked = _by_itself(error)
        return outcome
    outcome.figures["ratio"] = max((result.ratio for result in results), default=0.0)
    wrong = sorted((result for result in results if result.status == "outside"), key=lambda result: -result.ratio)
    if wrong:
        worst = wrong[0]
        kept = "" if keep_in is None else _kept(keep_in, function)
        outcome.discoveries.append(
            Discovery(
                kind=WRONG_BLOCK,
                message=f"{rank_names([talk.rank])} computes {name} wrong: its {title_of(worst.name)} is off by "
                f"{worst.ratio:.3g} times what rounding may do, against float64 on the CPU: {between}",
                ranks=(talk.rank,),
                tensors=tuple((name, title_of(result.name)) for result in wrong),
                ratio=worst.ratio,
                detail=(*str(replace(worst, name=title_of(worst.name))).splitlines(), *([kept] if kept else [])),
                next="test that card (consistency run --devices cpu,cuda --stages forward,gradient with this base and "
                "adapter); take it out if it says the same",
            )
        )
        outcome.wrong_block = WrongBlock(function=function, name=name, batch=batch)
    return outcome


def _by_itself(error: Exception) -> str:
    return f"the block cannot be computed by itself: {first_line(error)}"


def _kept(file: Path, function: BlockFunction) -> str:
    """Write what a block was judged with, and say where: another card can compute it again."""
    state, args, kwargs, incoming = function.inputs
    tensors = {f"weight {name}": tensor for name, tensor in state.items()}
    for path, leaf in _pytree.tree_flatten_with_path((args, kwargs))[0]:
        if isinstance(leaf, torch.Tensor):
            tensors[f"input {_pytree.keystr(path)}"] = leaf
    tensors["gradient of the output"] = incoming
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # a copy each: the format has no two tensors in the same memory
        save_file({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}, file)
    except (OSError, SafetensorError, ValueError) as error:  # a full disk ends no training
        return f"its inputs and weights could not be written: {first_line(error)}"
    return f"its inputs, the gradient that arrived and its weights: {file}"


def _why_not(watched: WatchedModel, batch: MicroBatch | None, name: str, noted: BlockInputs | None) -> str:
    if batch is None:
        return "no forward pass of the model was seen in this step"
    if watched.is_split:
        return "" if noted is not None else "the model is split, and not by FSDP2 into its blocks"
    if not name:
        return "the model is compiled, or has no list of blocks"
    if batch.marks is None or not batch.marks.incoming:
        return "no gradient arrived at the model's outputs"
    return ""


def judge_block(
    function: BlockFunction, computed: Computed | None = None
) -> tuple[list[ResultError], NoisyPasses, Computed]:
    """Judge the results of a block.

    Parameters
    ----------
    computed : dict, optional
        What the device has computed of it, on the CPU; by default it computes once more.

    Returns
    -------
    list of ResultError
    NoisyPasses
        What they were judged by.
    dict
        The results of the device.

    Raises
    ------
    ValueError
        A result is NaN in float64 too.
    """
    with without_dropout(function.block):
        call = FunctionCall(function.compute, None, function.inputs, gradients=False)
        if computed is None:
            computed = call.on(function.device)[0].computed
        exact = call.exact()
        for name, value in exact.items():
            if not call.has_nan and isinstance(value, torch.Tensor) and bool(value.isnan().any()):
                raise ValueError(f"{title_of(name)} is NaN in float64 too")
        judge = CallsJudge(
            call=call,
            made=[FunctionRun(computed=computed)],
            exact=exact,
            strides=None,
            target=function.device,
            passes=PASSES,
            nondeterministic=None,
            allow=Allow(),
        )
        results, passes = judge.judge()
    return results, passes, computed


def title_of(result: str) -> str:
    """Return the name of a result of a block: `output` for `result['output']`."""
    return result.removeprefix("result['").removesuffix("']")
