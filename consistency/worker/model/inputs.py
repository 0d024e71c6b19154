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
"""Seed of the values that are made from a config."""

_OFF_A_TILE = 3
"""Tokens by which a text is shorter than a model's window, so that its last tile is not whole."""

TEXT = Path(__file__).with_name("inputs_text.txt")
"""Prose in several languages, code, JSON and arithmetic: as many paragraphs as the largest level has sequences."""


def fixed_inputs(case: Case, model: torch.nn.Module) -> tuple[dict[str, torch.Tensor] | None, str]:
    """Return the keyword arguments of the forward pass on the CPU, or None and the reason why there are none."""
    return sourced_inputs(case, model)[:2]


def sourced_inputs(case: Case, model: torch.nn.Module) -> tuple[dict[str, torch.Tensor] | None, str, str]:
    """Return the inputs of a forward pass, and where they come from.

    Returns
    -------
    inputs : dict of str to torch.Tensor, or None
        Keyword arguments on the CPU.
    reason : str
        Why there are none; else empty.
    source : str
        A text, tensors of a file, or random ids and why they are no text; empty of inputs without token ids.
    """
    if case.inputs is not None and not case.makes_inputs:
        return _from_file(case.inputs), "", "tensors of the file in --inputs"
    sequences = 1 if _takes_one(model) else case.sequences(matrix_elements(model))
    inputs, reason = made_inputs(model, sequences=sequences, tokens=case.tokens)
    takes_ids = inputs is not None and not inputs.keys().isdisjoint(TOKEN_IDS)
    rows: npt.NDArray[np.int64] | None = None
    why_no_text = "the model takes no token ids"
    if takes_ids:
        rows, why_no_text = _text_ids(case, model, sequences, case.tokens)
    if inputs is not None and rows is not None:
        source = "text" if case.inputs is None else "the text in --inputs"
        return _with_text(inputs, rows, model), "", source
    if case.inputs is not None:
        return None, reason or f"the text in --inputs cannot be used: {why_no_text}", ""
    source = f"random token ids: {why_no_text}" if takes_ids else ""
    return inputs, reason, source


def long_input(case: Case, model: torch.nn.Module) -> tuple[dict[str, torch.Tensor] | None, str]:
    """Return one text as long as the level has, up to the model's window, or None and why there is none.

    The reason is empty where the case asks for none, and where the text would be no longer than the short ones.
    """
    if not case.long_tokens:
        return None, ""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None, "the model has an encoder and a decoder"
    inputs, reason = made_inputs(model, sequences=1, tokens=1)
    if inputs is None or set(inputs) != {"input_ids", "attention_mask"}:
        return None, reason or "the model does not read token ids alone"
    longest = getattr(text_config(model), "max_position_embeddings", None)
    tokens = case.long_tokens
    if isinstance(longest, int) and longest < tokens:
        tokens = longest - _OFF_A_TILE
    if tokens <= case.tokens:
        return None, ""
    inputs, reason = made_inputs(model, sequences=1, tokens=tokens)
    assert inputs is not None, reason
    rows, _ = _text_ids(case, model, 1, tokens)
    return inputs if rows is None else _with_text(inputs, rows, model), ""


def made_inputs(model: torch.nn.Module, *, sequences: int, tokens: int) -> tuple[dict[str, torch.Tensor] | None, str]:
    """Return keyword arguments made from a model's config, or None and the reason why none can be made."""
    config = getattr(model, "config", None)
    if config is None:
        return None, "the model has no config to make inputs from: give --inputs FILE.safetensors"
    # all draws are of one generator, in this order: another order would give other inputs
    generator = np.random.Generator(np.random.PCG64(SEED))
    name = getattr(model, "main_input_name", "input_ids")
    if name == "pixel_values":
        return _pixels(config, generator, sequences)
    sound = None if name == "input_ids" else _sound(name, config, generator, sequences, tokens)
    has_decoder = bool(getattr(config, "is_encoder_decoder", False))
    if sound is not None and not has_decoder:
        return sound, ""
    text = text_config(model)
    vocabulary = getattr(text, "vocab_size", None)
    is_unknown_kind = sound is None and name != "input_ids"
    if is_unknown_kind or not isinstance(vocabulary, int):
        return None, f"inputs for {name} cannot be made from the config: give --inputs FILE.safetensors"
    rows = Tables.of(model).embedding_rows
    if rows is not None:
        vocabulary = min(vocabulary, rows)
    longest = getattr(text, "max_position_embeddings", None) or tokens
    shape = (sequences, min(tokens, int(longest)))
    inputs = sound or {
        "input_ids": torch.from_numpy(generator.integers(0, vocabulary, size=shape, dtype=np.int64)),
        "attention_mask": torch.ones(shape, dtype=torch.int64),
    }
    if has_decoder:
        decoder_ids = generator.integers(0, vocabulary, size=(shape[0], max(1, shape[1] // 2)), dtype=np.int64)
        inputs["decoder_input_ids"] = torch.from_numpy(decoder_ids)
    if _has_two_encoders(model):
        pixels, reason = _pixels(config, generator, sequences)
        if pixels is None:
            return None, reason
        return {**inputs, **pixels}, ""
    return _with_image(inputs, config, generator), ""


def _takes_one(model: torch.nn.Module) -> bool:
    """Report whether a model refuses several sequences: a classifier looks for the last token by that of padding."""
    is_classifier = type(model).__name__.endswith("ForSequenceClassification")
    return is_classifier and getattr(text_config(model), "pad_token_id", None) is None


def _text_ids(
    case: Case, model: torch.nn.Module, sequences: int, tokens: int
) -> tuple[npt.NDArray[np.int64] | None, str]:
    """Return the ids of a text, `(sequences, tokens)`, or None and the reason why the model cannot read one."""
    if case.factory is not None or not has_tokenizer(Path(case.base)):
        return None, "the base has no tokenizer"
    rows, reason = _encoded(case.base, case.inputs, sequences, tokens)
    tables = Tables.of(model)
    limit = min(filter(None, (tables.vocabulary, tables.embedding_rows)), default=0)
    # ids of a user's own text that are too large are a finding, so they are kept
    if rows is not None and case.inputs is None and rows.max() >= limit:
        return None, f"its tokenizer gives id {rows.max()}, and the vocabulary has {limit}"
    return rows, reason


def tokenizer_of(folder: str) -> Any:
    """Return the tokenizer of a base, without running code of the base's folder; it may raise any error."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


@functools.lru_cache(maxsize=4)  # every stage asks, and a large tokenizer takes a second to load
def _encoded(folder: str, file: str | None, sequences: int, tokens: int) -> tuple[npt.NDArray[np.int64] | None, str]:
    """Return the ids of a text, `(sequences, tokens)`, or None and why the tokenizer of a folder gives none.

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
    """Return the inputs with the ids of a text in place of random ones; ids that stand for an image stay."""
    config: Any = model.config
    inputs = first_sequences(inputs, len(rows))
    text = torch.tensor(rows)
    if (ids := inputs.get("input_ids")) is not None:
        image_id = getattr(config, "image_token_id", None) if "pixel_values" in inputs else None
        # all sequences have as many at their start, and no random id is one
        image_ids = 0 if image_id is None else int((ids[0] == image_id).sum())
        inputs["input_ids"] = torch.cat([ids[:, :image_ids], text[:, : ids.shape[1] - image_ids]], dim=1)
    if (ids := inputs.get("decoder_input_ids")) is not None:
        inputs["decoder_input_ids"] = text.roll(-1, dims=0)[:, : ids.shape[1]]  # a decoder continues with other words
        start = getattr(config, "decoder_start_token_id", None)
        if isinstance(start, int):
            inputs["decoder_input_ids"][:, 0] = start
    return inputs


def first_sequences(inputs: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    """Return the first sequences of a batch; return inputs whose tensors differ in their number of rows unchanged."""
    sizes = {tensor.shape[:1] for tensor in inputs.values()}
    if len(sizes) != 1 or () in sizes:
        return inputs
    return {name: tensor[:count] for name, tensor in inputs.items()}


def with_labels(inputs: dict[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the inputs with labels, where they have none and the model has a head of words.

    The labels of a model that continues a text are the text, the first token of each sequence left out of the loss.
    """
    ids = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    rows, parameters = Tables.of(model).head_rows, inspect.signature(model.forward).parameters
    if LABELS in inputs or ids is None or rows is None or LABELS not in parameters:
        return inputs
    if ask(model, "get_output_embeddings") is None:  # one answer for a whole text
        return inputs
    labels = ids % rows
    labels[:, 0] = IGNORE_INDEX
    return {**inputs, LABELS: labels}


def _has_two_encoders(model: torch.nn.Module) -> bool:
    """Report whether a model needs an image besides the text, like CLIP; in others an image becomes tokens."""
    parameters = inspect.signature(model.forward).parameters
    return "pixel_values" in parameters and "inputs_embeds" not in parameters


def _with_image(
    inputs: dict[str, torch.Tensor], config: Any, generator: np.random.Generator
) -> dict[str, torch.Tensor]:
    """Return the inputs with an image before each text, where the config says how many tokens one image becomes.

    LLaVA puts one vector of its vision tower per patch in the place of as many tokens of one id. Models that cut an
    image into a number of tiles get text alone.
    """
    vision, count = getattr(config, "vision_config", None), getattr(config, "image_seq_length", None)
    size, patch = getattr(vision, "image_size", None), getattr(vision, "patch_size", None)
    if count is None or not isinstance(size, int) or not isinstance(patch, int) or count != (size // patch) ** 2:
        return inputs
    if set(inputs) != {"input_ids", "attention_mask"} or hasattr(config, "image_grid_pinpoints"):
        return inputs
    image_id, ids = config.image_token_id, inputs["input_ids"]
    # a token of this id stands for a patch, and the number of patches is fixed: none may be among the random ids
    ids[ids == image_id] = 0 if image_id else 1
    ids = torch.cat([ids.new_full((ids.shape[0], count), image_id), ids], dim=1)
    pixels, _ = _pixels(config, generator, ids.shape[0])
    assert pixels is not None
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **pixels}


def digest_of(inputs: dict[str, torch.Tensor]) -> str:
    """Return one digest for names, shapes, dtypes and bytes of the inputs."""
    hasher = hashlib.blake2b(digest_size=16)
    for name in sorted(inputs):
        tensor = inputs[name].contiguous()
        hasher.update(f"{name}{tensor.dtype}{list(tensor.shape)}".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def _from_file(path: str) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path, device="cpu"))
    except (SafetensorError, OSError) as error:
        raise InputError("cannot read the inputs file", where=path, got=error) from error


def _pixels(config: Any, generator: np.random.Generator, count: int) -> tuple[dict[str, torch.Tensor] | None, str]:
    """Return random images or videos of the size that a config names, or None and the reason why there are none."""
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
    """Return a spectrogram of a model's length, or a wave from which its convolutions make `tokens` frames.

    None where the config does not tell the shape.
    """
    bins, positions = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
    kernels, strides = getattr(config, "conv_kernel", None), getattr(config, "conv_stride", None)
    shape: tuple[int, ...]
    if name == "input_features" and bins is not None and positions is not None:
        shape = (count, bins, 2 * positions)  # Whisper's second convolution has a stride of two
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
