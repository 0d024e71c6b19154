"""The fixed inputs of the forward stage: read from a file, or made with NumPy from the model's config.

With one seed `torch.randn` differs between kernel variants; NumPy's generators give the same values everywhere.
"""

from __future__ import annotations

import hashlib
import inspect
from typing import Any

import numpy as np
import torch

from consistency.case.case import Case
from consistency.errors import InputError
from consistency.worker.model.id_checks import IGNORE_INDEX, LABELS, Tables, ask, text_config

SEED = 2520


def fixed_inputs(case: Case, model: torch.nn.Module) -> tuple[dict[str, torch.Tensor] | None, str]:
    """Return the keyword arguments of the forward pass on the CPU, or None and the reason why there are none."""
    if case.inputs is not None:
        return _from_file(case.inputs), ""
    return made_inputs(model, sequences=case.sequences, tokens=case.tokens)


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
    vocabulary = getattr(text, "vocab_size", None)
    if name != "input_ids" or not isinstance(vocabulary, int):
        return None, f"inputs for {name} cannot be made from the config: give --inputs FILE.safetensors"
    rows = Tables.of(model).embedding_rows
    vocabulary = vocabulary if rows is None else min(vocabulary, rows)
    longest = getattr(text, "max_position_embeddings", None) or tokens
    shape = (sequences, min(tokens, int(longest)))
    inputs = {
        "input_ids": torch.from_numpy(generator.integers(0, vocabulary, size=shape, dtype=np.int64)),
        "attention_mask": torch.ones(shape, dtype=torch.int64),
    }
    if getattr(config, "is_encoder_decoder", False):
        decoder = generator.integers(0, vocabulary, size=(shape[0], max(1, shape[1] // 2)), dtype=np.int64)
        inputs["decoder_input_ids"] = torch.from_numpy(decoder)
    if _has_two_encoders(model):
        pixels, reason = _pixels(config, generator, sequences)
        return (None, reason) if pixels is None else ({**inputs, **pixels}, "")
    return inputs, ""


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
    pixels = generator.standard_normal(size=(count, channels, height, width), dtype=np.float32)
    return {"pixel_values": torch.from_numpy(pixels)}, ""
