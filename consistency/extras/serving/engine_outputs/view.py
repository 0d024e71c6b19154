"""What an engine's file shows of the model's logits: which places, and all values of a place or the largest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from safetensors import safe_open

from consistency.errors import InputError
from consistency.extras.serving.inference.outputs import IDS, TOKENS, Outputs

_LOG_PROBABILITIES = "log_probabilities"


class View:
    """An engine's outputs beside logits of the model, in the same form.

    Parameters
    ----------
    shape : tuple of int
        Of the model's logits: `(rows, tokens, vocabulary)`, or `(rows, labels)` of a classifier.
    mask : torch.Tensor or None
        The attention mask: what a model computes at the place of padding has no meaning.
    """

    def __init__(self, outputs: Outputs, shape: Sequence[int], mask: torch.Tensor | None) -> None:
        self.outputs, self.shape = outputs, tuple(shape)
        self._top_k = outputs.about.top_k
        self._wanted = torch.ones(self.shape[:-1], dtype=torch.bool)
        if mask is not None and mask.shape == self._wanted.shape:
            self._wanted &= mask.to(torch.bool)
        self.places = self._wanted.clone()
        for mode in outputs.modes:
            self._check(mode, self.shape)
        if TOKENS in outputs.tensors:
            self.places &= self._read(TOKENS).to(torch.bool)
        if not bool(self.places.any()):
            self._refuse("the engine's outputs are of no place", where=TOKENS, got="none", wanted="one or more")

    @property
    def rows_missing(self) -> list[int]:
        """Return the rows of which no wanted place was computed."""
        wanted, found = (one.reshape(self.shape[0], -1).any(1) for one in (self._wanted, self.places))
        return [int(row) for row in (wanted & ~found).nonzero()]

    @property
    def coverage(self) -> dict[str, int]:
        """Return how much was compared of what was wanted."""
        found = {"places": int(self.places.sum()), "places_wanted": int(self._wanted.sum())}
        return found | ({} if self._top_k is None else {"top_k": self._top_k, "vocabulary": self.shape[-1]})

    def actual(self, name: str) -> torch.Tensor:
        """Return the engine's values, `(places, values)`, in the dtype that they are stored in.

        Of the largest ones the last column is the smallest of these: see `model`.
        """
        values = self._read(name)[self._places_of(name)]
        if self._top_k is None:
            return values
        values = torch.where(self._ids(name) >= 0, values, 0)
        return torch.cat([values, self._smallest(name).to(values.dtype)], dim=-1)

    def model(self, name: str, logits: torch.Tensor) -> torch.Tensor:
        """Return logits of the model in the form of the engine's values.

        Of the largest ones the last column is the largest value that the engine left out, where that is larger than the
        smallest that it gave: no token may be missing.

        Parameters
        ----------
        logits : torch.Tensor
            Of all rows; of the first one alone for a tensor that is of a batch. Narrower floats than float32 are
            widened for logarithms, as engines do.
        """
        if self.outputs.about.values == _LOG_PROBABILITIES:
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        values = logits[self._places_of(name)]
        if self._top_k is None:
            return values
        ids = self._ids(name)
        given = ids.clamp(min=0)
        found = torch.where(ids >= 0, values.gather(-1, given), 0)
        # a place without an id writes nothing: its id is clamped to 0, which may be given elsewhere in the row
        left_out = torch.ones_like(values, dtype=torch.bool)
        left_out[torch.arange(len(ids)).unsqueeze(-1).expand_as(ids)[ids >= 0], ids[ids >= 0]] = False
        largest = values.masked_fill(~left_out, -torch.inf).amax(-1, keepdim=True)
        return torch.cat([found, torch.maximum(largest, self._smallest(name).to(values.dtype))], dim=-1)

    def drawn(self, name: str, logits: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
        """Return logits of the CPU in that form, to measure their error; that of no token left out is none."""
        found = self.model(name, logits)
        if self._top_k is not None:
            found[:, -1] = exact[:, -1]
        return found

    def rows_of(self, name: str) -> torch.Tensor:
        """Return the row that each of the compared places is in."""
        places = self._places_of(name)
        numbers = torch.arange(places.shape[0]).reshape(-1, *[1] * (places.dim() - 1))
        return numbers.expand(places.shape)[places]

    def index_of(self, name: str, place: int, column: int) -> tuple[int, ...]:
        """Return where a value is in the model's logits; of the last column of largest ones, the place alone."""
        at = tuple(int(i) for i in self._places_of(name).nonzero()[place])
        if self._top_k is None:
            return (*at, column)
        ids = self._ids(name)[place]
        return (*at, int(ids[column])) if column < len(ids) else at

    def check_batch(self, name: str) -> None:
        """Raise unless a tensor of a batch fits the first row."""
        self._check(name, self.shape[1:])

    def _places_of(self, name: str) -> torch.Tensor:
        return self.places if name in self.outputs.modes else self.places[0]

    def _ids(self, name: str) -> torch.Tensor:
        return self._read(f"{name}.{IDS}").to(torch.int64)[self._places_of(name)]

    def _smallest(self, name: str) -> torch.Tensor:
        """Return the k-th largest of the engine's values: others may be among them that are smaller."""
        assert self._top_k is not None
        values = self._read(name)[self._places_of(name)].to(torch.float64)
        values = values.masked_fill(self._ids(name) < 0, -torch.inf)
        return values.topk(self._top_k, dim=-1).values[:, -1:]

    def _read(self, name: str) -> torch.Tensor:
        with safe_open(self.outputs.path, framework="pt") as file:
            found = file.get_tensor(name)
        assert isinstance(found, torch.Tensor)
        return found

    def _check(self, name: str, shape: Sequence[int]) -> None:
        got = self.outputs.tensors[name].shape
        if tuple(got[:-1]) != tuple(shape[:-1]):
            self._refuse(
                "the engine's outputs are of other rows or tokens than the inputs",
                where=name,
                got=list(got),
                wanted=[*shape[:-1], "…"],
            )
        if self._top_k is None:
            if got[-1] != shape[-1]:
                hint = "leave out values that pad the vocabulary, or give the largest with their ids"
                self._refuse(
                    "the engine's outputs have another vocabulary than the model",
                    where=name,
                    got=list(got),
                    wanted=list(shape),
                    hint=hint,
                )
            return
        ids = self._read(f"{name}.{IDS}")
        if bool((ids >= shape[-1]).any()):
            self._refuse(
                "the engine's ids are past the vocabulary",
                where=f"{name}.{IDS}",
                got=int(ids.max()),
                wanted=f"less than {shape[-1]}",
            )
        some = torch.sort(ids, dim=-1).values
        if bool(((some[..., 1:] == some[..., :-1]) & (some[..., 1:] >= 0)).any()):
            self._refuse(
                "an id is given twice in one place",
                where=f"{name}.{IDS}",
                got="a repeated id",
                wanted="each id once, and -1 where there is none",
            )

    def _refuse(self, what: str, *, where: str, got: object, wanted: object, hint: str | None = None) -> NoReturn:
        raise InputError(what, where=f"{where} in {self.outputs.path}", got=got, wanted=wanted, hint=hint)
