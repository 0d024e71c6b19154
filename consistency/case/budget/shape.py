"""Sizes of a base and an adapter, from JSON files and safetensors headers alone.

What these files do not state is None or left out, with the reason in `unknown`: an estimate from it would be a guess.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consistency.case.adapter_fit import read_adapter
from consistency.case.case import Case
from consistency.case.checkpoint import Checkpoint, TensorHeader, read_checkpoint, read_header, read_json
from consistency.case.quantized import weights_of

_BITS = re.compile(r"\d+")
_NUMBERED = re.compile(r"^(?P<stack>(?:[^.]*\.)*?)(?P<number>\d+)\.")
_EMBEDDING = re.compile(r"(^|\.|_)(embed\w*|wte|wpe|shared)(\.|$)", re.IGNORECASE)
_DTYPES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_BY_CODE = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}

# names of the same figure in configs of different architectures
_HIDDEN = ("hidden_size", "d_model", "n_embd", "dim", "hidden_dim", "embed_dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_INNER = ("intermediate_size", "d_ff", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim", "hidden_dim")
_ACTIVATION = ("hidden_act", "activation_function", "hidden_activation", "feed_forward_proj", "activation")
_KINKED = re.compile("relu|selu|hard")  # GELU, SiLU and ELU are smooth
_TEXT = ("text_config", "llm_config", "decoder")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One adapted layer: elements of its weight, and the rank of its low-rank update, None for other methods."""

    name: str
    elements: int
    rank: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A base and its adapter."""

    dtype: str = "float32"
    """That the base is loaded in."""
    elements: int = 0
    """Of the base's files."""
    mapped_bytes: int = 0
    converted_bytes: int = 0
    """`mapped_bytes`, `converted_bytes`: weights that stay mapped from their file, as all workers of a host share them,
    and those that loading converts, of which each worker has its own."""
    largest_elements: int = 0
    """Of the largest tensor."""
    blocks: int = 0
    block_features: int = 0
    """`blocks`, `block_features`: the repeated blocks, and the inputs and outputs of the matrices of the largest one,
    per token."""
    matrix_elements: int = 0
    """Of the matrices that every token is multiplied with: all but the embeddings, but a tied head."""
    hidden: int | None = None
    vocabulary: int | None = None
    heads: int | None = None
    positions: int | None = None
    """`hidden`, `vocabulary`, `heads`, `positions`: None where the model has none, or the config does not state it."""
    sequences: int | None = None
    tokens: int | None = None
    """`sequences`, `tokens`: of the inputs file; None where inputs are made."""
    quantized: bool = False
    """Whether the base is: its kernels need it on the device."""
    tied: bool = False
    """Whether the head of words reuses the embeddings."""
    kinked_units: int = 0
    """Units of a block whose activation function has a kink, as ReLU: their gradient depends on a decision."""
    experts: int = 0
    """That a router of each block chooses from; 0 without one."""
    adapter_bytes: int = 0
    """As PEFT loads it."""
    trained_elements: int = 0
    largest_trained_elements: int = 0
    """`trained_elements`, `largest_trained_elements`: of the adapter's tensors that have a gradient, and of the largest
    of them."""
    method: str = ""
    layers: tuple[Layer, ...] = ()
    """What the adapter changes."""
    unknown: tuple[str, ...] = ()
    """What cannot be estimated, and why."""

    @property
    def loaded_bytes(self) -> int:
        return self.mapped_bytes + self.converted_bytes

    @property
    def width(self) -> int:
        """Return the bytes of an element in the dtype that the base is loaded in."""
        return _DTYPES.get(self.dtype, 2)

    @property
    def merges_whole(self) -> bool:
        """Return whether the adapter changes a tied weight, so that no layer can be merged without another."""
        return self.tied and any(_EMBEDDING.search(layer.name) or "lm_head" in layer.name for layer in self.layers)

    @property
    def largest_layer_elements(self) -> int:
        return max((layer.elements for layer in self.layers), default=0)


def read_shape(case: Case) -> Shape:
    """Return the sizes of a case's base and adapter; nothing but JSON files and headers is read."""
    unknown: list[str] = []
    found: dict[str, Any] = {}
    base: Mapping[str, TensorHeader] = {}
    if not case.needs_model:
        return Shape()
    if case.factory is not None:
        unknown.append("the base is made by a function: its size is known only after it has run")
    else:
        config = read_json(Path(case.base) / "config.json")
        weights = read_checkpoint(
            Path(case.base), stem="model", pickle_stem="pytorch_model", allow_pickle=case.allow_pickle
        )
        base = weights_of(weights.tensors)
        found |= _base(case, config, weights, base, unknown)
    if case.adapter is not None:
        found |= _adapter(case, base, unknown)
    if case.inputs is not None and not case.makes_inputs:
        shapes = [header.shape for header in read_header(Path(case.inputs)).values()]
        longest = max((shape for shape in shapes if len(shape) >= 2), key=math.prod, default=None)
        if longest is not None:
            found |= {"sequences": longest[0], "tokens": longest[1]}
    return Shape(**found, unknown=tuple(unknown))


def _base(
    case: Case,
    config: Mapping[str, Any],
    weights: Checkpoint,
    tensors: Mapping[str, TensorHeader],
    unknown: list[str],
) -> dict[str, Any]:
    """Return the figures of a base; `tensors` are its weights as its layers have them, `weights` what stores them."""
    text = next((config[key] for key in _TEXT if isinstance(config.get(key), dict)), config)
    found: dict[str, Any] = {
        "hidden": _integer(text, *_HIDDEN),
        "vocabulary": _integer(text, "vocab_size"),
        "heads": _integer(text, *_HEADS),
        "positions": _integer(text, *_POSITIONS),
        "quantized": config.get("quantization_config") is not None,
        "kinked_units": _kinked_units(text),
        "experts": _integer(text, *_EXPERTS) or 0,
        "dtype": _dtype(case, config, text, tensors),
    }
    if weights.pickled:
        unknown.append("the weights of the base are a pickle, which has no header: memory is that of its files")
        return found | {"converted_bytes": sum(file.stat().st_size for file in weights.files)}
    if found["quantized"]:
        unknown.append("the base is quantized: memory of its kernels and exact weights are not estimated")
    if found["hidden"] is None:
        unknown.append("the config states no hidden size: activations are not estimated")
    width = _DTYPES.get(found["dtype"], 2)
    mapped = converted = 0
    for name, header in weights.tensors.items():
        count = math.prod(header.shape)
        # scales and tables of quantized weights keep their dtype
        if name in tensors and header.dtype in _BY_CODE and _BY_CODE[header.dtype] != found["dtype"]:
            converted += count * width
        else:
            mapped += count * _bits(header.dtype) // 8
    largest = max(tensors.values(), key=lambda header: math.prod(header.shape))
    return (
        found
        | _blocks(tensors)
        | {
            "elements": sum(math.prod(header.shape) for header in tensors.values()),
            "mapped_bytes": mapped,
            "converted_bytes": converted,
            "largest_elements": math.prod(largest.shape),
            "matrix_elements": _matrix_elements(tensors, tied=_is_tied(tensors, config)),
            "tied": _is_tied(tensors, config),
        }
    )


def _blocks(tensors: Mapping[str, TensorHeader]) -> dict[str, Any]:
    """Return the figures of the blocks that repeat: tensors whose names differ by their first number."""
    features = Counter[tuple[str, str]]()
    for header in tensors.values():
        match = _NUMBERED.match(header.name)
        if match is not None:
            features[match["stack"], match["number"]] += sum(header.shape) if len(header.shape) == 2 else 0
    return {"blocks": len(features), "block_features": max(features.values(), default=0)}


def _kinked_units(config: Mapping[str, Any]) -> int:
    named = next((config[key] for key in _ACTIVATION if isinstance(config.get(key), str)), "")
    inner = _integer(config, *_INNER) or 4 * (_integer(config, *_HIDDEN) or 0)  # as GPT-2 has it where it is not stated
    return inner if _KINKED.search(named.lower()) else 0


def _matrix_elements(tensors: Mapping[str, TensorHeader], *, tied: bool) -> int:
    matrices = {name: math.prod(header.shape) for name, header in tensors.items() if len(header.shape) == 2}
    looked_up = {name: count for name, count in matrices.items() if _EMBEDDING.search(name)}
    head = max(looked_up.values(), default=0) if tied else 0
    return sum(matrices.values()) - sum(looked_up.values()) + head


def _is_tied(tensors: Mapping[str, TensorHeader], config: Mapping[str, Any]) -> bool:
    """Report whether a head of words reuses the embeddings: the class has one, and no file holds it."""
    classes = _names_in(config, "architectures")
    has_head = any(
        name.endswith(("LMHeadModel", "ForCausalLM", "ForConditionalGeneration", "ForMaskedLM")) for name in classes
    )
    return has_head and not any("lm_head" in name or "decoder.weight" in name for name in tensors)


def _names_in(config: Mapping[str, Any], field: str) -> tuple[str, ...]:
    """Return the texts of a list; a field of another type is refused where the model is made."""
    given = config.get(field)
    return tuple(name for name in given if isinstance(name, str)) if isinstance(given, list) else ()


def _dtype(case: Case, config: Mapping[str, Any], text: Mapping[str, Any], tensors: Mapping[str, TensorHeader]) -> str:
    """Return the dtype that transformers loads in: the one asked for, the config's, or that of most elements."""
    if case.dtype != "auto":
        return case.dtype
    keys = [(table, key) for table in (config, text) for key in ("dtype", "torch_dtype")]
    declared = next((table[key] for table, key in keys if table.get(key)), None)
    if isinstance(declared, str) and declared.removeprefix("torch.") in _DTYPES:
        return declared.removeprefix("torch.")
    elements = Counter[str]()
    for header in tensors.values():
        elements[header.dtype] += math.prod(header.shape)
    return next((_BY_CODE[code] for code, _ in elements.most_common() if code in _BY_CODE), "float32")


def _adapter(case: Case, base: Mapping[str, TensorHeader], unknown: list[str]) -> dict[str, Any]:
    assert case.adapter is not None
    config, tensors = read_adapter(Path(case.adapter), allow_pickle=case.allow_pickle)
    if not tensors:
        unknown.append("the adapter is a pickle, which has no header: its layers are not estimated")
        size = sum(file.stat().st_size for file in Path(case.adapter).glob("adapter_model*"))
        return {"adapter_bytes": size, "method": str(config["peft_type"])}
    layers: dict[str, Layer] = {}
    whole = _names_in(config, "modules_to_save")
    factors = config["peft_type"] == "LORA"
    for header in tensors.values():
        layer = _adapted(header, base)
        if layer is not None and (layer.rank is not None or not factors):
            layers[layer.name] = layer
    if not layers:
        unknown.append(f"no layer that {config['peft_type']} adapts is in the headers: merges are not estimated")
    counts = {header.name: math.prod(header.shape) for header in tensors.values()}
    # a LoRA's file may hold embeddings that its config does not train
    trained = [
        count
        for name, count in counts.items()
        if not factors or "lora_" in name or any(f".{part}." in name for part in whole)
    ]
    return {
        # PEFT holds what it trains in float32, and what it saved whole in the dtype of its file
        "adapter_bytes": sum(
            count * max(32 if "lora_" in name else 0, _bits(tensors[name].dtype)) // 8 for name, count in counts.items()
        ),
        "trained_elements": sum(trained),
        "largest_trained_elements": max(trained, default=0),
        "method": str(config["peft_type"]),
        "layers": tuple(layers.values()),
    }


def _adapted(header: TensorHeader, base: Mapping[str, TensorHeader]) -> Layer | None:
    """Return the layer of the base that a tensor of an adapter belongs to."""
    parts = header.name.removeprefix("base_model.model.").split(".")
    sides = [i for i, part in enumerate(parts) if part.startswith("lora_")]
    rank = min(header.shape) if sides and len(header.shape) == 2 else None
    for end in range(sides[0] if sides else len(parts) - 1, 0, -1):
        name = ".".join(parts[:end])
        for owner in _names(name, base):
            shape = base[owner].shape
            if len(shape) >= 2:
                return Layer(name=name, elements=math.prod(shape), rank=rank)
    return None


def _names(module: str, base: Mapping[str, TensorHeader]) -> Iterator[str]:
    """Yield the names under which a file may hold a module's weight: leading components differ between files."""
    parts = module.split(".")
    for start in range(len(parts)):
        name = ".".join([*parts[start:], "weight"])
        if name in base:
            yield name


def _bits(code: str) -> int:
    """Return the bits of an element: the number in a dtype's name (`F8_E4M3` has 8), a byte for a boolean."""
    match = _BITS.search(code)
    return 8 if match is None else int(match[0])


def _integer(table: Mapping[str, Any], *names: str) -> int | None:
    found = (table.get(name) for name in names)
    return next((v for v in found if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)
