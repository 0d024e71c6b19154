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
        Shape of the model's logits: `(rows, tokens, vocabulary)`, or `(rows, labels)` for a classifier.
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
        is_wanted = self._wanted.reshape(self.shape[0], -1).any(1)
        is_computed = self.places.reshape(self.shape[0], -1).any(1)
        return [int(row) for row in (is_wanted & ~is_computed).nonzero()]

    @property
    def coverage(self) -> dict[str, int]:
        """Return the numbers of places and values that were compared, and that were wanted."""
        counts = {"places": int(self.places.sum()), "places_wanted": int(self._wanted.sum())}
        if self._top_k is not None:
            counts |= {"top_k": self._top_k, "vocabulary": self.shape[-1]}
        return counts

    def actual(self, name: str) -> torch.Tensor:
        """Return the engine's values, `(places, values)`, in the dtype that they are stored in.

        Where the file has the largest values alone, a last column has the smallest of these: see `model`.
        """
        values = self._read(name)[self._places_of(name)]
        if self._top_k is None:
            return values
        values = torch.where(self._ids(name) >= 0, values, 0)
        return torch.cat([values, self._smallest(name).to(values.dtype)], dim=-1)

    def model(self, name: str, logits: torch.Tensor) -> torch.Tensor:
        """Return logits of the model in the form of the engine's values.

        Where the file has the largest values alone, a last column has the largest value that the engine left out, if
        that is larger than the smallest that it gave: then a token is missing.

        Parameters
        ----------
        logits : torch.Tensor
            Logits of all rows; of the first one alone for a tensor that is of a batch. Narrower floats than float32 are
            widened for logarithms, as engines do.
        """
        if self.outputs.about.values == _LOG_PROBABILITIES:
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        values = logits[self._places_of(name)]
        if self._top_k is None:
            return values
        ids = self._ids(name)
        has_id = ids >= 0
        given_values = torch.where(has_id, values.gather(-1, ids.clamp(min=0)), 0)
        # a place without an id writes nothing: its id is clamped to 0, which may be given elsewhere in the row
        is_left_out = torch.ones_like(values, dtype=torch.bool)
        place_of_id = torch.arange(len(ids)).unsqueeze(-1).expand_as(ids)
        is_left_out[place_of_id[has_id], ids[has_id]] = False
        largest_left_out = values.masked_fill(~is_left_out, -torch.inf).amax(-1, keepdim=True)
        last_column = torch.maximum(largest_left_out, self._smallest(name).to(values.dtype))
        return torch.cat([given_values, last_column], dim=-1)

    def drawn(self, name: str, logits: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
        """Return logits of a noisy pass in the form of the engine's values, to measure their error.

        The last column is the exact one: which tokens are left out is no result of the model, and has no error.
        """
        values = self.model(name, logits)
        if self._top_k is not None:
            values[:, -1] = exact[:, -1]
        return values

    def rows_of(self, name: str) -> torch.Tensor:
        """Return the row that each of the compared places is in."""
        places = self._places_of(name)
        numbers = torch.arange(places.shape[0]).reshape(-1, *[1] * (places.dim() - 1))
        return numbers.expand(places.shape)[places]

    def index_of(self, name: str, place: int, column: int) -> tuple[int, ...]:
        """Return the index of a value in the model's logits.

        The last column of a file with the largest values alone is no single value: its index is the place alone.
        """
        index = tuple(int(i) for i in self._places_of(name).nonzero()[place])
        if self._top_k is None:
            return (*index, column)
        ids = self._ids(name)[place]
        if column < len(ids):
            return (*index, int(ids[column]))
        return index

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
            tensor = file.get_tensor(name)
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def _check(self, name: str, shape: Sequence[int]) -> None:
        """Raise InputError unless a tensor of the file fits logits of this shape."""
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
        self._check_ids(name, shape)

    def _check_ids(self, name: str, shape: Sequence[int]) -> None:
        ids = self._read(f"{name}.{IDS}")
        if bool((ids >= shape[-1]).any()):
            self._refuse(
                "the engine's ids are past the vocabulary",
                where=f"{name}.{IDS}",
                got=int(ids.max()),
                wanted=f"less than {shape[-1]}",
            )
        in_order = torch.sort(ids, dim=-1).values
        is_repeated = (in_order[..., 1:] == in_order[..., :-1]) & (in_order[..., 1:] >= 0)
        if bool(is_repeated.any()):
            self._refuse(
                "an id is given twice in one place",
                where=f"{name}.{IDS}",
                got="a repeated id",
                wanted="each id once, and -1 where there is none",
            )

    def _refuse(self, message: str, *, where: str, got: object, wanted: object, hint: str | None = None) -> NoReturn:
        raise InputError(message, where=f"{where} in {self.outputs.path}", got=got, wanted=wanted, hint=hint)
