"""Ways in which a model computes the same tokens: alone, step by step with a cache, beside others in a padded batch.

Each is the model's own call, by its own `generate` where there is a cache, with a logits processor that chooses the
given tokens. What enters and leaves each block is replaced by the rows of a pass over the whole sequences, so the same
exact values judge each block's rows, whichever way they are computed. Of an encoder and a decoder the sequences are
those of the decoder, whose blocks get what the encoder left in the whole pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from consistency.worker.model.block_pass import BlockPass, ResultPlace, Take
from consistency.worker.model.running import Activations, base_of, device_of, outputs, without_gradients

LOGITS = "logits"

PADS = (0, 3, 7, 1)
"""Before the sequences of a padded batch, in turn; after all texts that an encoder reads, the largest of these."""

DECODER_IDS = "decoder_input_ids"

_FROM_ENCODER = "::input.encoder_hidden_states"
"""In the name of what the decoder's blocks are given of an encoder that changes what its last block left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Tokens to compute, and what the model reads beside them.

    Attributes
    ----------
    ids : torch.Tensor
        `(sequences, length)`, on the CPU.
    prompt : int
        Tokens of each before those that are generated.
    beside : mapping of str to torch.Tensor
        With a row for each sequence: images, or the text that an encoder reads.
    has_encoder : bool
        The ids are those of a decoder.
    virtual : int
        Rows before those of the tokens, that an adapter puts there.
    """

    ids: torch.Tensor
    prompt: int
    beside: Activations = field(default_factory=dict)
    has_encoder: bool = False
    virtual: int = 0

    @property
    def length(self) -> int:
        """Of each in rows."""
        return self.virtual + self.ids.shape[1]

    @property
    def name(self) -> str:
        """Of the argument that takes the ids."""
        return DECODER_IDS if self.has_encoder else "input_ids"

    def part(self, rows: slice) -> Sequences:
        """Return some of the sequences."""
        return replace(self, ids=self.ids[rows], beside={name: one[rows] for name, one in self.beside.items()})

    def inputs(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> Activations:
        """Return the keyword arguments of a pass over other tokens in their place, on the device of these."""
        beside = {name: one.to(ids.device) for name, one in self.beside.items()}
        if self.has_encoder:
            return {DECODER_IDS: ids, **beside}
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids) if mask is None else mask, **beside}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Some rows of one result.

    Attributes
    ----------
    index : torch.Tensor
        `(rows,)`: sequence times length, and position.
    values : torch.Tensor
        `(rows, elements)`, on the CPU.
    sequence : int or None
        The one that has computed them, of a table that all have in common.
    """

    index: torch.Tensor
    values: torch.Tensor
    sequence: int | None = None


Found = dict[str, list[Rows]]
"""By the names of the places."""

Choose = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Return the scores, `(batch, words)`, by which the next token is chosen, of the ids so far and the model's own."""


@dataclass(slots=True, kw_only=True)
class _Columns:
    """Which positions of which sequences the columns of the batch that runs now are.

    Attributes
    ----------
    length, virtual : int
        Of a sequence, in rows, and how many of these are no tokens.
    sequences, pads : torch.Tensor
        Of each row of the batch: its sequence, and the columns before its tokens.
    seen, now : int
        Columns of the calls before, and of this one.
    """

    length: int
    virtual: int
    sequences: torch.Tensor
    pads: torch.Tensor
    seen: int = 0
    now: int = 0

    def begin(self, columns: int) -> None:
        self.seen, self.now = self.seen + self.now, columns

    def positions(self, last: int | None = None) -> torch.Tensor:
        """Return the position of each column of this call, or of the last ones, `(batch, columns)`; -1 of padding."""
        columns = torch.arange(self.seen, self.seen + self.now)
        columns = (columns if last is None else columns[-last:]).expand(len(self.pads), -1)
        of_tokens = columns - self.pads[:, None]
        return torch.where(columns < self.virtual, columns, of_tokens.masked_fill(of_tokens < self.virtual, -1))

    def has(self, ids: torch.Tensor, of_sequences: torch.Tensor) -> bool:
        """Return whether the ids of this call are those of the sequences."""
        positions = self.positions()
        wanted = of_sequences[self.sequences[:, None], (positions - self.virtual).clamp(0, of_sequences.shape[1] - 1)]
        real = (positions >= 0) & (positions < self.length)
        return ids.shape == wanted.shape and bool((ids == wanted)[real].all())

    def given(self, own: torch.Tensor, whole: torch.Tensor | None, *, of_encoder: bool = False) -> torch.Tensor:
        """Return what the columns are given of a tensor of whole sequences; its own values where that has none."""
        positions = self.positions()
        if of_encoder:  # whole in each call, and perhaps padded
            if whole is None or whole.dim() != 3 or own.shape[::2] != (len(self.sequences), whole.shape[2]):
                return own
            chosen, rows = own.clone(), self.sequences if len(whole) > 1 else torch.zeros_like(self.sequences)
            chosen[:, : whole.shape[1]] = whole[rows].to(own.device, own.dtype)
            return chosen
        if whole is None or whole.shape[1:2] != (self.length,) or own.shape[2:] != whole.shape[2:]:
            return own
        if own.shape[:2] == positions.shape:
            rows = self.sequences if len(whole) > 1 else torch.zeros_like(self.sequences)
        elif own.shape[:2] == (1, self.now) == (len(whole), self.now):
            rows, positions = torch.zeros(1, dtype=torch.long), positions[:1]
        else:
            return own
        chosen = whole[rows[:, None], positions.clamp(0, self.length - 1)].to(own.device, own.dtype)
        real = ((positions >= 0) & (positions < self.length)).to(own.device)
        return torch.where(real.reshape(*real.shape, *[1] * (own.dim() - 2)), chosen, own)

    def rows(self, result: torch.Tensor, exact: torch.Size, last: int | None = None) -> Iterator[Rows]:
        """Yield the rows of a result that stand in the exact one of this shape."""
        positions, sequences = self.positions(last), self.sequences[:, None]
        if result.dim() != len(exact):
            return
        if result.dim() == 2 and len(result) == positions.numel():  # as routers have them
            result = result.reshape(*positions.shape, -1)
        real = (positions >= 0) & (positions < self.length)
        if exact[:2] == (1, self.length):
            for number, one in enumerate(result):
                if one.shape[:1] == positions.shape[1:]:
                    values = one[real[number].to(one.device)].detach().to("cpu")
                    index = positions[number][real[number]]
                    yield Rows(index=index, values=values.reshape(len(values), -1), sequence=number)
        elif result.shape[:2] == positions.shape:
            values = result[real.to(result.device)].detach().to("cpu")
            yield Rows(index=(sequences * self.length + positions)[real], values=values.reshape(len(values), -1))


@dataclass(slots=True, kw_only=True)
class Way:
    """One way of computing sequences, and the results on what is given.

    Attributes
    ----------
    sequences : Sequences
    given : callable
        Gives what a place of whole sequences is given, by name; None where it has none.
    shapes : mapping of str to torch.Size
        Of the exact results that have a row for each token: see `by_rows`.
    found : dict
        The rows of each place.
    other_shapes : dict
        Of results that have no row for each token.
    """

    model: Any
    sequences: Sequences
    given: Callable[[str], torch.Tensor | None]
    shapes: Mapping[str, torch.Size]
    found: Found = field(default_factory=dict)
    other_shapes: dict[str, torch.Size] = field(default_factory=dict)

    def alone(self) -> None:
        """Run each sequence by itself, without a cache."""
        for number in range(len(self.sequences.ids)):
            one = self.sequences.part(slice(number, number + 1))
            with self._following([number], [0], at_once=True) as take, torch.no_grad(), without_gradients(self.model):
                logits = outputs(self.model, one.inputs(one.ids)).get(LOGITS)
                if logits is not None:
                    take(ResultPlace(LOGITS), logits)

    def cached(self, **more: Any) -> None:
        """Generate the second half of the sequences, side by side; `more` goes to `generate`."""
        self._generate([0] * len(self.sequences.ids), self.sequences, **more)

    def padded(self) -> None:
        """Do the same with unlike sequences, by a mask."""
        sequences = self.sequences
        if sequences.has_encoder:
            longer = {name: torch.nn.functional.pad(one, (0, max(PADS))) for name, one in sequences.beside.items()}
            self._generate([0] * len(sequences.ids), replace(sequences, beside=longer))
            return
        most = min(sequences.ids.shape[1] // 2, sequences.prompt) - 1
        self._generate([min(PADS[number % len(PADS)], most) for number in range(len(sequences.ids))], sequences)

    def _generate(self, pads: list[int], sequences: Sequences, **more: Any) -> None:
        (count, length), width = sequences.ids.shape, sequences.prompt
        prompt, mask = torch.zeros(count, width, dtype=torch.long), torch.zeros(count, width, dtype=torch.long)
        for number, pad in enumerate(pads):
            prompt[number, pad:], mask[number, pad:] = sequences.ids[number, : width - pad], 1
        device = device_of(self.model)
        with self._following(list(range(count)), pads), without_gradients(self.model):
            inputs = sequences.inputs(prompt.to(device), mask.to(device))
            generated(self.model, inputs, length - width + 1, choosing=self._choose(pads), **more)

    def _choose(self, pads: list[int]) -> Choose:
        """Return a logits processor by which the next tokens are those of the sequences."""

        def choose(before: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            chosen = torch.full_like(scores, -torch.inf)
            for number, pad in enumerate(pads):
                position, ids = before.shape[1] - pad, self.sequences.ids
                chosen[number, int(ids[number, position]) if position < ids.shape[1] else 0] = 0
            return chosen

        return choose

    @contextmanager
    def _following(self, sequences: list[int], pads: list[int], *, at_once: bool = False) -> Iterator[Take]:
        """Let the blocks compute on what is given, and keep the results of some sequences: of one call, or of each.

        The calls of `generate` are those of the base; others PEFT may pass by its hooks.
        """
        whole = self.sequences
        columns = _Columns(
            length=whole.length, virtual=whole.virtual, sequences=torch.tensor(sequences), pads=torch.tensor(pads)
        )

        def take(place: ResultPlace, result: torch.Tensor, last: int | None = None) -> None:
            name = str(place)
            if result.is_floating_point() and name in self.shapes:
                rows = list(columns.rows(result, self.shapes[name], last))
                self.found.setdefault(name, []).extend(rows)
                if not rows:
                    self.other_shapes[name] = result.shape

        encoder = place_of_encoder(self.model) if whole.has_encoder else ()

        def given(name: str, own: torch.Tensor) -> torch.Tensor:
            of_encoder = bool(encoder) and (name.startswith(encoder) or _FROM_ENCODER in name)
            return columns.given(own, self.given(name), of_encoder=of_encoder)

        blocks = BlockPass(given, take)

        def begin(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids = kwargs.get(whole.name, args[0] if args else None)
            embedded = kwargs.get("inputs_embeds") if ids is None and whole.virtual else None
            rows = ids if embedded is None else embedded
            columns.begin(0 if rows is None else rows.shape[1])
            if embedded is None and (ids is None or not columns.has(ids.to("cpu"), whole.ids)):
                raise ValueError("it computes other tokens, or the same ones again")
            blocks.begin_again()

        def end(_: Any, __: Any, found: Any) -> None:
            logits = getattr(found, LOGITS, None)
            if isinstance(logits, torch.Tensor) and logits.dim() == 3:
                take(ResultPlace(LOGITS), logits, last=logits.shape[1])

        base, hooks = base_of(self.model), []
        if at_once:
            columns.begin(whole.length)
        else:
            hooks = [base.register_forward_pre_hook(begin, with_kwargs=True), base.register_forward_hook(end)]
        try:
            with blocks.following(self.model):
                yield take
        finally:
            for hook in hooks:
                hook.remove()


def generated(
    model: Any, inputs: Activations, tokens: int, *, choosing: Choose | None = None, **more: Any
) -> torch.Tensor:
    """Return the greedy continuation by the model's own `generate`, `(batch, tokens)`: no end of the text ends it."""
    from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

    class Choosing(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores if choosing is None else choosing(input_ids, scores)

    base, ids = base_of(model), inputs.get(DECODER_IDS, inputs["input_ids"])
    if DECODER_IDS in inputs:
        more = {"decoder_start_token_id": ids[:, 0].tolist(), **more}  # what does not begin with it gets it
    kept, base.generation_config = (
        base.generation_config,
        GenerationConfig(
            do_sample=False, num_beams=1, max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0, **more
        ),
    )  # which says what a call leaves open, as sampling or a penalty
    try:
        with torch.no_grad():
            found: torch.Tensor = model.generate(**inputs, logits_processor=LogitsProcessorList([Choosing()]))
    finally:
        base.generation_config = kept
    return found[:, ids.shape[1] :]


def place_of_encoder(model: Any) -> tuple[str, str]:
    """Return how the names of the places in a model's encoder begin."""
    base = base_of(model)
    name = next(name for name, module in base.named_modules() if module is base.get_encoder())
    return f"{name}.", f"{name}::"


def by_rows(result: torch.Tensor, length: int) -> torch.Tensor | None:
    """Return a result of whole sequences with a row for each token, `(rows, elements)`; None if it has none.

    A table of positions has those of one sequence; routers and experts have the tokens of all in one dimension.
    """
    if result.dim() > 2 and result.shape[1] == length:
        return result.reshape(-1, result.shape[2:].numel())
    return result if result.dim() == 2 and len(result) % length == 0 else None


def in_place(found: list[Rows], rows: torch.Tensor, left_out: torch.Tensor) -> torch.Tensor:
    """Return rows with those that a way has computed in their place, but what is left out.

    Parameters
    ----------
    rows : torch.Tensor
        `(rows, elements)`.
    left_out : torch.Tensor
        `(rows,)`, bool; of others than these rows if a table has fewer.
    """
    rows = rows.clone()
    for some in found:
        kept = ~left_out[some.index] if len(left_out) == len(rows) else torch.ones_like(some.index, dtype=torch.bool)
        rows[some.index[kept]] = some.values[kept].to(rows.dtype)
    return rows
