"""Stage `generation`: the same tokens in every way that text is generated, and the text that the device writes.

A cache and a padded batch are code paths of their own. The sequences of the stage `forward` are computed in each such
way by the model's own `generate` (`worker/model/ways.py`), each block on what that stage gives it, so its float64
results and limits judge each block's rows: no second rule, no second float64 pass. A row after a router's choice that
rounding may turn is left out in its block. Where a way is wrong, it is run in float64 too: if it is wrong there, the
model's code computes something else in that way. The kernels of that pass may be what is wrong, so a comparison accuses
the device after all where another worker got the way right (`comparison/model_or_device.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from consistency.capture.names import ADAPTER_OFF, ADAPTER_ON, WHOLE_MODEL
from consistency.capture.records import RecordStatus
from consistency.case import standard
from consistency.case.stage import Level
from consistency.devices.backends import CPU
from consistency.extras.serving.generation import spec
from consistency.extras.serving.generation.spec import (
    BATCH_CHANGES_MODEL,
    CACHE_CHANGES_MODEL,
    PADDING_CHANGES_MODEL,
    SEQUENCES,
    WRONG_ALONE,
    WRONG_WITH_CACHE,
    WRONG_WITH_PADDING,
)
from consistency.extras.serving.generation.text import TEXT, record_text
from consistency.numerics import words
from consistency.numerics.decision import CONTINUOUS, Decision
from consistency.numerics.exact import Float64Mode
from consistency.numerics.file_tensor import mapped
from consistency.numerics.rules import passes
from consistency.numerics.words import Word
from consistency.worker import cpu_error
from consistency.worker.context import Context
from consistency.worker.decisions.array_file import ArrayFile
from consistency.worker.decisions.replay import deciding
from consistency.worker.decisions.track import Places, Settled, Table
from consistency.worker.judging.block_rule import block_ratio
from consistency.worker.model import half_kernels
from consistency.worker.model.block_pass import ResultPlace, run_by_blocks
from consistency.worker.model.float64_reference import Reference, given_name, wait_for
from consistency.worker.model.inputs import fixed_inputs
from consistency.worker.model.loading import load_model
from consistency.worker.model.merging import disabled
from consistency.worker.model.running import base_of, model_code, tokens_of
from consistency.worker.model.structure import blocks_of
from consistency.worker.model.ways import (
    DECODER_IDS,
    LOGITS,
    PADS,
    Rows,
    Sequences,
    Way,
    by_rows,
    in_place,
    place_of_encoder,
)
from consistency.worker.protocol import DECISIONS_FILE
from consistency.worker.quantized.exact import exact_layers
from consistency.worker.recorder import Skip

STAGE = spec.GENERATION

_SOME = slice(SEQUENCES)

ALONE, CACHE, STATIC, PADDED = spec.WAYS

WAYS: dict[str, tuple[Callable[[Way], None], Word, Word]] = {
    ALONE: (Way.alone, WRONG_ALONE, BATCH_CHANGES_MODEL),
    CACHE: (Way.cached, WRONG_WITH_CACHE, CACHE_CHANGES_MODEL),
    STATIC: (
        functools.partial(Way.cached, cache_implementation="static", disable_compile=True), WRONG_WITH_CACHE,
        CACHE_CHANGES_MODEL,
    ),
    PADDED: (Way.padded, WRONG_WITH_PADDING, PADDING_CHANGES_MODEL),
}  # fmt: skip
"""How each is computed, and what is wrong where the device is, and where the model's code is."""

MORE_WAYS: dict[str, tuple[Callable[[Way], None], Word, Word]] = {
    "chunked": (functools.partial(Way.cached, prefill_chunk_size=3), WRONG_WITH_CACHE, CACHE_CHANGES_MODEL),
}
"""At level thorough."""

WITHOUT_ADAPTER = (CACHE, PADDED)
"""Ways that are computed with the adapter off too, at level thorough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exact:
    """What judges the rows of sequences, whichever way they are computed.

    Attributes
    ----------
    sequences : Sequences
    shapes : dict
        Of the exact results, by the names of their places.
    undecided : dict
        Rows whose decisions rounding may turn, by block; of the empty name, in every block.
    whole : dict
        The rows of whole sequences on this device, by the names of their places.
    """

    context: Context
    mode: str
    reference: Reference
    sequences: Sequences
    shapes: dict[str, torch.Size]
    undecided: dict[str, torch.Tensor]
    whole: dict[str, torch.Tensor]

    def given(self, name: str) -> torch.Tensor | None:
        found = self.reference.read(given_name(self.mode, name))
        return None if found is None else mapped(found)

    def left_out(self, layer: str) -> torch.Tensor:
        """Return which rows of a module's result are not judged."""
        found = [rows for block, rows in self.undecided.items() if not block or f"{layer}.".startswith(f"{block}.")]
        return torch.stack(found).any(0) if found else torch.zeros(0, dtype=torch.bool)

    def ratio(self, name: str, rows: list[Rows], dtype: torch.dtype) -> float | None:
        """Return the figures of a way's rows over their limits; None where they are not judged."""
        exact, layer = self.reference.known(f"{self.mode}::{name}"), ResultPlace.of(name).layer
        flat = by_rows(exact, self.sequences.length)
        assert flat is not None
        ratios = []
        for sequence in {some.sequence for some in rows}:
            own = [some for some in rows if some.sequence == sequence]
            actual = in_place(own, flat.to(dtype), self.left_out(layer)).reshape(exact.shape)
            ratios.append(block_ratio(self.context, STAGE, layer, actual, self.reference, f"{self.mode}::{name}"))
        return max((one for one in ratios if one is not None), key=lambda one: (one != one, one), default=None)

    def has_same_bits(self, name: str, rows: list[Rows]) -> bool:
        """Report whether a way's rows have the bits that they have in whole sequences."""
        return all(torch.equal(self.whole[name][some.index], some.values) for some in rows)


def run(context: Context) -> None:
    """Compute the sequences of the stage `forward` in every way, and judge the rows of each module."""
    sequences, reason = _inputs(context)
    if sequences is None:
        _skip(context, WHOLE_MODEL, "everything", reason)
        return
    reference = wait_for(context.scratch, context.events)
    mode = ADAPTER_OFF if context.job.case.adapter is None else ADAPTER_ON
    failure = reference if isinstance(reference, str) else reference.tables.failures.get(mode)
    if isinstance(reference, str) or failure:
        context.record.fact(STAGE, WHOLE_MODEL, "everything", status="blocked", reason=failure)
        return
    is_thorough = context.job.case.level == Level.THOROUGH
    ways = [(mode, name) for name in (*WAYS, *(MORE_WAYS if is_thorough else ()))]
    if is_thorough and mode == ADAPTER_ON and ADAPTER_OFF not in reference.tables.failures:
        ways += [(ADAPTER_OFF, name) for name in WITHOUT_ADAPTER]
    exact = _exact(context, sequences, mode, reference)
    for done, (one, name) in enumerate(ways):
        title = name if one == mode else f"{name}.{one}"
        context.events.step(title, done, len(ways))
        try:
            exact = exact if one == exact.mode else _exact(context, sequences, one, reference)
            _judge(context, name, exact, title)
        except Skip as why:
            _skip(context, WHOLE_MODEL, title, f"the model does not run in this way: {why}")
    context.events.step("the text that it writes", len(ways), len(ways))
    try:
        record_text(context, sequences.part(_SOME))
    except Skip as why:
        _skip(context, WHOLE_MODEL, TEXT, str(why))


def _inputs(context: Context) -> tuple[Sequences | None, str]:
    """Return the sequences of the stage `forward`, or None and why they are not generated in other ways."""
    case, model = context.job.case, context.model
    if standard.FORWARD not in case.stages:
        return None, "the stage forward, whose float64 results judge it, is not run"
    if not getattr(base_of(model), "can_generate", lambda: False)():
        return None, "the model generates no text"
    of_base = set(base_of(model).modules())
    if any(block not in of_base for block in blocks_of(model).values()):
        return None, "the adapter has blocks of its own, which it calls by itself"
    inputs, reason = fixed_inputs(case, context.base.model)
    if inputs is None:
        return None, reason
    has_encoder = bool(getattr(model.config, "is_encoder_decoder", False))
    if has_encoder and any(config.is_prompt_learning for config in getattr(model, "peft_config", {}).values()):
        return None, "the adapter puts tokens of its own before what the encoder reads"
    name, other = (DECODER_IDS, "input_ids") if has_encoder else ("input_ids", "pixel_values")
    ids, mask = inputs.get(name), inputs.get("attention_mask")
    if ids is None or ids.dim() != 2 or set(inputs) - {name, "attention_mask", other}:
        return None, "the inputs are not token ids, or token ids and an image for each text"
    if mask is not None and not mask.all():
        return None, "the inputs have a mask"
    mark: Any = getattr(model.config, "image_token_id", None)
    of_image = 0 if mark is None else int((ids == mark).sum(1).max())
    prompt = max(ids.shape[1] // 2, of_image + max(PADS) + 1 if of_image else 0)
    if min(prompt, ids.shape[1] - prompt) < 2:
        return None, "the sequences have fewer than four tokens"
    own = {name, *(() if has_encoder else ("attention_mask",))}
    beside = {name: one for name, one in inputs.items() if name not in own}
    if any(len(one) != len(ids) for one in beside.values()):
        return None, "not every text has an image"
    return Sequences(ids=ids, prompt=prompt, beside=beside, has_encoder=has_encoder), ""


def _exact(context: Context, sequences: Sequences, mode: str, reference: Reference) -> _Exact:
    """Run whole sequences once more, and note where what is decided there may turn."""
    inputs = sequences.inputs(sequences.ids)
    logits = reference.read(f"{mode}::{ResultPlace(LOGITS)}")
    if logits is not None and len(logits.shape) == 3:
        sequences = replace(sequences, virtual=logits.shape[1] - sequences.ids.shape[1])
    names = [name for name in reference.tables.names if name.startswith(f"{mode}::")]
    if sequences.has_encoder:  # which reads the whole text at once in every way
        own = place_of_encoder(context.model)
        names = [name for name in names if not name.removeprefix(f"{mode}::").startswith(own)]
    whole: dict[str, torch.Tensor] = {}
    decided: list[str] = []
    places = Places(context.model)
    table = Table.of(_decisions(context)).passes.get(mode, ())

    def note(_: Decision) -> None:
        decided.append(places.now)

    def take(place: ResultPlace, result: torch.Tensor) -> None:
        rows = by_rows(result.detach().to(CPU), sequences.length) if result.is_floating_point() else None
        if rows is not None and f"{mode}::{place}" in names:
            whole[str(place)] = rows

    kernels = half_kernels.replacement(context.model, tokens_of(inputs))
    watch = deciding(note if table else None, gradient=False, places=places)
    with half_kernels.computing(kernels), _in(context.model, mode), watch:
        run_by_blocks(context.model, inputs, functools.partial(reference.given, mode), take, began=context.events.block)
    shapes = {name: reference.known(f"{mode}::{name}").shape for name in whole}
    return _Exact(
        context=context,
        mode=mode,
        reference=reference,
        sequences=sequences.part(_SOME),
        shapes=shapes,
        whole=whole,
        undecided=_undecided(context, table, decided, len(sequences.ids) * sequences.length),
    )


def _undecided(context: Context, table: tuple[Settled, ...], places: list[str], count: int) -> dict[str, torch.Tensor]:
    """Return the rows in which a decision may turn by rounding, by the block that decides."""
    blocks = blocks_of(context.model)
    title = cpu_error.products_on(context.model, context.device)
    file, found = ArrayFile(_decisions(context)), dict[str, torch.Tensor]()
    for number, settled in enumerate(table):
        if settled.name in CONTINUOUS:
            continue
        place = places[number] if len(places) == len(table) else ""
        block = next((block for block in blocks if f"{place}.".startswith(f"{block}.")), "")
        margins = file.read(settled.exact).to(torch.float64)
        if settled.dim is not None:  # between the last that is chosen and the first that is not
            chosen = settled.decided.shape[settled.dim]
            if chosen == margins.shape[settled.dim]:
                continue
            best = margins.topk(chosen + 1, dim=settled.dim).values
            margins = best.select(settled.dim, chosen - 1) - best.select(settled.dim, chosen)
        near = margins <= float(settled.allowed.get(title, math.inf))
        if count in (near.shape[:1].numel(), near.shape[:2].numel()):
            rows = near.reshape(count, -1).any(1)
        else:  # in another order than that of tokens
            rows = near.any().expand(count)
        found[block] = found[block] | rows if block in found else rows
    return found


def _in(model: Any, mode: str) -> AbstractContextManager[None]:
    """Compute without the adapter of a model where a mode says so."""
    return disabled(model) if mode == ADAPTER_OFF and hasattr(model, "disable_adapter") else nullcontext()


def _judge(context: Context, name: str, exact: _Exact, title: str) -> None:
    """Run a way, and record by a title how the rows of each module stand to their limits.

    Raises
    ------
    Skip
        The model does not run in this way.
    """
    _, of_device, of_model = {**WAYS, **MORE_WAYS}[name]
    if name == STATIC and not base_of(context.model)._supports_default_dynamic_cache():
        raise Skip("it has a cache of its own")
    with model_code(context.model):
        way = _run(context.model, name, exact)
    found = {place: rows for place, rows in way.found.items() if rows}
    ratios = {place: exact.ratio(place, rows, rows[0].values.dtype) for place, rows in found.items()}
    wrong = [place for place, ratio in ratios.items() if ratio is not None and not passes(ratio)]
    word = None
    if wrong:
        word = of_model if _is_wrong_in_float64(context, name, exact, wrong[0]) else of_device
    for place, ratio in ratios.items():
        layer, part = ResultPlace.of(place)
        if ratio is None or not context.record.wants(STAGE, layer):
            continue
        is_same = exact.has_same_bits(place, found[place])
        status: RecordStatus = "outside" if place in wrong else "equal" if is_same else "within"
        left_out = exact.left_out(layer)
        context.record.fact(
            STAGE,
            layer,
            f"{title}.{part}" if part else title,
            status=status,
            share=ratio,
            word=_word(word, found[place]) if place in wrong else None,
            evidence={
                "rows": sum(len(one.index) for one in found[place]),
                "bits_of_whole_sequences": is_same,
                "undecided_rows": int(sum(left_out[one.index].sum() for one in found[place]) if len(left_out) else 0),
            },
        )
    for place, shape in way.other_shapes.items():
        layer, part = ResultPlace.of(place)
        if not part and context.record.wants(STAGE, layer):
            _skip(context, layer, f"{title}.shape", f"it has no row for each token in this way: {list(shape)}")


def _word(word: Word | None, rows: list[Rows]) -> Word | None:
    """Return what is said of wrong rows: of NaN that, as a half type whose range the model's code leaves has it."""
    return word if all(bool(one.values.isfinite().all()) for one in rows) else words.NON_FINITE


def _run(model: torch.nn.Module, name: str, exact: _Exact) -> Way:
    way = Way(model=model, sequences=exact.sequences, given=exact.given, shapes=exact.shapes)
    with half_kernels.computing(half_kernels.replacement(model, exact.sequences.ids.numel())), _in(model, exact.mode):
        {**WAYS, **MORE_WAYS}[name][0](way)
    return way


def _is_wrong_in_float64(context: Context, name: str, exact: _Exact, place: str) -> bool:
    """Report whether a result is wrong in this way without any rounding.

    It is then the model's code, or a kernel that is wrong in every dtype.
    """
    with context.events.on_cpu():
        model = context.model if context.device.type == CPU else load_model(context.job.case, CPU)
        try:
            with model_code(model), torch.no_grad(), exact_layers(model), Float64Mode():
                rows = _run(model, name, exact).found.get(place, [])
        except Skip:  # code that insists on its own dtype
            return False
    ratio = exact.ratio(place, rows, exact.whole[place].dtype)
    return ratio is not None and not passes(ratio)


def _decisions(context: Context) -> Any:
    return context.scratch / DECISIONS_FILE.format(standard.FORWARD)


def _skip(context: Context, layer: str, tensor: str, reason: str) -> None:
    context.record.fact(STAGE, layer, tensor, status="skipped", reason=reason)
