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
LOSS_FOLLOWS = "differs bitwise, as the blocks and logits do, which are judged"
ON_THE_WAY = "on the way"

_ROOM = 1.25
"""Free memory that another copy needs, in copies: with its activations and what the allocator loses."""

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The output of one forward pass, on the CPU; of one in which other bits are no fault, its blocks."""

    tensors: dict[str, torch.Tensor]
    moves: Moves
    places: dict[str, Any]
    blocks: _Blocks | None = None


@dataclass(slots=True, kw_only=True)
class _Blocks:
    """The largest ratio of a layout's blocks, and the first that is outside; or the reason why there is none."""

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
    ways: list[Layout] = []

    def alone() -> torch.nn.Module:
        base = load_base(case, str(context.device))
        ways.extend(layouts(case, context.device, base.model))  # before PEFT renames the modules
        return base.model if case.adapter is None else load_adapter(base, case).model

    pinned = _answer(context, Layout(name=PINNED, device_map={"": str(context.device)}), inputs, alone)
    if pinned is None:
        return
    folder = context.scratch / f"offload-{os.getpid()}"
    for done, way in enumerate(ways):
        context.events.step(way.name, done, len(ways))
        found = _answer(context, way, inputs, functools.partial(load, case, way, context.device, folder), pinned)
        shutil.rmtree(folder, ignore_errors=True)
        if found is not None:
            _judge(context, way, found, pinned)


def _answer(
    context: Context, way: Layout, inputs: Inputs, make: Callable[[], torch.nn.Module], pinned: Answer | None = None
) -> Answer | None:
    """Load, run and release the model; record why there is no answer where there is none."""
    moves = Moves(given=inputs, by_host=way.by_host)
    model = None

    def record(word: Word | None, reason: str | None, evidence: Mapping[str, Any]) -> None:
        context.record.fact(
            STAGE,
            way.name,
            ON_THE_WAY,
            status="outside" if word else "equal",
            word=word,
            reason=reason,
            evidence={"moves": moves.count, "devices": sorted(moves.devices), **evidence},
        )

    try:
        model = make()
        laid_out = getattr(model, "hf_device_map", None) or getattr(base_of(model), "hf_device_map", None)
        places = dict(laid_out or {"": str(context.device)})
        if context.device.type != "cpu" and all(p.device.type == "cpu" for p in model.parameters()):
            raise Skip("this layout puts the whole model on the CPU")
        with watched(model, moves):
            moved = {name: moves.move(name, tensor, _door(model)) for name, tensor in inputs.items()}
            tensors = _outputs(model, moved)
        blocks = None
        if pinned is not None and not _promises_bits(context, places) and not _equal(tensors, pinned.tensors):
            blocks = _by_blocks(context, way, model, inputs)
    except ChangedInTransferError as change:
        record(change.word, change.sentence, change.evidence)
        return None
    except Skip as skip:
        context.record.skipped(STAGE, str(skip), layer=way.name)
        return None
    except Exception as error:  # model code of any kind, and three libraries under it, may raise anything
        if is_kernel_assert(error):  # ids are within every table on the CPU, or the stage would have ended before
            sentence = asserted(inputs, context.device, error)
            if context_is_lost(error):
                raise KernelAssertedError(sentence) from error  # the session records it
            record(words.IDS_CHANGED, sentence, {"inputs": sorted(inputs)})
        elif is_out_of_memory(error) and computes(context.device):
            context.record.skipped(STAGE, "no memory for another copy of the model", layer=way.name)
        elif is_of_the_device(error, context.device):
            if way.name == PINNED or not computes(context.device):
                raise
            reason = f"a device of this layout fails, whose own worker says what it means: {first_line(error)}"
            context.record.fact(STAGE, way.name, ON_THE_WAY, status="blocked", reason=reason)
        elif way.own:
            raise InputError(
                "the model cannot be laid out by this device map",
                where=context.job.case.device_map,
                got=first_line(error),
            ) from error
        elif way.name == PINNED:
            context.record.skipped(STAGE, f"the model does not run on the inputs: {first_line(error)}", layer=way.name)
        elif model is None or way.offloads:
            context.record.skipped(STAGE, f"the model cannot use this layout: {first_line(error)}", layer=way.name)
        else:
            reason = f"the model does not run in this layout, and does on one device: {first_line(error)}"
            record(words.DOES_NOT_RUN, reason, {})
        return None
    finally:
        model = None
        gc.collect()  # hooks and modules hold each other
    record(None, None, {"places": dict(Counter(map(str, places.values())))})
    return Answer(tensors=tensors, moves=moves, places=places, blocks=blocks)


def _promises_bits(context: Context, places: Mapping[str, Any]) -> bool:
    """Report whether a layout computes with the kernels of the one device; the CPU's add in an order by address."""
    return context.job.case.is_pinned and same_model(context.device, places) and context.device.type != "cpu"


def _equal(tensors: Inputs, expected: Inputs) -> bool:
    return all(name in tensors and digest(tensors[name]) == digest(one) for name, one in expected.items())


def _by_blocks(context: Context, way: Layout, model: torch.nn.Module, inputs: Inputs) -> _Blocks:
    """Run the blocks of a layout on what the stage `forward` gives them, and judge their results."""
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
    found = _Blocks()

    def take(place: ResultPlace, result: torch.Tensor) -> None:
        own = result.detach().to("cpu")
        ratio = block_ratio(context, STAGE, place.layer, own, reference, f"{mode}::{place}")
        if ratio is not None:
            found.ratio = ratio if found.ratio is None else max(found.ratio, ratio, key=lambda one: (one != one, one))
            found.first = found.first or (None if passes(ratio) else place.layer)

    with deciding(replay.watch_if_any(mode), gradient=False, places=replay.places):
        run_by_blocks(model, inputs, functools.partial(reference.given, mode), take, began=context.events.block)
    record_flips(context, STAGE, replay.flips, mode=way.name)
    return found if replay.was_complete(mode) else _Blocks(reason=NOT_REPLAYED)


def _judge(context: Context, way: Layout, found: Answer, pinned: Answer) -> None:
    for name, expected in pinned.tensors.items():
        actual = found.tensors.get(name)
        status: RecordStatus = "outside"
        word: Word | None = OTHER_ANSWER
        share = None
        if actual is None or actual.shape != expected.shape or actual.dtype != expected.dtype:
            word = words.SHAPE
            evidence: dict[str, Any] = {"got": None if actual is None else [name_of(actual.dtype), *actual.shape]}
        elif digest(actual).value == digest(expected).value:
            status, word, evidence = "equal", None, {}
        else:
            evidence = _difference(actual, expected)
            if found.blocks is not None:
                share = found.blocks.ratio
                if share is None or name == LOSS:
                    reason = found.blocks.reason if share is None else LOSS_FOLLOWS
                    context.record.skipped(STAGE, reason, name, layer=way.name)
                    continue
                if passes(share):
                    status, word = "within", words.ACCUMULATION_ORDER
                else:
                    evidence["first"] = found.blocks.first
        context.record.fact(
            STAGE,
            way.name,
            name,
            status=status,
            word=word,
            share=share,
            evidence={"reference": PINNED, **evidence},
        )


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
    found = measure(actual, expected)
    return {
        "mismatched": found.mismatched,
        "elements": actual.numel(),
        "max_abs": float(found.max_abs),
        "worst_index": None if found.worst_index is None else list(found.worst_index),
    }


def _outputs(model: torch.nn.Module, inputs: Inputs) -> Inputs:
    """Run the model; return the loss and every other tensor of its output on the CPU."""
    options = {"return_dict": True, **({"use_cache": False} if hasattr(_config(model), "use_cache") else {})}
    with torch.no_grad():
        output = model(**inputs, **options)
    return {
        name: value.detach().to("cpu")
        for name, value in dict(output).items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and name in (LOSS, "logits")
    }


def _door(model: torch.nn.Module) -> torch.device:
    """Return the device that a user would put the inputs on: that of the first parameter."""
    return next(p for p in model.parameters() if not p.is_meta).device


def _config(model: Any) -> Any:
    return getattr(base_of(model), "config", None)


def _require_room(context: Context) -> None:
    """Require memory for another copy of the base besides the one that the other stages hold."""
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
