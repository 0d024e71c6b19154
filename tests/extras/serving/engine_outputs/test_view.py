"""An engine's values and the model's in one form, and files that do not fit the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from consistency.errors import InputError
from consistency.extras.serving.engine_outputs.view import View
from consistency.extras.serving.inference.outputs import read_outputs

ON = "adapter_on"
SHAPE = (2, 3, 5)
LOGITS = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)


def view(path: Path, tensors: dict[str, Any], mask: torch.Tensor | None = None, **about: Any) -> View:
    key = {"name": "a", "inputs": "i", "base": "b", "adapter": "c", "dtype": "float32"}
    fields = {
        "schema": "consistency.outputs/1", "case": key, "engine": "e", "version": "1", "device": "d",
        "dtype": "float32", **about,
    }  # fmt: skip
    file = path / "o.safetensors"
    contiguous = {name: np.ascontiguousarray(one) for name, one in tensors.items()}
    save_file(contiguous, file, metadata={"consistency": json.dumps(fields)})
    return View(read_outputs(file), SHAPE, mask)


RUBBISH: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, Any], str]] = {
    "rows": (lambda: {ON: LOGITS[:1]}, {}, "other rows or tokens than the inputs"),
    "vocabulary": (lambda: {ON: np.pad(LOGITS, [(0, 0), (0, 0), (0, 3)])}, {}, "another vocabulary"),
    "no place": (lambda: {ON: LOGITS, "tokens": np.zeros(SHAPE[:2], bool)}, {}, "of no place"),
    "an id twice": (lambda: {ON: LOGITS, f"{ON}.ids": np.zeros(SHAPE, int)}, {"top_k": 2}, "given twice"),
    "an id past the end": (
        lambda: {ON: LOGITS, f"{ON}.ids": np.broadcast_to(np.arange(5) + 1, SHAPE)}, {"top_k": 2},
        "past the vocabulary",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RUBBISH)
def test_what_does_not_fit_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    make, about, sentence = RUBBISH[name]
    with pytest.raises(InputError) as error:
        view(tmp_path, make(), **about)
    assert sentence in str(error.value)


def test_a_batch_that_does_not_fit(tmp_path: Path) -> None:
    found = view(tmp_path, {ON: LOGITS, "batch.1": LOGITS[0, :2]})
    with pytest.raises(InputError, match="other rows or tokens"):
        found.check_batch("batch.1")


def test_padding_and_uncomputed_places_are_left_out(tmp_path: Path) -> None:
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    tokens = np.array([[1, 1, 0], [0, 0, 1]], bool)
    found = view(tmp_path, {ON: LOGITS, "tokens": tokens}, mask)
    assert found.coverage == {"places": 2, "places_wanted": 5}
    assert found.rows_missing == [1], "its only computed place is padding"
    assert torch.equal(found.actual(ON), torch.from_numpy(LOGITS[0, :2]))
    assert found.index_of(ON, 1, 4) == (0, 1, 4)


def test_the_largest_values_stand_beside_those_of_their_tokens(tmp_path: Path) -> None:
    """The last column is what was left out: no larger than the smallest that was given, however many were added."""
    exact = torch.from_numpy(LOGITS).to(torch.float64)
    order = exact.log_softmax(-1).sort(-1, descending=True)
    chosen = order.indices[..., [1, 0, 4, 2]]  # two largest in any order, the smallest, and one that is no id
    ids = torch.where(torch.tensor([True, True, True, False]), chosen, -1)
    values = exact.log_softmax(-1).gather(-1, chosen)
    found = view(tmp_path, {ON: values.numpy(), f"{ON}.ids": ids.numpy()}, values="log_probabilities", top_k=2)
    assert torch.allclose(found.actual(ON), found.model(ON, exact), atol=0, rtol=1e-12)
    assert found.coverage == {"places": 6, "places_wanted": 6, "top_k": 2, "vocabulary": 5}
    assert found.index_of(ON, 0, 2) == (0, 0, int(ids[0, 0, 2]))
    missed = order.indices[..., 1:3]
    values = exact.log_softmax(-1).gather(-1, missed)
    found = view(tmp_path, {ON: values.numpy(), f"{ON}.ids": missed.numpy()}, values="log_probabilities", top_k=2)
    error = (found.model(ON, exact) - found.actual(ON)).reshape(6, 3)
    assert torch.allclose(error[:, :2], torch.zeros(6, 2, dtype=torch.float64), atol=1e-12)
    largest = (order.values[..., 0] - values[..., -1]).reshape(6)
    assert torch.allclose(error[:, 2], largest), "the largest of all was left out"
