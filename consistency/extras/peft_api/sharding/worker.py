"""Stage `sharding`: the same model laid out over several devices gives the same answer as on one.

Ids and labels are first compared with the tables on the CPU; where they are past an end, no device runs, for its kernel
would assert and take the context with it. Then the model runs on the worker's device alone, and in each layout that the
visible devices suggest; everything that moves between shards is checked on both sides (`moves.py`). Logits and loss are
compared with those of the one device bit by bit. Where other kernels compute, other bits are no fault: there every
block is judged as in the stage `forward`, on what that stage gives it.

The base is loaded again for each layout, besides the copy that the other stages hold.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from consistency.capture.names import ADAPTER_OFF, ADAPTER_ON
from consistency.capture.records import RecordStatus
from consistency.case import standard
from consistency.errors import InputError, first_line
from consistency.extras.peft_api.sharding.device_maps import Layout, layouts, load, same_model
from consistency.extras.peft_api.sharding.moves import ChangedInTransferError, Moves, watched
from consistency.extras.peft_api.sharding.spec import OTHER_ANSWER
from consistency.numerics import words
from consistency.numerics.digest import digest
from consistency.numerics.distance import measure
from consistency.numerics.dtype import name_of
from consistency.numerics.rules import passes
from consistency.numerics.words import Word
from consistency.worker import cpu_error
from consistency.worker.context import Context, inputs_fit
from consistency.worker.decisions.replay import Replay, deciding
from consistency.worker.device_error import computes, is_of_the_device, is_out_of_memory
from consistency.worker.judging.block_rule import NOT_REPLAYED, block_ratio, record_flips
from consistency.worker.memory.host_memory import available_bytes
from consistency.worker.model.block_pass import ResultPlace, run_by_blocks
from consistency.worker.model.float64_reference import wait_for
from consistency.worker.model.id_checks import KernelAssertedError, asserted, context_is_lost, is_kernel_assert
from consistency.worker.model.inputs import fixed_inputs, with_labels
from consistency.worker.model.loading import load_adapter, load_base
from consistency.worker.model.running import base_of
from consistency.worker.protocol import DECISIONS_FILE
from consistency.worker.recorder import Skip

STAGE = "sharding"
PINNED = "one device"
LOSS = "loss"
LOSS_FOLLOWS = "differs bitwise; so do the blocks and logits, which are judged"
ON_THE_WAY = "on the way"

_ROOM = 1.25
"""Free memory that another copy needs, in copies: with its activations and what the allocator loses."""

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The output of one forward pass in one layout.

    Attributes
    ----------
    tensors : dict
        Logits and loss, on the CPU.
    moves : Moves
        The moves between shards that were checked.
    places : dict
        Devices by the names of modules, as accelerate lays them out.
    blocks : _Blocks or None
        The judged blocks, where other bits are there and are no fault; else None.
    """

    tensors: dict[str, torch.Tensor]
    moves: Moves
    places: dict[str, Any]
    blocks: _Blocks | None = None


@dataclass(slots=True, kw_only=True)
class _Blocks:
    """How the blocks of a layout were judged.

    Attributes
    ----------
    ratio : float or None
        The largest ratio of a block; None where no block was judged.
    first : str or None
        The first block that is outside.
    reason : str
        Why no block was judged, where none was.
    """

    ratio: float | None = None
    first: str | None = None
    reason: str = "differs bitwise, and its blocks have no float64 values"


def run(context: Context) -> None:
    """Record ids, labels and moves between shards; compare every layout of the model with one device."""
    model, case = context.base.model, context.job.case
    inputs, reason = fixed_inputs(case, model)
    if case.factory is not None:
        reason = "a model that a function makes has no device map"
    if context.base.offload is not None:
        reason = "the base is offloaded: one device does not hold the model that layouts are compared with"
    if inputs is None or reason:
        raise Skip(reason)
    inputs = with_labels(inputs, model)
    if not inputs_fit(context, STAGE, inputs, every=True):
        return
    _require_room(context)
    # the layouts follow from the loaded base, so they are known once the one device has it
    layouts_to_check: list[Layout] = []

    def load_on_one_device() -> torch.nn.Module:
        base = load_base(case, str(context.device))
        layouts_to_check.extend(layouts(case, context.device, base.model))  # before PEFT renames the modules
        if case.adapter is None:
            return base.model
        return load_adapter(base, case).model

    one_device = Layout(name=PINNED, device_map={"": str(context.device)})
    pinned = _answer(context, one_device, inputs, load_on_one_device)
    if pinned is None:
        return
    folder = context.scratch / f"offload-{os.getpid()}"
    for done, layout in enumerate(layouts_to_check):
        context.events.step(layout.name, done, len(layouts_to_check))
        load_in_layout = functools.partial(load, case, layout, context.device, folder)
        answer = _answer(context, layout, inputs, load_in_layout, pinned)
        shutil.rmtree(folder, ignore_errors=True)
        if answer is not None:
            _judge(context, layout, answer, pinned)


def _answer(
    context: Context, layout: Layout, inputs: Inputs, make: Callable[[], torch.nn.Module], pinned: Answer | None = None
) -> Answer | None:
    """Load, run and release the model; record why there is no answer where there is none.

    Parameters
    ----------
    make : callable
        Loads the model in the layout.
    pinned : Answer or None
        The answer of the one device, which this one is compared with; None for that answer itself.
    """
    moves = Moves(given=inputs, by_host=layout.by_host)
    model = None
    try:
        model = make()
        places = _places_of(context, model)
        with watched(model, moves):
            moved = {name: moves.move(name, tensor, _input_device(model)) for name, tensor in inputs.items()}
            tensors = _outputs(model, moved)
        blocks = None
        if pinned is not None and not _promises_bits(context, places) and not _equal(tensors, pinned.tensors):
            blocks = _judge_blocks(context, layout, model, inputs)
    except ChangedInTransferError as change:
        _record_moves(context, layout, moves, change.evidence, word=change.word, reason=change.sentence)
        return None
    except Skip as skip:
        context.record.skipped(STAGE, str(skip), layer=layout.name)
        return None
    except Exception as error:  # model code of any kind, and three libraries under it, may raise anything
        _record_failure(context, layout, moves, error, is_loaded=model is not None)
        return None
    finally:
        model = None
        gc.collect()  # hooks and modules hold each other
    _record_moves(context, layout, moves, {"places": dict(Counter(map(str, places.values())))})
    return Answer(tensors=tensors, moves=moves, places=places, blocks=blocks)


def _places_of(context: Context, model: torch.nn.Module) -> dict[str, Any]:
    """Return the devices of a model's modules, by their names.

    Raises
    ------
    Skip
        The whole model is on the CPU, though the worker's device is another.
    """
    laid_out = getattr(model, "hf_device_map", None) or getattr(base_of(model), "hf_device_map", None)
    places = dict(laid_out or {"": str(context.device)})
    if context.device.type != "cpu" and all(p.device.type == "cpu" for p in model.parameters()):
        raise Skip("this layout puts the whole model on the CPU")
    return places


def _record_moves(
    context: Context,
    layout: Layout,
    moves: Moves,
    evidence: Mapping[str, Any],
    *,
    word: Word | None = None,
    reason: str | None = None,
) -> None:
    """Record what moved between the shards of a layout; `word` is None where everything arrived as it was sent."""
    context.record.fact(
        STAGE,
        layout.name,
        ON_THE_WAY,
        status="outside" if word else "equal",
        word=word,
        reason=reason,
        evidence={"moves": moves.count, "devices": sorted(moves.devices), **evidence},
    )


def _record_failure(context: Context, layout: Layout, moves: Moves, error: Exception, *, is_loaded: bool) -> None:
    """Record why a layout has no answer: what the exception says of the device, the layout or the model.

    Raises
    ------
    KernelAssertedError
        A kernel asserted, and the device's context is lost.
    InputError
        The device map is the user's own, and the model cannot be laid out by it.
    """
    if is_kernel_assert(error):  # ids are within every table on the CPU, or the stage would have ended before
        sentence = asserted(moves.given, context.device, error)
        if context_is_lost(error):
            raise KernelAssertedError(sentence) from error  # the session records it
        evidence = {"inputs": sorted(moves.given)}
        _record_moves(context, layout, moves, evidence, word=words.IDS_CHANGED, reason=sentence)
    elif is_out_of_memory(error) and computes(context.device):
        context.record.skipped(STAGE, "no memory for another copy of the model", layer=layout.name)
    elif is_of_the_device(error, context.device):
        if layout.name == PINNED or not computes(context.device):
            raise error
        # the worker's own device still computes, so it is another device of the layout
        reason = f"a device of this layout fails, and its own worker says why: {first_line(error)}"
        context.record.fact(STAGE, layout.name, ON_THE_WAY, status="blocked", reason=reason)
    else:
        _record_failure_of_model(context, layout, moves, error, is_loaded=is_loaded)


def _record_failure_of_model(
    context: Context, layout: Layout, moves: Moves, error: Exception, *, is_loaded: bool
) -> None:
    """Record a failure that is no device's: of a layout that cannot be used, or of a model that does not run in it.

    Raises
    ------
    InputError
        The device map is the user's own.
    """
    message = first_line(error)
    if layout.own:
        raise InputError(
            "the model cannot be laid out by this device map", where=context.job.case.device_map, got=message
        ) from error
    if layout.name == PINNED:
        context.record.skipped(STAGE, f"the model does not run on the inputs: {message}", layer=layout.name)
    elif not is_loaded or layout.offloads:
        context.record.skipped(STAGE, f"the model cannot use this layout: {message}", layer=layout.name)
    else:
        reason = f"the model does not run in this layout, and does on one device: {message}"
        _record_moves(context, layout, moves, {}, word=words.DOES_NOT_RUN, reason=reason)


def _promises_bits(context: Context, places: Mapping[str, Any]) -> bool:
    """Report whether a layout computes with the kernels of the one device; the CPU's add in an order by address."""
    return context.job.case.is_pinned and same_model(context.device, places) and context.device.type != "cpu"


def _equal(tensors: Inputs, expected: Inputs) -> bool:
    return all(name in tensors and digest(tensors[name]) == digest(wanted) for name, wanted in expected.items())


def _judge_blocks(context: Context, layout: Layout, model: torch.nn.Module, inputs: Inputs) -> _Blocks:
    """Run the blocks of a layout on the block inputs of the stage `forward`, and judge their results."""
    if standard.FORWARD not in context.job.case.stages:
        return _Blocks(reason="differs bitwise; the stage forward, whose float64 results judge it, is not run")
    reference = wait_for(context.scratch, context.events)
    if isinstance(reference, str):
        return _Blocks(reason=reference)
    mode = ADAPTER_OFF if context.job.case.adapter is None else ADAPTER_ON
    replay = Replay(
        context.scratch / DECISIONS_FILE.format(standard.FORWARD),
        model,
        cpu_error.products_on(context.model, context.device),
    )
    blocks = _Blocks()

    def take(place: ResultPlace, result: torch.Tensor) -> None:
        on_host = result.detach().to("cpu")
        ratio = block_ratio(context, STAGE, place.layer, on_host, reference, f"{mode}::{place}")
        if ratio is None:
            return
        is_largest = blocks.ratio is None or _is_worse(ratio, blocks.ratio)
        if is_largest:
            blocks.ratio = ratio
        if blocks.first is None and not passes(ratio):
            blocks.first = place.layer

    with deciding(replay.watch_if_any(mode), gradient=False, places=replay.places):
        run_by_blocks(model, inputs, functools.partial(reference.given_value, mode), take, began=context.events.block)
    record_flips(context, STAGE, replay.flips, mode=layout.name)
    if not replay.was_complete(mode):
        return _Blocks(reason=NOT_REPLAYED)
    return blocks


def _is_worse(ratio: float, other: float) -> bool:
    """Report whether a ratio is larger than another; NaN is larger than any number."""
    return (math.isnan(ratio), ratio) > (math.isnan(other), other)


def _judge(context: Context, layout: Layout, answer: Answer, pinned: Answer) -> None:
    """Record how logits and loss of a layout compare with those of the one device."""
    for name, expected in pinned.tensors.items():
        actual = answer.tensors.get(name)
        if actual is None or actual.shape != expected.shape or actual.dtype != expected.dtype:
            shape = None if actual is None else [name_of(actual.dtype), *actual.shape]
            _record_tensor(context, layout, name, {"got": shape}, status="outside", word=words.SHAPE)
        elif digest(actual).value == digest(expected).value:
            _record_tensor(context, layout, name, {}, status="equal", word=None)
        else:
            _judge_difference(context, layout, name, _difference(actual, expected), answer.blocks)


def _judge_difference(
    context: Context, layout: Layout, name: str, evidence: dict[str, Any], blocks: _Blocks | None
) -> None:
    """Record a tensor that has other bits than on the one device: a fault, or what the blocks allow."""
    if blocks is None:  # the layout promises the bits of the one device
        _record_tensor(context, layout, name, evidence, status="outside", word=OTHER_ANSWER)
    elif blocks.ratio is None:
        context.record.skipped(STAGE, blocks.reason, name, layer=layout.name)
    elif name == LOSS:  # no block's result: it follows from the logits
        context.record.skipped(STAGE, LOSS_FOLLOWS, name, layer=layout.name)
    elif passes(blocks.ratio):
        word = words.ACCUMULATION_ORDER
        _record_tensor(context, layout, name, evidence, status="within", word=word, ratio=blocks.ratio)
    else:
        evidence["first"] = blocks.first
        _record_tensor(context, layout, name, evidence, status="outside", word=OTHER_ANSWER, ratio=blocks.ratio)


def _record_tensor(
    context: Context,
    layout: Layout,
    name: str,
    evidence: Mapping[str, Any],
    *,
    status: RecordStatus,
    word: Word | None,
    ratio: float | None = None,
) -> None:
    context.record.fact(
        STAGE,
        layout.name,
        name,
        status=status,
        word=word,
        ratio=ratio,
        evidence={"reference": PINNED, **evidence},
    )


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
    """Return the figures of a difference, as evidence."""
    difference = measure(actual, expected)
    worst_index = difference.worst_index
    return {
        "mismatched": difference.mismatched,
        "elements": actual.numel(),
        "max_abs": float(difference.max_abs),
        "worst_index": None if worst_index is None else list(worst_index),
    }


def _outputs(model: torch.nn.Module, inputs: Inputs) -> Inputs:
    """Run the model; return logits and loss, on the CPU."""
    options = {"return_dict": True}
    if hasattr(getattr(base_of(model), "config", None), "use_cache"):
        options["use_cache"] = False
    with torch.no_grad():
        output = model(**inputs, **options)
    tensors = {}
    for name, value in dict(output).items():
        is_compared = name in (LOSS, "logits")
        if is_compared and isinstance(value, torch.Tensor) and value.is_floating_point():
            tensors[name] = value.detach().to("cpu")
    return tensors


def _input_device(model: torch.nn.Module) -> torch.device:
    """Return the device that a user would put the inputs on: the one of the first parameter."""
    return next(p for p in model.parameters() if not p.is_meta).device


def _require_room(context: Context) -> None:
    """Require memory for another copy of the base besides the one that the other stages hold.

    Raises
    ------
    Skip
        The host, its disk or the device has no room for it.
    """
    wanted = int(_ROOM * sum(t.nbytes for t in context.base.tensors.values()))
    on_disk = shutil.disk_usage(context.scratch).free
    for where, free in (("memory", available_bytes()), (f"the disk at {context.scratch}", on_disk)):
        if free is not None and free < wanted:
            raise Skip(f"no room for another copy of the base: {wanted} bytes wanted, {free} free in {where}")
    module = None if context.device.type == "cpu" else torch.get_device_module(context.device.type)
    if module is not None and hasattr(module, "mem_get_info"):
        if hasattr(module, "empty_cache"):  # what the allocator keeps for reuse counts as taken
            module.empty_cache()
        free = int(module.mem_get_info(context.device.index or 0)[0])
        if free < wanted:
            raise Skip(f"no room for another copy of the base: {wanted} bytes wanted, {free} free on {context.device}")
