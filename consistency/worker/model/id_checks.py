"""Check the ids and labels of a batch on the CPU: whether they are inside the tables that they index.

For a row past the end of a table, a device reports "index out of bounds", or its kernel asserts and takes the whole
context with it. So ids are compared with the tables before any device sees them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from consistency.numerics import words
from consistency.numerics.words import Word

TOKEN_IDS = ("input_ids", "decoder_input_ids")
"""Names of the inputs that index a table of embeddings."""

LABELS = "labels"
"""Name of the input that indexes the rows of a head."""

IGNORE_INDEX = -100
"""The label that a loss ignores: PyTorch's default in `cross_entropy`, which transformers adopts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Number of rows of the tables that ids and labels index; None where the model has no such table, or hides it."""

    vocabulary: int | None = None
    """The config's `vocab_size`."""
    embedding_rows: int | None = None
    """Rows of the input embeddings in use: an adapter can bring larger ones."""
    head_rows: int | None = None
    """Rows of the output embeddings, or a classifier's labels."""
    tokenizer_length: int | None = None
    """One more than the largest id of the base's tokenizer; no network is used."""

    @classmethod
    def of(cls, model: torch.nn.Module, folder: str | None = None) -> Tables:
        """Read the numbers of rows from a model, and that of the tokenizer from its folder, if one is given."""
        config, text = getattr(model, "config", None), text_config(model)
        kinds = ("vision", "audio", "speech")
        is_multimodal = any(getattr(config, f"{kind}_config", None) is not None for kind in kinds)
        # a multimodal model gives its images ids that no table of words holds
        embedding_rows = None if is_multimodal else _rows(ask(model, "get_input_embeddings"))
        head_rows = _rows(ask(model, "get_output_embeddings"))
        if head_rows is None and _is_classifier(model):
            head_rows = getattr(text, "num_labels", None)
        vocabulary = getattr(text, "vocab_size", None)
        if not isinstance(vocabulary, int):
            vocabulary = None
        return cls(
            vocabulary=vocabulary,
            embedding_rows=embedding_rows,
            head_rows=head_rows,
            tokenizer_length=None if folder is None else tokenizer_length(Path(folder)),
        )

    def rows_for(self, name: str) -> int | None:
        """Return the number of rows that an input of this name indexes; None where it is unknown."""
        if name == LABELS:
            return self.head_rows
        return self.embedding_rows if name in TOKEN_IDS else None

    def figures(self) -> dict[str, int]:
        """Return the numbers that are known, by name."""
        return {name: count for name, count in asdict(self).items() if count is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class IdCheck:
    """The outcome for one input.

    Attributes
    ----------
    name : str
        Name of the input.
    word, sentence
        The kind of the difference, and a description; None where every id is inside its table.
    """

    name: str
    word: Word | None = None
    sentence: str | None = None
    evidence: dict[str, Any] = field(default_factory=dict)


def look(inputs: Mapping[str, torch.Tensor], tables: Tables) -> list[IdCheck]:
    """Compare the ids and labels of a batch on the CPU with the tables, except the labels' ignore index."""
    checks: list[IdCheck] = []
    for name in (*TOKEN_IDS, LABELS):
        if name not in inputs or inputs[name].is_floating_point() or not inputs[name].numel():
            continue
        rows = tables.rows_for(name)
        if rows is not None:
            checks.append(_check(name, inputs[name], rows, tables))
    return checks


def _check(name: str, tensor: torch.Tensor, rows: int, tables: Tables) -> IdCheck:
    """Compare one input with the number of rows that it indexes."""
    counted = tensor if name != LABELS else tensor[tensor != IGNORE_INDEX]
    evidence: dict[str, Any] = dict(tables.figures())
    plural, singular, word = ("ids", "id", words.IDS_PAST_VOCABULARY)
    if name == LABELS:
        plural, singular, word = ("labels", "label", words.LABELS_PAST_VOCABULARY)
        evidence["ignored"] = int(tensor.numel() - counted.numel())
    if not counted.numel():
        return IdCheck(name=name, evidence=evidence)
    smallest, largest = int(counted.min()), int(counted.max())
    evidence |= {"smallest": smallest, "largest": largest}
    if smallest >= 0 and largest < rows:
        return IdCheck(name=name, evidence=evidence)
    is_wrong = (tensor < 0) | (tensor >= rows)
    if name == LABELS:
        is_wrong &= tensor != IGNORE_INDEX
    first = tuple(int(i) for i in is_wrong.nonzero()[0])
    extreme = f"largest {singular} {largest}" if largest >= rows else f"smallest {singular} {smallest}"
    sentence = f"{plural} past the vocabulary: {extreme}, {_table_sizes(name, tables)}"
    sentence += f"; the first of {int(is_wrong.sum())} is {int(tensor[first])} at {name}{list(first)}"
    evidence |= {"first": list(first), "wrong": int(is_wrong.sum()), "elements": tensor.numel()}
    return IdCheck(name=name, word=word, sentence=sentence, evidence=evidence)


def _table_sizes(name: str, tables: Tables) -> str:
    """Return the sizes of the tables that concern an input, in words."""
    parts = [f"embedding has {tables.embedding_rows} rows"]
    if name == LABELS:
        parts = [f"head has {tables.head_rows} rows", f"ignore index is {IGNORE_INDEX}"]
    if tables.vocabulary is not None:
        parts.append(f"the config's vocab_size is {tables.vocabulary}")
    if tables.tokenizer_length is not None:
        parts.append(f"the tokenizer has {tables.tokenizer_length} tokens")
    return ", ".join(parts)


def tokenizer_length(folder: Path) -> int | None:
    """Return one more than the largest id in a folder's `tokenizer.json`; None where there is no such file.

    The count of tokens is not enough: an added token may have any id.
    """
    try:
        table = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary = table["model"]["vocab"]
        ids = [len(vocabulary) - 1] if isinstance(vocabulary, list) else list(vocabulary.values())
        ids += [token["id"] for token in table.get("added_tokens") or ()]
        return max(int(i) for i in ids) + 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # not a tokenizer that can be counted here


class KernelAssertedError(Exception):
    """A kernel has asserted and the device's context is lost: nothing more can be checked in this process."""


def is_kernel_assert(error: BaseException) -> bool:
    """Report whether an error means that a kernel was asked for a row that no table has."""
    text = str(error)
    if isinstance(error, IndexError):  # torch on the CPU: "index out of range in self", "Target 9 is out of bounds."
        return "out of range" in text or "out of bounds" in text
    return isinstance(error, RuntimeError) and context_is_lost(error)


def context_is_lost(error: BaseException) -> bool:
    """Report whether the device's context is lost: nothing runs on it in this process any more."""
    return "device-side assert" in str(error)


def asserted(inputs: Mapping[str, torch.Tensor], device: torch.device, error: BaseException) -> str:
    """Return a sentence on a kernel's assertion where ids and labels were inside the tables on the CPU."""
    names = ", ".join(name for name in (*TOKEN_IDS, LABELS) if name in inputs) or "the inputs"
    line = (str(error).strip().splitlines() or ["no message"])[0][:200]
    return (
        f"ids or labels changed during transfer to device {device}: {names} are inside "
        f"every table on the CPU, and a kernel was asked for a row past an end ({type(error).__name__}: {line})"
    )


def text_config(model: torch.nn.Module) -> Any:
    """Return the config of a model's text part, which in a multimodal model is inside of its own config."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _is_classifier(model: torch.nn.Module) -> bool:
    """Report whether a model's labels are numbers of classes; with several labels per text they are truth values."""
    has_several_labels = getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification"
    models = (model, ask(model, "get_base_model"))
    names = [type(candidate).__name__ for candidate in models if candidate is not None]
    return not has_several_labels and any(name.endswith("Classification") for name in names)


def ask(model: torch.nn.Module, method: str) -> Any:
    """Return the result of a model's method without arguments; None where the model has none."""
    try:
        return getattr(model, method)()
    except (AttributeError, NotImplementedError, TypeError):  # a user's own model, or one without text
        return None


def _rows(module: Any) -> int | None:
    """Return the number of rows of a table of embeddings: the one in use, inside PEFT's wrappers."""
    saved = getattr(module, "modules_to_save", None)
    if saved:
        module = next(iter(saved.values()))
    elif hasattr(module, "get_base_layer"):
        module = module.get_base_layer()
    for name in ("num_embeddings", "out_features"):
        if isinstance(getattr(module, name, None), int):
            return int(getattr(module, name))
    weight = getattr(module, "weight", None)
    return int(weight.shape[0]) if isinstance(weight, torch.Tensor) and weight.dim() == 2 else None
