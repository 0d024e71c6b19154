"""Compute the same tokens in several ways: alone, step by step with a cache, beside others in a padded batch.

Each way is the model's own call, by its own `generate` where there is a cache, with a logits processor that chooses the
given tokens. What enters and leaves each block is replaced by the rows of a pass over the whole sequences, so the same
exact values judge each block's rows, whichever way they are computed. Of an encoder and a decoder the sequences are
those of the decoder, whose blocks get what the encoder left in the whole pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from consistency.worker.model.block_pass import BlockPass, Given, ResultPlace, Take
from consistency.worker.model.running import Activations, base_of, device_of, outputs, without_gradients

LOGITS = "logits"

PADS = (0, 3, 7, 1)
"""Padding tokens before the sequences of a padded batch, in turn. Texts that an encoder reads have the largest number
of these after each text."""

DECODER_IDS = "decoder_input_ids"

_FROM_ENCODER = "::input.encoder_hidden_states"
"""Part of the name of a decoder block's input where the encoder changes the output of its last block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Tokens to compute, and the model's other inputs.

    Attributes
    ----------
    ids : torch.Tensor
        `(sequences, length)`, on the CPU.
    prompt : int
        Number of tokens of each sequence before those that are generated.
    beside : mapping of str to torch.Tensor
        The other inputs, with a row for each sequence: images, or the text that an encoder reads.
    has_encoder : bool
        The model has an encoder, and the ids are those of its decoder.
    virtual : int
        Number of rows that an adapter puts before those of the tokens.
    """

    ids: torch.Tensor
    prompt: int
    beside: Activations = field(default_factory=dict)
    has_encoder: bool = False
    virtual: int = 0

    @property
    def length(self) -> int:
        """Rows of each sequence."""
        return self.virtual + self.ids.shape[1]

    @property
    def name(self) -> str:
        """Name of the argument that takes the ids."""
        return DECODER_IDS if self.has_encoder else "input_ids"

    def part(self, rows: slice) -> Sequences:
        """Return some of the sequences."""
        return replace(self, ids=self.ids[rows], beside={name: tensor[rows] for name, tensor in self.beside.items()})

    def inputs(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> Activations:
        """Return the keyword arguments of a pass over these ids in place of the sequences', on the device of `ids`."""
        beside = {name: tensor.to(ids.device) for name, tensor in self.beside.items()}
        if self.has_encoder:
            return {DECODER_IDS: ids, **beside}
        if mask is None:
            mask = torch.ones_like(ids)
        return {"input_ids": ids, "attention_mask": mask, **beside}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Some rows of one result.

    Attributes
    ----------
    index : torch.Tensor
        `(rows,)`: number of the sequence times the length, plus the position; of a table that all sequences share, the
        position alone.
    values : torch.Tensor
        `(rows, elements)`, on the CPU.
    sequence : int or None
        The row of the batch that has computed them, for a table that all sequences share; else None.
    """

    index: torch.Tensor
    values: torch.Tensor
    sequence: int | None = None


RowsByPlace = dict[str, list[Rows]]
"""Rows of results, by the names of the places."""

Choose = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Called with the ids so far and the model's scores; returns the scores, `(batch, words)`, to choose the next token."""


@dataclass(slots=True, kw_only=True)
class _Columns:
    """The positions and sequences of the columns of the batch that runs now.

    In each call of the model, a row of the batch is one sequence, and a column one position of it, shifted by padding.

    Attributes
    ----------
    length, virtual : int
        Rows of a sequence, and how many of these are no tokens.
    sequences, pads : torch.Tensor
        `(batch,)`: the sequence of each row of the batch, and the columns of padding before its tokens.
    seen, now : int
        Number of columns of the earlier calls, and of this one.
    """

    length: int
    virtual: int
    sequences: torch.Tensor
    pads: torch.Tensor
    seen: int = 0
    now: int = 0

    def begin(self, columns: int) -> None:
        """Begin a call of the model with so many columns."""
        self.seen, self.now = self.seen + self.now, columns

    def positions(self, last: int | None = None) -> torch.Tensor:
        """Return the position of each column of this call, or of the last ones, `(batch, columns)`; -1 of padding.

        The adapter's virtual rows come first in every row of the batch, before the padding.
        """
        columns = torch.arange(self.seen, self.seen + self.now)
        if last is not None:
            columns = columns[-last:]
        columns = columns.expand(len(self.pads), -1)
        token_positions = columns - self.pads[:, None]
        token_positions = token_positions.masked_fill(token_positions < self.virtual, -1)
        return torch.where(columns < self.virtual, columns, token_positions)

    def has(self, ids: torch.Tensor, of_sequences: torch.Tensor) -> bool:
        """Report whether the ids of this call are those of the sequences at its positions."""
        positions = self.positions()
        expected = of_sequences[self.sequences[:, None], (positions - self.virtual).clamp(0, of_sequences.shape[1] - 1)]
        is_inside = self._is_inside(positions)
        return ids.shape == expected.shape and bool((ids == expected)[is_inside].all())

    def given(self, own: torch.Tensor, whole: torch.Tensor | None, *, of_encoder: bool = False) -> torch.Tensor:
        """Return a tensor of this call with the rows of a pass over whole sequences in place of its own.

        Parameters
        ----------
        own : torch.Tensor
            The tensor that the model has computed; returned as it is where `whole` has no rows for it. Columns of
            padding, and those beyond the sequences, keep its values.
        whole : torch.Tensor or None
            `(sequences, length, ...)`, or `(1, length, ...)` for a table that all sequences share.
        of_encoder : bool
            The tensor is an encoder's, which reads whole texts in each call.
        """
        if of_encoder:
            return self._given_to_encoder(own, whole)
        positions = self.positions()
        if whole is None or whole.shape[1:2] != (self.length,) or own.shape[2:] != whole.shape[2:]:
            return own
        if own.shape[:2] == positions.shape:
            rows = self._rows_of_batch(whole)
        elif own.shape[:2] == (1, self.now) == (len(whole), self.now):  # a table that all sequences share
            rows, positions = torch.zeros(1, dtype=torch.long), positions[:1]
        else:
            return own
        chosen = whole[rows[:, None], positions.clamp(0, self.length - 1)].to(own.device, own.dtype)
        is_inside = self._is_inside(positions).to(own.device)
        return torch.where(is_inside.reshape(*is_inside.shape, *[1] * (own.dim() - 2)), chosen, own)

    def _given_to_encoder(self, own: torch.Tensor, whole: torch.Tensor | None) -> torch.Tensor:
        """Return a tensor of an encoder with the rows of whole texts before its own, which may have padding after."""
        if whole is None or whole.dim() != 3 or own.shape[::2] != (len(self.sequences), whole.shape[2]):
            return own
        chosen = own.clone()
        chosen[:, : whole.shape[1]] = whole[self._rows_of_batch(whole)].to(own.device, own.dtype)
        return chosen

    def _rows_of_batch(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the row of a tensor of whole sequences for each row of the batch; a shared table has one row."""
        return self.sequences if len(whole) > 1 else torch.zeros_like(self.sequences)

    def _is_inside(self, positions: torch.Tensor) -> torch.Tensor:
        """Return where positions are those of a sequence, and neither padding nor beyond its end."""
        return (positions >= 0) & (positions < self.length)

    def rows(self, result: torch.Tensor, exact: torch.Size, last: int | None = None) -> Iterator[Rows]:
        """Yield the rows of a result of this call that an exact result of this shape has too.

        Parameters
        ----------
        last : int, optional
            Number of columns of the result, where it has only the last ones.
        """
        positions, sequences = self.positions(last), self.sequences[:, None]
        if result.dim() != len(exact):
            return
        if result.dim() == 2 and len(result) == positions.numel():  # as routers have them
            result = result.reshape(*positions.shape, -1)
        is_inside = self._is_inside(positions)
        if exact[:2] == (1, self.length):
            for number, table in enumerate(result):
                if table.shape[:1] == positions.shape[1:]:
                    values = table[is_inside[number].to(table.device)].detach().to("cpu")
                    index = positions[number][is_inside[number]]
                    yield Rows(index=index, values=values.reshape(len(values), -1), sequence=number)
        elif result.shape[:2] == positions.shape:
            values = result[is_inside.to(result.device)].detach().to("cpu")
            index = (sequences * self.length + positions)[is_inside]
            yield Rows(index=index, values=values.reshape(len(values), -1))


@dataclass(slots=True, kw_only=True)
class Way:
    """One way of computing sequences, and its results on given values.

    Attributes
    ----------
    sequences : Sequences
    given : callable
        Returns the given value of a place for whole sequences, by name; None where it has none.
    shapes : mapping of str to torch.Size
        Shapes of the exact results that have a row for each token: see `by_rows`.
    rows_by_place : dict
        The computed rows, by the name of their place.
    other_shapes : dict
        Shapes of results that have no row for each token, by place.
    """

    model: Any
    sequences: Sequences
    given: Callable[[str], torch.Tensor | None]
    shapes: Mapping[str, torch.Size]
    rows_by_place: RowsByPlace = field(default_factory=dict)
    other_shapes: dict[str, torch.Size] = field(default_factory=dict)

    def alone(self) -> None:
        """Run each sequence by itself, without a cache."""
        for number in range(len(self.sequences.ids)):
            sequence = self.sequences.part(slice(number, number + 1))
            with self._following([number], [0], at_once=True) as take, torch.no_grad(), without_gradients(self.model):
                logits = outputs(self.model, sequence.inputs(sequence.ids)).get(LOGITS)
                if logits is not None:
                    take(ResultPlace(LOGITS), logits)

    def cached(self, **options: Any) -> None:
        """Generate the second half of the sequences, side by side; `options` go to `generate`."""
        self._generate([0] * len(self.sequences.ids), self.sequences, **options)

    def padded(self) -> None:
        """Generate them with unlike numbers of padding tokens before each, by a mask; an encoder's texts are padded."""
        sequences = self.sequences
        if sequences.has_encoder:
            longer = {
                name: torch.nn.functional.pad(tensor, (0, max(PADS))) for name, tensor in sequences.beside.items()
            }
            self._generate([0] * len(sequences.ids), replace(sequences, beside=longer))
            return
        most = min(sequences.ids.shape[1] // 2, sequences.prompt) - 1
        pads = [min(PADS[number % len(PADS)], most) for number in range(len(sequences.ids))]
        self._generate(pads, sequences)

    def _generate(self, pads: list[int], sequences: Sequences, **options: Any) -> None:
        """Generate the tokens after the prompts, which have so many padding tokens before each."""
        (count, length), width = sequences.ids.shape, sequences.prompt
        prompt, mask = torch.zeros(count, width, dtype=torch.long), torch.zeros(count, width, dtype=torch.long)
        for number, pad in enumerate(pads):
            prompt[number, pad:] = sequences.ids[number, : width - pad]
            mask[number, pad:] = 1
        device = device_of(self.model)
        with self._following(list(range(count)), pads), without_gradients(self.model):
            inputs = sequences.inputs(prompt.to(device), mask.to(device))
            generated(self.model, inputs, length - width + 1, choosing=self._choose(pads), **options)

    def _choose(self, pads: list[int]) -> Choose:
        """Return a function that scores the sequences' next tokens highest; beyond their end any token will do."""

        def choose(before: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            ids = self.sequences.ids
            chosen = torch.full_like(scores, -torch.inf)
            for number, pad in enumerate(pads):
                position = before.shape[1] - pad
                token = int(ids[number, position]) if position < ids.shape[1] else 0
                chosen[number, token] = 0
            return chosen

        return choose

    @contextmanager
    def _following(self, sequences: list[int], pads: list[int], *, at_once: bool = False) -> Iterator[Take]:
        """Let the blocks compute on given values within a `with` block, and keep the results of some sequences.

        Parameters
        ----------
        sequences, pads
            The sequence of each row of the batch, and its number of padding tokens.
        at_once : bool
            There is one call of the model, over all positions; else each call of the base goes on after the one before.
            The calls of `generate` are counted at the base: PEFT may pass by the hooks of its own model.
        """
        whole = self.sequences
        columns = _Columns(
            length=whole.length, virtual=whole.virtual, sequences=torch.tensor(sequences), pads=torch.tensor(pads)
        )
        blocks = BlockPass(self._given_rows(columns), functools.partial(self._keep_rows, columns))

        def begin(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids = kwargs.get(whole.name, args[0] if args else None)
            # an adapter that puts virtual rows first embeds the tokens of that call itself
            embedded = kwargs.get("inputs_embeds") if ids is None and whole.virtual else None
            rows = ids if embedded is None else embedded
            columns.begin(0 if rows is None else rows.shape[1])
            if embedded is None and (ids is None or not columns.has(ids.to("cpu"), whole.ids)):
                raise ValueError("it computes other tokens, or the same ones again")
            blocks.begin_again()

        def end(_: Any, __: Any, output: Any) -> None:
            logits = getattr(output, LOGITS, None)
            if isinstance(logits, torch.Tensor) and logits.dim() == 3:
                self._keep_rows(columns, ResultPlace(LOGITS), logits, last=logits.shape[1])

        base, hooks = base_of(self.model), []
        if at_once:
            columns.begin(whole.length)
        else:
            hooks = [base.register_forward_pre_hook(begin, with_kwargs=True), base.register_forward_hook(end)]
        try:
            with blocks.following(self.model):
                yield functools.partial(self._keep_rows, columns)
        finally:
            for hook in hooks:
                hook.remove()

    def _keep_rows(self, columns: _Columns, place: ResultPlace, result: torch.Tensor, last: int | None = None) -> None:
        """Keep the rows of a result for which there are exact ones; note the shape of one that has no such rows."""
        name = str(place)
        if result.is_floating_point() and name in self.shapes:
            rows = list(columns.rows(result, self.shapes[name], last))
            self.rows_by_place.setdefault(name, []).extend(rows)
            if not rows:
                self.other_shapes[name] = result.shape

    def _given_rows(self, columns: _Columns) -> Given:
        """Return the function that gives blocks the rows of whole sequences for the columns of a call."""
        encoder = place_of_encoder(self.model) if self.sequences.has_encoder else ()

        def given(name: str, own: torch.Tensor) -> torch.Tensor:
            of_encoder = bool(encoder) and (name.startswith(encoder) or _FROM_ENCODER in name)
            return columns.given(own, self.given(name), of_encoder=of_encoder)

        return given


def generated(
    model: Any, inputs: Activations, tokens: int, *, choosing: Choose | None = None, **options: Any
) -> torch.Tensor:
    """Return the greedy continuation by the model's own `generate`, `(batch, tokens)`: no end of the text ends it."""
    from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

    class Choosing(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores if choosing is None else choosing(input_ids, scores)

    base, ids = base_of(model), inputs.get(DECODER_IDS, inputs["input_ids"])
    if DECODER_IDS in inputs:
        # generate puts this token before decoder ids that do not begin with it
        options = {"decoder_start_token_id": ids[:, 0].tolist(), **options}
    own_config = base.generation_config
    # the model's own config would decide whatever the call leaves open, such as sampling or a penalty
    base.generation_config = GenerationConfig(
        do_sample=False, num_beams=1, max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0, **options
    )
    try:
        with torch.no_grad():
            generated_ids: torch.Tensor = model.generate(**inputs, logits_processor=LogitsProcessorList([Choosing()]))
    finally:
        base.generation_config = own_config
    return generated_ids[:, ids.shape[1] :]


def place_of_encoder(model: Any) -> tuple[str, str]:
    """Return the two prefixes of the names of places in a model's encoder."""
    base = base_of(model)
    name = next(name for name, module in base.named_modules() if module is base.get_encoder())
    return f"{name}.", f"{name}::"


def by_rows(result: torch.Tensor, length: int) -> torch.Tensor | None:
    """Return a result of whole sequences with a row for each token, `(rows, elements)`; None if it has no such rows.

    A table of positions has the rows of one sequence; routers and experts have the tokens of all in one dimension.
    """
    if result.dim() > 2 and result.shape[1] == length:
        return result.reshape(-1, result.shape[2:].numel())
    has_tokens_in_one_dimension = result.dim() == 2 and len(result) % length == 0
    return result if has_tokens_in_one_dimension else None


def in_place(found: list[Rows], rows: torch.Tensor, left_out: torch.Tensor) -> torch.Tensor:
    """Return a copy of rows in which those that a way has computed replace the others, except rows that are left out.

    Parameters
    ----------
    rows : torch.Tensor
        `(rows, elements)`.
    left_out : torch.Tensor
        `(rows,)`, bool. It has another length than a table that all sequences share: of that no row is left out.
    """
    rows = rows.clone()
    for computed in found:
        if len(left_out) == len(rows):
            is_wanted = ~left_out[computed.index]
        else:
            is_wanted = torch.ones_like(computed.index, dtype=torch.bool)
        rows[computed.index[is_wanted]] = computed.values[is_wanted].to(rows.dtype)
    return rows
