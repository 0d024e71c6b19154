"""Ids and labels are held against the tables on the CPU, with every figure that tells the two causes apart."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from consistency.worker.model.id_checks import IGNORE_INDEX, Tables, asserted, context_is_lost, is_kernel_assert, look
from consistency.worker.model.id_checks import tokenizer_length as length

TABLES = Tables(vocabulary=32000, embedding_rows=32000, head_rows=32000, tokenizer_length=32004)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor([values])


def test_an_id_past_the_vocabulary_is_told_with_every_table() -> None:
    (seen,) = look({"input_ids": ids(5, 32003, 32000)}, TABLES)
    assert seen.word == "ids-past-vocabulary"
    assert seen.sentence == (
        "ids past the vocabulary: largest id 32003, embedding has 32000 rows, the config's vocab_size is 32000, "
        "the tokenizer has 32004 tokens; the first of 2 is 32003 at input_ids[0, 1]"
    )


def test_what_is_inside_is_inside() -> None:
    labels = ids(IGNORE_INDEX, 0, 31999)
    seen = look({"input_ids": ids(0, 31999), "labels": labels, "attention_mask": ids(10**9)}, TABLES)
    assert [(one.name, one.word, one.sentence) for one in seen] == [("input_ids", None, None), ("labels", None, None)]
    assert seen[1].evidence["ignored"] == 1
    assert look({"labels": ids(IGNORE_INDEX)}, TABLES)[0].word is None


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("input_ids", -1, "ids past the vocabulary: smallest id -1"),
        ("labels", -1, "labels past the vocabulary: smallest label -1, head has 32000 rows, ignore index is -100"),
        ("labels", 32000, "labels past the vocabulary: largest label 32000"),
        ("input_ids", IGNORE_INDEX, "ids past the vocabulary: smallest id -100"),
        ("decoder_input_ids", 32000, "ids past the vocabulary: largest id 32000"),
    ],
)
def test_an_end_of_a_table_is_an_end(name: str, value: int, words: str) -> None:
    (seen,) = look({name: ids(3, value)}, TABLES)
    assert (seen.sentence or "").startswith(words)
    assert seen.evidence["first"] == [0, 1]


def test_what_has_no_table_is_not_judged() -> None:
    assert look({"input_ids": ids(10**9), "labels": ids(10**9)}, Tables()) == []
    assert look({"labels": torch.tensor([0.5])}, TABLES) == []


class Model(torch.nn.Module):
    def __init__(self, **config: object) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=9, **config)
        self.embeddings, self.head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 7)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embeddings

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head


def test_tables_are_those_in_use(tmp_path: Path) -> None:
    model = Model()
    assert Tables.of(model) == Tables(vocabulary=9, embedding_rows=8, head_rows=7)
    resized = torch.nn.Module()
    resized.modules_to_save = torch.nn.ModuleDict({"default": torch.nn.Embedding(12, 4)})
    model.embeddings = resized  # type: ignore[assignment]
    assert Tables.of(model).embedding_rows == 12
    assert Tables.of(Model(vision_config=1)).embedding_rows is None, "images have ids of their own"
    assert Tables.of(torch.nn.Linear(2, 2), str(tmp_path)) == Tables()


def test_tokenizer_length_counts_the_largest_id(tmp_path: Path) -> None:
    def write(text: str) -> int | None:
        (tmp_path / "tokenizer.json").write_text(text)
        return length(tmp_path)

    assert length(tmp_path) is None
    added = [{"id": 40}]
    assert write(json.dumps({"model": {"vocab": {"a": 0, "b": 7}}, "added_tokens": added})) == 41
    assert write(json.dumps({"model": {"vocab": [["a", 0.1], ["b", 0.2]]}})) == 2
    for text in ("{", "[]", '{"model": {}}', '{"model": {"vocab": {"a": "x"}}}'):
        assert write(text) is None


def test_kernels_that_assert() -> None:
    lost = RuntimeError("CUDA error: device-side assert triggered")
    with pytest.raises(IndexError) as target:
        torch.nn.functional.cross_entropy(torch.zeros(1, 4), torch.tensor([9]))
    with pytest.raises(IndexError) as row:
        torch.nn.functional.embedding(torch.tensor([9]), torch.zeros(4, 2))
    assert is_kernel_assert(lost)
    assert context_is_lost(lost)
    for error in (target.value, row.value):
        assert is_kernel_assert(error)
        assert not context_is_lost(error)
    assert not is_kernel_assert(IndexError("list index is wrong"))
    assert not is_kernel_assert(RuntimeError("out of range"))
    said = asserted({"input_ids": ids(1)}, torch.device("cpu"), target.value)
    assert said.startswith("ids or labels changed during transfer to device cpu: input_ids are inside every table")
