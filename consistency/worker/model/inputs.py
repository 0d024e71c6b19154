"""The fixed inputs of the forward stage: read from a file, or made from the model's config and a text.

Token ids are those of a text where the base has a tokenizer: on random ids a trained model is far from anything that it
has seen, and rounding grows several times as large. What else is random comes from NumPy's generators, which give the
same values everywhere; with one seed `torch.randn` differs between kernel variants.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from consistency.case.case import Case
from consistency.case.inputs_file import paragraphs
from consistency.case.recognition import has_tokenizer
from consistency.errors import InputError, first_line
from consistency.worker.model.id_checks import IGNORE_INDEX, LABELS, TOKEN_IDS, Tables, ask, text_config
from consistency.worker.model.running import matrix_elements

SEED = 2520

TEXT = Path(__file__).with_name("inputs_text.txt")
"""Prose in several languages, code, JSON and arithmetic: as many paragraphs as the largest level has sequences."""


def fixed_inputs(case: Case, model: torch.nn.Module) -> tuple[dict[str, torch.Tensor] | None, str]:
    """Return the keyword arguments of the forward pass on the CPU, or None and the reason why there are none."""
    return sourced_inputs(case, model)[:2]


def sourced_inputs(case: Case, model: torch.nn.Module) -> tuple[dict[str, torch.Tensor] | None, str, str]:
    """Return the same, and what the inputs are: text, tensors of a file, or random ids and why they are no text."""
    if case.inputs is not None and not case.makes_inputs:
        return _from_file(case.inputs), "", "tensors of the file in --inputs"
    sequences = 1 if _takes_one(model) else case.sequences(matrix_elements(model))
    inputs, reason = made_inputs(model, sequences=sequences, tokens=case.tokens)
    takes_ids = inputs is not None and not inputs.keys().isdisjoint(TOKEN_IDS)
    rows, why = _text(case, model, sequences) if takes_ids else (None, "the model takes no token ids")
    if inputs is not None and rows is not None:
        return _with_text(inputs, rows, model), "", "text" if case.inputs is None else "the text in --inputs"
    if case.inputs is not None:
        return None, reason or f"the text in --inputs cannot be used: {why}", ""
    return inputs, reason, f"random token ids: {why}" if takes_ids else ""


def made_inputs(model: torch.nn.Module, *, sequences: int, tokens: int) -> tuple[dict[str, torch.Tensor] | None, str]:
    """Return keyword arguments made from a model's config, or None and the reason why none can be made."""
    config = getattr(model, "config", None)
    if config is None:
        return None, "the model has no config to make inputs from: give --inputs FILE.safetensors"
    text = text_config(model)
    generator = np.random.Generator(np.random.PCG64(SEED))
    name = getattr(model, "main_input_name", "input_ids")
    if name == "pixel_values":
        return _pixels(config, generator, sequences)
    sound = None if name == "input_ids" else _sound(name, config, generator, sequences, tokens)
    vocabulary = getattr(text, "vocab_size", None)
    decodes = bool(getattr(config, "is_encoder_decoder", False))
    if sound is not None and not decodes:
        return sound, ""
    if (sound is None and name != "input_ids") or not isinstance(vocabulary, int):
        return None, f"inputs for {name} cannot be made from the config: give --inputs FILE.safetensors"
    rows = Tables.of(model).embedding_rows
    vocabulary = vocabulary if rows is None else min(vocabulary, rows)
    longest = getattr(text, "max_position_embeddings", None) or tokens
    shape = (sequences, min(tokens, int(longest)))
    inputs = sound or {
        "input_ids": torch.from_numpy(generator.integers(0, vocabulary, size=shape, dtype=np.int64)),
        "attention_mask": torch.ones(shape, dtype=torch.int64),
    }
    if decodes:
        decoder = generator.integers(0, vocabulary, size=(shape[0], max(1, shape[1] // 2)), dtype=np.int64)
        inputs["decoder_input_ids"] = torch.from_numpy(decoder)
    if _has_two_encoders(model):
        pixels, reason = _pixels(config, generator, sequences)
        return (None, reason) if pixels is None else ({**inputs, **pixels}, "")
    return _with_image(inputs, config, generator), ""


def _takes_one(model: torch.nn.Module) -> bool:
    """Report whether a model refuses several sequences: a classifier looks for the last token by that of padding."""
    classifies = type(model).__name__.endswith("ForSequenceClassification")
    return classifies and getattr(text_config(model), "pad_token_id", None) is None


def _text(case: Case, model: torch.nn.Module, sequences: int) -> tuple[npt.NDArray[np.int64] | None, str]:
    """Return the ids of a text, a row per sequence, or None and why there are none that the model has rows for."""
    if case.factory is not None or not has_tokenizer(Path(case.base)):
        return None, "the base has no tokenizer"
    rows, reason = _encoded(case.base, case.inputs, sequences, case.tokens)
    tables = Tables.of(model)
    limit = min(filter(None, (tables.vocabulary, tables.embedding_rows)), default=0)
    if rows is not None and case.inputs is None and rows.max() >= limit:  # of a user's text it is a finding
        return None, f"its tokenizer gives id {rows.max()}, and the vocabulary has {limit}"
    return rows, reason


def tokenizer_of(folder: str) -> Any:
    """Return the tokenizer of a base, without code of its own; what it raises may be anything."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


@functools.lru_cache(maxsize=4)  # every stage asks, and a large tokenizer takes a second to load
def _encoded(folder: str, file: str | None, sequences: int, tokens: int) -> tuple[npt.NDArray[np.int64] | None, str]:
    """Return the ids of a text, or None and why the tokenizer of a folder gives none.

    Each sequence begins with another paragraph, goes on with those after it, and is full.
    """
    parts = paragraphs(TEXT if file is None else Path(file))
    try:
        tokenizer = tokenizer_of(folder)
        rows = []
        for i in range(min(sequences, len(parts))):
            text = "\n\n".join([*parts[i:], *parts[:i]])
            ids = tokenizer(text, truncation=True, max_length=tokens)["input_ids"]
            first = [] if tokenizer.bos_token_id in (None, *ids[:1]) else [tokenizer.bos_token_id]
            rows.append(np.resize([*first, *ids], tokens))  # repeated where a text is short
        return np.array(rows, dtype=np.int64), ""
    except Exception as error:  # the code and the files of any kind of tokenizer
        return None, f"its tokenizer does not work: {first_line(error)}"


def _with_text(
    inputs: dict[str, torch.Tensor], rows: npt.NDArray[np.int64], model: torch.nn.Module
) -> dict[str, torch.Tensor]:
    """Return the inputs with the ids of a text in place of random ones; those that stand for an image stay."""
    config: Any = model.config
    inputs = first_sequences(inputs, len(rows))
    text = torch.tensor(rows)
    if (ids := inputs.get("input_ids")) is not None:
        mark = getattr(config, "image_token_id", None) if "pixel_values" in inputs else None
        marks = 0 if mark is None else int((ids[0] == mark).sum())  # no random id is one
        inputs["input_ids"] = torch.cat([ids[:, :marks], text[:, : ids.shape[1] - marks]], dim=1)
    if (ids := inputs.get("decoder_input_ids")) is not None:
        inputs["decoder_input_ids"] = text.roll(-1, dims=0)[:, : ids.shape[1]]  # a decoder continues with other words
        if isinstance(start := getattr(config, "decoder_start_token_id", None), int):
            inputs["decoder_input_ids"][:, 0] = start
    return inputs


def first_sequences(inputs: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    """Return the first sequences of a batch; inputs that are no batch as they are."""
    sizes = {tensor.shape[:1] for tensor in inputs.values()}
    if len(sizes) != 1 or () in sizes:
        return inputs
    return {name: tensor[:count] for name, tensor in inputs.items()}


def with_labels(inputs: dict[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the inputs with labels, where they have none and the model has a head of words.

    The labels of a model that continues a text are the text, the first token of each sequence left out of the loss.
    """
    ids = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    rows, wanted = Tables.of(model).head_rows, inspect.signature(model.forward).parameters
    if LABELS in inputs or ids is None or rows is None or LABELS not in wanted:
        return inputs
    if ask(model, "get_output_embeddings") is None:  # one answer for a whole text
        return inputs
    labels = ids % rows
    labels[:, 0] = IGNORE_INDEX
    return {**inputs, LABELS: labels}


def _has_two_encoders(model: torch.nn.Module) -> bool:
    """Report models like CLIP, which need an image besides the text; in others an image becomes tokens."""
    wanted = inspect.signature(model.forward).parameters
    return "pixel_values" in wanted and "inputs_embeds" not in wanted


def _with_image(
    inputs: dict[str, torch.Tensor], config: Any, generator: np.random.Generator
) -> dict[str, torch.Tensor]:
    """Return the inputs with an image before each text, where the config says how many tokens one image becomes.

    LLaVA puts what its vision tower makes of the patches in the place of as many tokens of one id. Models that cut an
    image into a number of tiles get text alone.
    """
    vision, count = getattr(config, "vision_config", None), getattr(config, "image_seq_length", None)
    size, patch = getattr(vision, "image_size", None), getattr(vision, "patch_size", None)
    if count is None or not isinstance(size, int) or not isinstance(patch, int) or count != (size // patch) ** 2:
        return inputs
    if set(inputs) != {"input_ids", "attention_mask"} or hasattr(config, "image_grid_pinpoints"):
        return inputs
    mark, ids = config.image_token_id, inputs["input_ids"]
    ids[ids == mark] = 0 if mark else 1  # a mark is a patch, and their number is fixed
    ids = torch.cat([ids.new_full((ids.shape[0], count), mark), ids], dim=1)
    pixels, _ = _pixels(config, generator, ids.shape[0])
    assert pixels is not None
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **pixels}


def digest_of(inputs: dict[str, torch.Tensor]) -> str:
    """Return one digest for names, shapes, dtypes and bytes of the inputs."""
    h = hashlib.blake2b(digest_size=16)
    for name in sorted(inputs):
        tensor = inputs[name].contiguous()
        h.update(f"{name}{tensor.dtype}{list(tensor.shape)}".encode())
        h.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


def _from_file(path: str) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path, device="cpu"))
    except (SafetensorError, OSError) as error:
        raise InputError("cannot read the inputs file", where=path, got=error) from error


def _pixels(config: Any, generator: np.random.Generator, count: int) -> tuple[dict[str, torch.Tensor] | None, str]:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None)
    if size is None:
        return None, "the config names no image_size: give --inputs FILE.safetensors"
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    channels = getattr(vision, "num_channels", 3)
    frames = getattr(vision, "num_frames", None)
    shape = (count, channels, height, width) if frames is None else (count, frames, channels, height, width)
    return {"pixel_values": torch.from_numpy(generator.standard_normal(size=shape, dtype=np.float32))}, ""


def _sound(
    name: str, config: Any, generator: np.random.Generator, count: int, tokens: int
) -> dict[str, torch.Tensor] | None:
    """Return a spectrogram of the length that a model takes, or a wave that its convolutions make `tokens` frames of.

    None where the config does not say which.
    """
    bins, places = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
    kernels, strides = getattr(config, "conv_kernel", None), getattr(config, "conv_stride", None)
    shape: tuple[int, ...]
    if name == "input_features" and bins is not None and places is not None:
        shape = (count, bins, 2 * places)  # Whisper's second convolution has a stride of two
    elif name == "input_values" and kernels and strides:
        length = tokens
        for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
            length = (length - 1) * stride + kernel
        shape = (count, length)
    elif name == "input_values" and bins is not None and getattr(config, "max_length", None):
        shape = (count, config.max_length, bins)
    else:
        return None
    return {name: torch.from_numpy(generator.standard_normal(size=shape, dtype=np.float32))}
