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
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from consistency.capture.names import ADAPTER_OFF, ADAPTER_ON, WHOLE_MODEL
from consistency.capture.records import RecordStatus
from consistency.case import standard
from consistency.case.stage import Level
from consistency.devices.backends import CPU
from consistency.extras.serving.generation import spec
from consistency.extras.serving.generation.long_cache import judge_long_cache
from consistency.extras.serving.generation.spec import (
    BATCH_CHANGES_MODEL,
    CACHE_CHANGES_MODEL,
    LONG_CACHE,
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
from consistency.worker.judging.long_text import long_mode, long_text
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
"""The first sequences of the stage `forward`, which are computed in every way."""

ALONE, CACHE, STATIC, PADDED = spec.WAYS

WAYS: dict[str, tuple[Callable[[Way], None], Word, Word]] = {
    ALONE: (Way.alone, WRONG_ALONE, BATCH_CHANGES_MODEL),
    CACHE: (Way.cached, WRONG_WITH_CACHE, CACHE_CHANGES_MODEL),
    STATIC: (
        functools.partial(Way.cached, cache_implementation="static", disable_compile=True),
        WRONG_WITH_CACHE,
        CACHE_CHANGES_MODEL,
    ),
    PADDED: (Way.padded, WRONG_WITH_PADDING, PADDING_CHANGES_MODEL),
}
"""For each way: how it is computed, the word of a wrong device, and the word of wrong code of the model."""

MORE_WAYS: dict[str, tuple[Callable[[Way], None], Word, Word]] = {
    "chunked": (functools.partial(Way.cached, prefill_chunk_size=3), WRONG_WITH_CACHE, CACHE_CHANGES_MODEL),
}
"""Further ways, at level thorough."""

WITHOUT_ADAPTER = (CACHE, PADDED)
"""Ways that are computed with the adapter off too, at level thorough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exact:
    """The limits and exact results that judge the rows of sequences, whichever way they are computed.

    Attributes
    ----------
    sequences : Sequences
        Those that are computed in every way: the first ones of the stage `forward`.
    shapes : dict
        Shapes of the exact results, by the names of their places.
    undecided : dict
        For each block, a mask of the rows whose decisions rounding may turn; under the empty name, those of every
        block.
    whole : dict
        Rows of a pass over whole sequences on this device, by the names of their places.
    """

    context: Context
    mode: str
    reference: Reference
    sequences: Sequences
    shapes: dict[str, torch.Size]
    undecided: dict[str, torch.Tensor]
    whole: dict[str, torch.Tensor]

    def block_input(self, name: str) -> torch.Tensor | None:
        """Return the input of a block as the stage `forward` gives it; None where the reference has none."""
        tensor = self.reference.read(given_name(self.mode, name))
        if tensor is None:
            return None
        return mapped(tensor)

    def undecided_rows(self, layer: str) -> torch.Tensor:
        """Return a mask of the rows of a module's result that are not judged; empty where all rows are."""
        masks = [rows for block, rows in self.undecided.items() if not block or f"{layer}.".startswith(f"{block}.")]
        if not masks:
            return torch.zeros(0, dtype=torch.bool)
        return torch.stack(masks).any(0)

    def ratio(self, name: str, rows: list[Rows], dtype: torch.dtype) -> float | None:
        """Return the largest ratio of error and limit in the rows of a way; None where no row is judged.

        NaN is taken for larger than any number.
        """
        exact, layer = self.reference.known(f"{self.mode}::{name}"), ResultPlace.of(name).layer
        flat = by_rows(exact, self.sequences.length)
        assert flat is not None
        ratios = []
        for sequence in {piece.sequence for piece in rows}:
            pieces = [piece for piece in rows if piece.sequence == sequence]
            # rows that this sequence does not have keep their exact values, so they add no error
            actual = in_place(pieces, flat.to(dtype), self.undecided_rows(layer)).reshape(exact.shape)
            ratio = block_ratio(self.context, STAGE, layer, actual, self.reference, f"{self.mode}::{name}")
            if ratio is not None:
                ratios.append(ratio)
        return max(ratios, key=lambda ratio: (math.isnan(ratio), ratio), default=None)

    def has_same_bits(self, name: str, rows: list[Rows]) -> bool:
        """Report whether a way's rows have the bits that they have in whole sequences."""
        return all(torch.equal(self.whole[name][piece.index], piece.values) for piece in rows)


def run(context: Context) -> None:
    """Compute the sequences of the stage `forward` in every way, and judge the rows of each module."""
    sequences, reason = _find_sequences(context)
    if sequences is None:
        _skip(context, WHOLE_MODEL, "everything", reason)
        return
    reference = wait_for(context.scratch, context.events)
    mode = ADAPTER_OFF if context.job.case.adapter is None else ADAPTER_ON
    failure = reference if isinstance(reference, str) else reference.tables.failures.get(mode)
    if isinstance(reference, str) or failure:
        context.record.fact(STAGE, WHOLE_MODEL, "everything", status="blocked", reason=failure)
        return
    modes_and_ways = _modes_and_ways(context, mode, reference)
    # exact results and block inputs are those of one mode, so they are read anew where the mode changes
    exact = _run_whole_sequences(context, sequences, mode, reference)
    for done, (way_mode, name) in enumerate(modes_and_ways):
        title = name if way_mode == mode else f"{name}.{way_mode}"
        context.events.step(title, done, len(modes_and_ways))
        try:
            if way_mode != exact.mode:
                exact = _run_whole_sequences(context, sequences, way_mode, reference)
            _judge_way(context, name, exact, title)
        except Skip as why:
            _skip(context, WHOLE_MODEL, title, f"the model does not run in this way: {why}")
    _judge_long_text(context, mode, reference)
    context.events.step("the text that it writes", len(modes_and_ways), len(modes_and_ways))
    try:
        record_text(context, sequences.part(_SOME))
    except Skip as why:
        _skip(context, WHOLE_MODEL, TEXT, str(why))


def _judge_long_text(context: Context, mode: str, reference: Reference) -> None:
    """Judge the end of the long text with a cache, where the stage `forward` has compared that text."""
    text, _ = long_text(context)
    if text is None or long_mode(mode) in reference.tables.failures:
        return
    try:
        judge_long_cache(context, text, mode, reference)
    except Skip as why:
        _skip(context, WHOLE_MODEL, LONG_CACHE, f"the model does not run in this way: {why}")


def _modes_and_ways(context: Context, mode: str, reference: Reference) -> list[tuple[str, str]]:
    """Return each mode and way to compute, those of the case's own mode first: whole sequences run once per mode."""
    names = [*WAYS]
    is_thorough = context.job.case.level == Level.THOROUGH
    if is_thorough:
        names += MORE_WAYS
    modes_and_ways = [(mode, name) for name in names]
    if is_thorough and mode == ADAPTER_ON and ADAPTER_OFF not in reference.tables.failures:
        modes_and_ways += [(ADAPTER_OFF, name) for name in WITHOUT_ADAPTER]
    return modes_and_ways


def _find_sequences(context: Context) -> tuple[Sequences | None, str]:
    """Return the sequences of the stage `forward`, or None and why they are not generated in other ways."""
    reason = _why_not_generated(context)
    if reason:
        return None, reason
    inputs, reason = fixed_inputs(context.job.case, context.base.model)
    if inputs is None:
        return None, reason
    config = context.model.config
    has_encoder = bool(getattr(config, "is_encoder_decoder", False))
    reason = _why_not_sequences(context.model, inputs, has_encoder=has_encoder)
    if reason:
        return None, reason
    ids_name = DECODER_IDS if has_encoder else "input_ids"
    ids = inputs[ids_name]
    prompt = _prompt_length(ids, getattr(config, "image_token_id", None))
    if min(prompt, ids.shape[1] - prompt) < 2:
        return None, "the sequences have fewer than four tokens"
    own_names = {ids_name}
    if not has_encoder:  # the mask of an encoder is of its text, and is given with it
        own_names.add("attention_mask")
    beside = {name: tensor for name, tensor in inputs.items() if name not in own_names}
    if any(len(tensor) != len(ids) for tensor in beside.values()):
        return None, "not every text has an image"
    return Sequences(ids=ids, prompt=prompt, beside=beside, has_encoder=has_encoder), ""


def _why_not_generated(context: Context) -> str:
    """Return why a model is not run in other ways, whatever its inputs; empty where it is."""
    model = context.model
    if standard.FORWARD not in context.job.case.stages:
        return "the stage forward, whose float64 results judge it, is not run"
    if not getattr(base_of(model), "can_generate", lambda: False)():
        return "the model generates no text"
    modules_of_base = set(base_of(model).modules())
    if any(block not in modules_of_base for block in blocks_of(model).values()):
        return "the adapter has blocks of its own, which it calls by itself"
    return ""


def _why_not_sequences(model: Any, inputs: Mapping[str, torch.Tensor], *, has_encoder: bool) -> str:
    """Return why inputs are no texts to be computed token by token; empty where they are."""
    if has_encoder and any(config.is_prompt_learning for config in getattr(model, "peft_config", {}).values()):
        return "the adapter puts tokens of its own before what the encoder reads"
    names = (DECODER_IDS, "input_ids") if has_encoder else ("input_ids", "pixel_values")
    ids, mask = inputs.get(names[0]), inputs.get("attention_mask")
    if ids is None or ids.dim() != 2 or set(inputs) - {*names, "attention_mask"}:
        return "the inputs are not token ids, or token ids and an image for each text"
    if mask is not None and not mask.all():
        return "the inputs have a mask"
    return ""


def _prompt_length(ids: torch.Tensor, image_token: Any) -> int:
    """Return how many tokens of each sequence are the prompt: half of it, and all tokens of an image.

    After an image the prompt has a token more than the longest padding.
    """
    half = ids.shape[1] // 2
    if image_token is None:
        return half
    image_tokens = int((ids == image_token).sum(1).max())
    if image_tokens == 0:
        return half
    return max(half, image_tokens + max(PADS) + 1)


def _run_whole_sequences(context: Context, sequences: Sequences, mode: str, reference: Reference) -> _Exact:
    """Run whole sequences once more, and note where a decision may turn by rounding."""
    inputs = sequences.inputs(sequences.ids)
    logits = reference.read(f"{mode}::{ResultPlace(LOGITS)}")
    if logits is not None and len(logits.shape) == 3:
        sequences = replace(sequences, virtual=logits.shape[1] - sequences.ids.shape[1])
    names = [name for name in reference.tables.names if name.startswith(f"{mode}::")]
    if sequences.has_encoder:  # which reads the whole text at once in every way
        encoder = place_of_encoder(context.model)
        names = [name for name in names if not name.removeprefix(f"{mode}::").startswith(encoder)]
    whole: dict[str, torch.Tensor] = {}
    deciding_modules: list[str] = []
    places = Places(context.model)
    table = Table.of(_decisions_file(context)).passes.get(mode, ())

    def note(_: Decision) -> None:
        deciding_modules.append(places.now)

    def take(place: ResultPlace, result: torch.Tensor) -> None:
        if not result.is_floating_point():
            return
        rows = by_rows(result.detach().to(CPU), sequences.length)
        if rows is not None and f"{mode}::{place}" in names:
            whole[str(place)] = rows

    block_inputs = functools.partial(reference.given_value, mode)
    kernels = half_kernels.replacement(context.model, tokens_of(inputs))
    watch = deciding(note if table else None, gradient=False, places=places)
    with half_kernels.computing(kernels), _in_mode(context.model, mode), watch:
        run_by_blocks(context.model, inputs, block_inputs, take, began=context.events.block)
    shapes = {name: reference.known(f"{mode}::{name}").shape for name in whole}
    row_count = len(sequences.ids) * sequences.length
    return _Exact(
        context=context,
        mode=mode,
        reference=reference,
        sequences=sequences.part(_SOME),
        shapes=shapes,
        whole=whole,
        undecided=_undecided_by_block(context, table, deciding_modules, row_count),
    )


def _undecided_by_block(
    context: Context, table: tuple[Settled, ...], modules: list[str], row_count: int
) -> dict[str, torch.Tensor]:
    """Return masks of the rows in which a decision may turn by rounding, by the block that decides.

    Parameters
    ----------
    table : tuple of Settled
        The decisions of the exact pass.
    modules : list of str
        The module that decided, for each decision of the pass on this device. Where there are more or fewer of these
        than in the table, no decision is told by its module, and each counts in every block.
    row_count : int
        Rows of all sequences: the length of each mask.
    """
    blocks = blocks_of(context.model)
    products = cpu_error.products_on(context.model, context.device)
    file = ArrayFile(_decisions_file(context))
    masks: dict[str, torch.Tensor] = {}
    for number, settled in enumerate(table):
        if settled.name in CONTINUOUS:
            continue
        margins = _margins(settled, file.read(settled.exact).to(torch.float64))
        if margins is None:
            continue
        module = modules[number] if len(modules) == len(table) else ""
        block = next((block for block in blocks if f"{module}.".startswith(f"{block}.")), "")
        is_near = margins <= float(settled.allowed.get(products, math.inf))
        if row_count in (is_near.shape[:1].numel(), is_near.shape[:2].numel()):
            rows = is_near.reshape(row_count, -1).any(1)
        else:  # in another order than that of tokens
            rows = is_near.any().expand(row_count)
        if block in masks:
            rows = masks[block] | rows
        masks[block] = rows
    return masks


def _margins(settled: Settled, exact: torch.Tensor) -> torch.Tensor | None:
    """Return how far each decision is from turning; None where everything is chosen, so nothing can turn.

    A selection turns between the last entry that is chosen and the first that is not.
    """
    if settled.dim is None:
        return exact
    chosen = settled.decided.shape[settled.dim]
    if chosen == exact.shape[settled.dim]:
        return None
    largest = exact.topk(chosen + 1, dim=settled.dim).values
    return largest.select(settled.dim, chosen - 1) - largest.select(settled.dim, chosen)


def _in_mode(model: Any, mode: str) -> AbstractContextManager[None]:
    """Disable the adapter of a model, if it has one, in the mode without it."""
    if mode == ADAPTER_OFF and hasattr(model, "disable_adapter"):
        return disabled(model)
    return nullcontext()


def _judge_way(context: Context, name: str, exact: _Exact, title: str) -> None:
    """Run a way, and record by a title the ratio of each module's rows to their limits.

    Raises
    ------
    Skip
        The model does not run in this way.
    """
    if name == STATIC and not base_of(context.model)._supports_default_dynamic_cache():
        raise Skip("it has a cache of its own")
    with model_code(context.model):
        way = _run_way(context.model, name, exact)
    rows_by_place = {place: rows for place, rows in way.rows_by_place.items() if rows}
    ratios = {place: exact.ratio(place, rows, rows[0].values.dtype) for place, rows in rows_by_place.items()}
    # `not passes`: a ratio of NaN is wrong too
    wrong_places = [place for place, ratio in ratios.items() if ratio is not None and not passes(ratio)]
    word = None
    if wrong_places:
        _, word_of_device, word_of_model = {**WAYS, **MORE_WAYS}[name]
        # the first wrong place stands for all: the way runs once more, in float64
        is_of_model = _is_wrong_in_float64(context, name, exact, wrong_places[0])
        word = word_of_model if is_of_model else word_of_device
    for place, ratio in ratios.items():
        layer = ResultPlace.of(place).layer
        if ratio is not None and context.record.wants(STAGE, layer):
            word_of_place = word if place in wrong_places else None
            _record_place(context, title, place, rows_by_place[place], exact, ratio=ratio, word=word_of_place)
    for place, shape in way.other_shapes.items():
        layer, part = ResultPlace.of(place)
        if not part and context.record.wants(STAGE, layer):
            _skip(context, layer, f"{title}.shape", f"it has no row for each token in this way: {list(shape)}")


def _record_place(
    context: Context, title: str, place: str, rows: list[Rows], exact: _Exact, *, ratio: float, word: Word | None
) -> None:
    """Record the rows of one place; `word` is None where they are right."""
    layer, part = ResultPlace.of(place)
    is_same = exact.has_same_bits(place, rows)
    status: RecordStatus = "equal" if is_same else "within"
    if word is not None:
        status = "outside"
        if not all(bool(piece.values.isfinite().all()) for piece in rows):
            word = words.NON_FINITE  # as where the model's code leaves the range of a half type
    undecided = exact.undecided_rows(layer)
    undecided_count = 0
    if len(undecided):
        undecided_count = int(sum(undecided[piece.index].sum() for piece in rows))
    context.record.fact(
        STAGE,
        layer,
        f"{title}.{part}" if part else title,
        status=status,
        ratio=ratio,
        word=word,
        evidence={
            "rows": sum(len(piece.index) for piece in rows),
            "bits_of_whole_sequences": is_same,
            "undecided_rows": undecided_count,
        },
    )


def _run_way(model: torch.nn.Module, name: str, exact: _Exact) -> Way:
    """Compute the sequences in a way, and return it with the rows of each place."""
    way = Way(model=model, sequences=exact.sequences, given=exact.block_input, shapes=exact.shapes)
    compute, _, _ = {**WAYS, **MORE_WAYS}[name]
    kernels = half_kernels.replacement(model, exact.sequences.ids.numel())
    with half_kernels.computing(kernels), _in_mode(model, exact.mode):
        compute(way)
    return way


def _is_wrong_in_float64(context: Context, name: str, exact: _Exact, place: str) -> bool:
    """Report whether a result is wrong in this way without any rounding.

    It is then the model's code, or a kernel that is wrong in every dtype.
    """
    with context.events.on_cpu():
        model = context.model
        if context.device.type != CPU:
            model = load_model(context.job.case, CPU)
        try:
            with model_code(model), torch.no_grad(), exact_layers(model), Float64Mode():
                rows = _run_way(model, name, exact).rows_by_place.get(place, [])
        except Skip:  # code that insists on its own dtype
            return False
    ratio = exact.ratio(place, rows, exact.whole[place].dtype)
    return ratio is not None and not passes(ratio)


def _decisions_file(context: Context) -> Path:
    """Return where the stage `forward` keeps the decisions of its exact pass."""
    return context.scratch / DECISIONS_FILE.format(standard.FORWARD)


def _skip(context: Context, layer: str, tensor: str, reason: str) -> None:
    context.record.fact(STAGE, layer, tensor, status="skipped", reason=reason)
