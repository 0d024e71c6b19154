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
_TEXT = ("text_config", "llm_config", "decoder")  # the language model's part of a multimodal config


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One adapted layer: elements of its weight, and the rank of its low-rank update, None for other methods."""

    name: str
    elements: int
    rank: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a base and its adapter."""

    dtype: str = "float32"
    """Dtype that the base is loaded in."""
    elements: int = 0
    """Elements in the base's files."""
    mapped_bytes: int = 0
    """Bytes of the weights that stay mapped from their file: all workers of a host share them."""
    converted_bytes: int = 0
    """Bytes of the weights that loading converts: each worker has its own."""
    largest_elements: int = 0
    """Elements of the largest tensor."""
    blocks: int = 0
    """Number of the repeated blocks."""
    block_features: int = 0
    """Inputs and outputs of the matrices of the largest block, per token."""
    matrix_elements: int = 0
    """Elements of the matrices that every token is multiplied with: no embeddings, except a tied head."""
    hidden: int | None = None
    vocabulary: int | None = None
    heads: int | None = None
    positions: int | None = None
    """`hidden`, `vocabulary`, `heads`, `positions`: None where the model has none, or the config does not state it."""
    sequences: int | None = None
    tokens: int | None = None
    """`sequences`, `tokens`: the shape of the inputs file; None where inputs are made."""
    quantized: bool = False
    """Whether the base is quantized: its kernels need it on the device."""
    tied: bool = False
    """Whether the head of words reuses the embeddings."""
    kinked_units: int = 0
    """Units of a block whose activation function has a kink, as ReLU: their gradient depends on a decision."""
    experts: int = 0
    """Number of experts that a router of each block chooses from; 0 without one."""
    adapter_bytes: int = 0
    """Bytes of the adapter as PEFT loads it."""
    trained_elements: int = 0
    """Elements of the adapter's tensors that have a gradient."""
    largest_trained_elements: int = 0
    """Elements of the largest tensor that has a gradient."""
    method: str = ""
    """PEFT's name of the adapter's method, such as `LORA`."""
    layers: tuple[Layer, ...] = ()
    """The layers that the adapter changes."""
    unknown: tuple[str, ...] = ()
    """What cannot be estimated, and why, in words."""

    @property
    def loaded_bytes(self) -> int:
        """Return the bytes of all weights of the base once it is loaded."""
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
        """Return the elements of the largest weight that the adapter changes; 0 where it changes none."""
        return max((layer.elements for layer in self.layers), default=0)


def read_shape(case: Case) -> Shape:
    """Return the sizes of a case's base and adapter; nothing but JSON files and headers is read."""
    if not case.needs_model:
        return Shape()
    unknown: list[str] = []
    sizes: dict[str, Any] = {}
    base_headers: Mapping[str, TensorHeader] = {}
    if case.factory is not None:
        unknown.append("the base is made by a function: its size is known only after it has run")
    else:
        config = read_json(Path(case.base) / "config.json")
        weights = read_checkpoint(
            Path(case.base), stem="model", pickle_stem="pytorch_model", allow_pickle=case.allow_pickle
        )
        base_headers = weights_of(weights.tensors)
        sizes |= _base_sizes(case, config, weights, base_headers, unknown)
    if case.adapter is not None:
        sizes |= _adapter_sizes(case, base_headers, unknown)
    if case.inputs is not None and not case.makes_inputs:
        sizes |= _input_sizes(Path(case.inputs))
    return Shape(**sizes, unknown=tuple(unknown))


def _input_sizes(path: Path) -> dict[str, int]:
    """Return sequences and tokens of the largest tensor in an inputs file; empty where none has two dimensions."""
    shapes = [header.shape for header in read_header(path).values()]
    largest = max((shape for shape in shapes if len(shape) >= 2), key=math.prod, default=None)
    return {} if largest is None else {"sequences": largest[0], "tokens": largest[1]}


def _base_sizes(
    case: Case,
    config: Mapping[str, Any],
    weights: Checkpoint,
    headers: Mapping[str, TensorHeader],
    unknown: list[str],
) -> dict[str, Any]:
    """Return the fields of `Shape` that are the base's, and add to `unknown` what is not estimated.

    `headers` has each weight in the shape of its layer; `weights` has the tensors as they are stored.
    """
    text_config = next((config[key] for key in _TEXT if isinstance(config.get(key), dict)), config)
    dtype = _loaded_dtype(case, config, text_config, headers)
    sizes: dict[str, Any] = {
        "hidden": _integer(text_config, *_HIDDEN),
        "vocabulary": _integer(text_config, "vocab_size"),
        "heads": _integer(text_config, *_HEADS),
        "positions": _integer(text_config, *_POSITIONS),
        "quantized": config.get("quantization_config") is not None,
        "kinked_units": _kinked_units(text_config),
        "experts": _integer(text_config, *_EXPERTS) or 0,
        "dtype": dtype,
    }
    if weights.pickled:
        unknown.append("the weights of the base are a pickle, which has no header: memory is that of its files")
        return sizes | {"converted_bytes": sum(file.stat().st_size for file in weights.files)}
    if sizes["quantized"]:
        unknown.append("the base is quantized: memory of its kernels and exact weights are not estimated")
    if sizes["hidden"] is None:
        unknown.append("the config states no hidden size: activations are not estimated")
    mapped_bytes, converted_bytes = _stored_bytes(weights, headers, dtype)
    largest = max(headers.values(), key=lambda header: math.prod(header.shape))
    tied = _is_tied(headers, config)
    return (
        sizes
        | _block_sizes(headers)
        | {
            "elements": sum(math.prod(header.shape) for header in headers.values()),
            "mapped_bytes": mapped_bytes,
            "converted_bytes": converted_bytes,
            "largest_elements": math.prod(largest.shape),
            "matrix_elements": _matrix_elements(headers, tied=tied),
            "tied": tied,
        }
    )


def _stored_bytes(weights: Checkpoint, headers: Mapping[str, TensorHeader], dtype: str) -> tuple[int, int]:
    """Return the bytes of the weights that stay mapped, and of those that are converted to the dtype."""
    mapped_bytes = converted_bytes = 0
    for name, header in weights.tensors.items():
        count = math.prod(header.shape)
        # scales and tables of quantized weights keep their dtype
        is_weight = name in headers and header.dtype in _BY_CODE
        if is_weight and _BY_CODE[header.dtype] != dtype:
            converted_bytes += count * _DTYPES.get(dtype, 2)
        else:
            mapped_bytes += count * _bits(header.dtype) // 8
    return mapped_bytes, converted_bytes


def _block_sizes(headers: Mapping[str, TensorHeader]) -> dict[str, Any]:
    """Return the sizes of the blocks that repeat: tensors whose names differ by their first number."""
    features = Counter[tuple[str, str]]()
    for header in headers.values():
        match = _NUMBERED.match(header.name)
        if match is not None:
            is_matrix = len(header.shape) == 2
            # a block without matrices is counted too
            features[match["stack"], match["number"]] += sum(header.shape) if is_matrix else 0
    return {"blocks": len(features), "block_features": max(features.values(), default=0)}


def _kinked_units(config: Mapping[str, Any]) -> int:
    """Return the inner units of a block where their activation function has a kink; 0 where it is smooth."""
    activation = next((config[key] for key in _ACTIVATION if isinstance(config.get(key), str)), "")
    units = _integer(config, *_INNER) or 4 * (_integer(config, *_HIDDEN) or 0)  # GPT-2 states none, and has four times
    return units if _KINKED.search(activation.lower()) else 0


def _matrix_elements(headers: Mapping[str, TensorHeader], *, tied: bool) -> int:
    """Return the elements of all matrices but the embeddings; a tied head counts, as the largest of these."""
    elements = {name: math.prod(header.shape) for name, header in headers.items() if len(header.shape) == 2}
    embeddings = [count for name, count in elements.items() if _EMBEDDING.search(name)]
    head = max(embeddings, default=0) if tied else 0
    return sum(elements.values()) - sum(embeddings) + head


def _is_tied(headers: Mapping[str, TensorHeader], config: Mapping[str, Any]) -> bool:
    """Report whether a head of words reuses the embeddings: the class has one, and no file holds it."""
    endings = ("LMHeadModel", "ForCausalLM", "ForConditionalGeneration", "ForMaskedLM")
    has_head = any(name.endswith(endings) for name in _names_in(config, "architectures"))
    return has_head and not any("lm_head" in name or "decoder.weight" in name for name in headers)


def _names_in(config: Mapping[str, Any], field: str) -> tuple[str, ...]:
    """Return the texts of a list; a field of another type is refused where the model is made."""
    names = config.get(field)
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()


def _loaded_dtype(
    case: Case, config: Mapping[str, Any], text_config: Mapping[str, Any], headers: Mapping[str, TensorHeader]
) -> str:
    """Return the dtype that transformers loads in: the one asked for, the config's, or that of most elements."""
    if case.dtype != "auto":
        return case.dtype
    # `dtype` is the newer name of `torch_dtype`, and the config of a part fills in what the whole does not state.
    candidates = [
        config.get("dtype"),
        config.get("torch_dtype"),
        text_config.get("dtype"),
        text_config.get("torch_dtype"),
    ]
    declared = next(filter(None, candidates), None)
    if isinstance(declared, str) and declared.removeprefix("torch.") in _DTYPES:
        return declared.removeprefix("torch.")
    elements = Counter[str]()
    for header in headers.values():
        elements[header.dtype] += math.prod(header.shape)
    return next((_BY_CODE[code] for code, _ in elements.most_common() if code in _BY_CODE), "float32")


def _adapter_sizes(case: Case, base: Mapping[str, TensorHeader], unknown: list[str]) -> dict[str, Any]:
    """Return the fields of `Shape` that are the adapter's, and add to `unknown` what is not estimated."""
    assert case.adapter is not None
    config, tensors = read_adapter(Path(case.adapter), allow_pickle=case.allow_pickle)
    method = str(config["peft_type"])
    if not tensors:
        unknown.append("the adapter is a pickle, which has no header: its layers are not estimated")
        size = sum(file.stat().st_size for file in Path(case.adapter).glob("adapter_model*"))
        return {"adapter_bytes": size, "method": method}
    is_lora = method == "LORA"
    layers: dict[str, Layer] = {}
    for header in tensors.values():
        layer = _adapted_layer(header, base)
        if layer is not None and (layer.rank is not None or not is_lora):
            layers[layer.name] = layer
    if not layers:
        unknown.append(f"no layer that {method} adapts is in the headers: merges are not estimated")
    whole_modules = _names_in(config, "modules_to_save")
    adapter_bytes = 0
    trained = []
    for name, header in tensors.items():
        count = math.prod(header.shape)
        is_factor = "lora_" in name
        # PEFT holds what it trains in float32, and what it saved whole in the dtype of its file
        bits = max(32 if is_factor else 0, _bits(header.dtype))
        adapter_bytes += count * bits // 8
        # a LoRA's file may hold embeddings that its config does not train
        is_saved_whole = any(f".{module}." in name for module in whole_modules)
        if not is_lora or is_factor or is_saved_whole:
            trained.append(count)
    return {
        "adapter_bytes": adapter_bytes,
        "trained_elements": sum(trained),
        "largest_trained_elements": max(trained, default=0),
        "method": method,
        "layers": tuple(layers.values()),
    }


def _adapted_layer(header: TensorHeader, base: Mapping[str, TensorHeader]) -> Layer | None:
    """Return the layer of the base that a tensor of an adapter belongs to; None where the base has no such layer."""
    components = header.name.removeprefix("base_model.model.").split(".")
    factors = [i for i, component in enumerate(components) if component.startswith("lora_")]
    rank = min(header.shape) if factors and len(header.shape) == 2 else None
    # Methods other than LoRA name their tensors freely: the longest prefix that is a layer counts.
    longest = factors[0] if factors else len(components) - 1
    for end in range(longest, 0, -1):
        name = ".".join(components[:end])
        for weight in _weight_names(name, base):
            shape = base[weight].shape
            if len(shape) >= 2:
                return Layer(name=name, elements=math.prod(shape), rank=rank)
    return None


def _weight_names(module: str, base: Mapping[str, TensorHeader]) -> Iterator[str]:
    """Yield the names under which a file may hold a module's weight: leading components differ between files."""
    components = module.split(".")
    for start in range(len(components)):
        name = ".".join([*components[start:], "weight"])
        if name in base:
            yield name


def _bits(code: str) -> int:
    """Return the bits of an element: the number in a dtype's name (`F8_E4M3` has 8), a byte for a boolean."""
    match = _BITS.search(code)
    return 8 if match is None else int(match[0])


def _integer(table: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of these fields that is a whole number above 0; None where there is none."""
    for name in names:
        value = table.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
