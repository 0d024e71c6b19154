"""The end of the long text, token by token with a cache of all before it: one query and many keys.

The blocks and the sampled rows are those of the stage `forward`, which has given values, exact results and limits of
them. The last tokens are sampled rows, so each step is judged, and the sampled rows of the prompt beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from consistency.capture.names import LONG_TOKENS
from consistency.capture.records import RecordStatus
from consistency.devices.backends import CPU
from consistency.extras.serving.generation.spec import CACHE_CHANGES_MODEL, GENERATION, LONG_CACHE, WRONG_WITH_CACHE
from consistency.numerics import words
from consistency.numerics.exact import Float64Mode
from consistency.numerics.file_tensor import mapped
from consistency.numerics.rules import passes
from consistency.numerics.words import Word
from consistency.worker.context import Context
from consistency.worker.judging.block_rule import block_ratio
from consistency.worker.judging.long_text import LongText, long_mode
from consistency.worker.model import half_kernels
from consistency.worker.model.block_pass import ResultPlace
from consistency.worker.model.float64_reference import Reference, given_name
from consistency.worker.model.loading import load_model
from consistency.worker.model.running import model_code
from consistency.worker.model.sampled_rows import few_blocks
from consistency.worker.model.ways import Rows, RowsByPlace, Sequences, Way
from consistency.worker.quantized.exact import exact_layers
from consistency.worker.recorder import Skip

STEPS = 3
"""Tokens that are computed one by one: as many at the end of a text are always sampled."""


def judge_long_cache(context: Context, text: LongText, mode: str, reference: Reference) -> None:
    """Compute the long text with a cache on this device, and record the ratio of each result's rows to their limits.

    Raises
    ------
    Skip
        The model does not run so.
    """
    cache = _LongCache(context=context, text=text, mode=long_mode(mode), reference=reference)
    with half_kernels.computing(half_kernels.replacement(context.model, text.tokens)):
        rows_by_place = cache.run(context.model)
    results = {place: cache.result(place, rows) for place, rows in rows_by_place.items()}
    ratios = {place: cache.ratio(place, result) for place, result in results.items()}
    wrong = [place for place, ratio in ratios.items() if ratio is not None and not passes(ratio)]
    word: Word = WRONG_WITH_CACHE
    if wrong and cache.is_wrong_in_float64(wrong[0]):
        word = CACHE_CHANGES_MODEL
    for place, ratio in ratios.items():
        layer, part = ResultPlace.of(place)
        if ratio is None or not context.record.wants(GENERATION, layer):
            continue
        status: RecordStatus = "within"
        word_of_place = None
        if place in wrong:
            status = "outside"
            word_of_place = word if bool(results[place].isfinite().all()) else words.NON_FINITE
        context.record.fact(
            GENERATION,
            layer,
            f"{LONG_CACHE}.{part}" if part else LONG_CACHE,
            status=status,
            ratio=ratio,
            word=word_of_place,
            evidence={LONG_TOKENS: text.tokens, "steps": STEPS},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LongCache:
    """The long text with a cache, and what judges its rows."""

    context: Context
    text: LongText
    mode: str
    """Name of the long text in the reference."""
    reference: Reference

    def run(self, model: torch.nn.Module) -> RowsByPlace:
        """Compute all tokens but the last ones at once, and these one by one; return the rows of each place."""
        sequences = Sequences(ids=self.text.inputs["input_ids"], prompt=self.text.tokens - STEPS)
        way = Way(model=model, sequences=sequences, given=self._given, shapes=self._shapes())
        with model_code(model), few_blocks(model, self.text.blocks):
            way.cached()
        return {place: rows for place, rows in way.rows_by_place.items() if rows}

    def _given(self, name: str) -> torch.Tensor | None:
        value = self.reference.read(given_name(self.mode, name))
        return None if value is None else mapped(value)

    def _shapes(self) -> dict[str, torch.Size]:
        """Return the shapes that exact results of all tokens would have, by the names of their places."""
        shapes = {}
        for full_name in self.reference.tables.names:
            mode, _, name = full_name.partition("::")
            if mode != self.mode:
                continue
            shape = list(self.reference.known(full_name).shape)
            # results with a row for each token in their second dimension, as those of modules
            if len(shape) > 2 and shape[:2] == [1, len(self.text.rows)]:
                shapes[name] = torch.Size([1, self.text.tokens, *shape[2:]])
        return shapes

    def result(self, place: str, rows: list[Rows]) -> torch.Tensor:
        """Return the exact result of a place with the rows of a way in their places, in the dtype of these."""
        exact = self.reference.known(f"{self.mode}::{place}")
        result = exact.to(rows[0].values.dtype).reshape(len(self.text.rows), -1).clone()
        number_of_token = {token: number for number, token in enumerate(self.text.rows.tolist())}
        for piece in rows:
            for token, values in zip(piece.index.tolist(), piece.values, strict=True):
                if token in number_of_token:
                    result[number_of_token[token]] = values
        return result.reshape(exact.shape)

    def ratio(self, place: str, result: torch.Tensor) -> float | None:
        """Return the largest ratio of error and limit; None where the result is not judged."""
        layer = ResultPlace.of(place).layer
        return block_ratio(self.context, GENERATION, layer, result, self.reference, f"{self.mode}::{place}")

    def is_wrong_in_float64(self, place: str) -> bool:
        """Report whether a result is wrong in this way without any rounding: then it is the model's code."""
        dtype = next(p.dtype for p in self.context.model.parameters() if p.is_floating_point())
        with self.context.events.on_cpu():
            model = self.context.model
            if self.context.device.type != CPU:
                model = load_model(self.context.job.case, CPU)
            try:
                with torch.no_grad(), exact_layers(model), Float64Mode():
                    rows = self.run(model).get(place, [])
            except Skip:  # code that insists on its own dtype
                return False
        if not rows:
            return False
        ratio = self.ratio(place, self.result(place, rows).to(dtype))
        return ratio is not None and not passes(ratio)
