"""Make models of real sizes from their configurations: random weights, or sparse files that hold only a header.

    python -m benchmarks.shapes DIR tinyllama                  # 1.1 B, bfloat16, 2.2 GB
    python -m benchmarks.shapes DIR small                      # 0.17 B, float32, 0.6 GB
    python -m benchmarks.shapes DIR llama-8b --sparse          # 8 B: the files take no room on disk

`DIR/base` is the model, `DIR/NAME` one adapter each: `linear` (a LoRA of rank 16 on all linear layers), `linear-2`
(the same configuration, other values), `embeddings` (a LoRA on `lm_head`, `embed_tokens` and `q_proj`, with which PEFT
saves both embeddings whole) and `whole` (a LoRA on `q_proj` with head and embedding in `modules_to_save`).

The weights are normal with a standard deviation of 0.02, made by NumPy one tensor at a time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK = 16

SHARD_BYTES = 5 * 10**9
"""What transformers puts into one file by default."""

_WIDTHS = {"bfloat16": ("BF16", 2), "float32": ("F32", 4)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama model: the fields of its config, and the dtype that it is stored in."""

    dtype: str
    config: dict[str, Any] = field(default_factory=dict)


def _shape(dtype: str, hidden: int, inner: int, layers: int, heads: int, groups: int, vocabulary: int) -> Shape:
    return Shape(
        dtype=dtype,
        config={
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "vocab_size": vocabulary,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "dtype": dtype,
        },
    )


SHAPES = {
    "small": _shape("float32", 1024, 2816, 8, 16, 4, 32000),
    "tinyllama": _shape("bfloat16", 2048, 5632, 22, 32, 4, 32000),
    "llama-8b": _shape("bfloat16", 4096, 14336, 32, 32, 8, 128256),
    "two-blocks": _shape("bfloat16", 4096, 14336, 2, 32, 8, 4096),  # two blocks of llama-8b, few words
    "qwen-14b": _shape("bfloat16", 5120, 13824, 48, 40, 8, 152064),  # of the size of Qwen2.5 14B
    "llama-70b": _shape("bfloat16", 8192, 28672, 80, 64, 8, 128256),
}


def base_tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a base's tensors by name, in the order of the model."""
    c = shape.config
    hidden, inner, vocabulary = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    narrow = hidden // c["num_attention_heads"] * c["num_key_value_heads"]
    linear = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for i in range(c["num_hidden_layers"]):
        found |= {f"model.layers.{i}.{name}.weight": size for name, size in linear.items()}
        found |= {f"model.layers.{i}.{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def adapter_tensors(shape: Shape, targets: tuple[str, ...], whole: tuple[str, ...] = ()) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a LoRA's tensors by name; `whole` are saved beside the factors, or instead of them."""
    found: dict[str, tuple[int, ...]] = {}
    for name, size in base_tensors(shape).items():
        place = f"base_model.model.{name.removesuffix('.weight')}"
        last = place.rpartition(".")[2]
        if last in targets and last == "embed_tokens":
            found |= {f"{place}.lora_embedding_A": (RANK, size[0]), f"{place}.lora_embedding_B": (size[1], RANK)}
        elif last in targets:
            found |= {f"{place}.lora_A.weight": (RANK, size[1]), f"{place}.lora_B.weight": (size[0], RANK)}
        if last in whole:
            layer = ".base_layer" if last in targets else ""
            found[f"{place}{layer}.weight"] = size
    return found


def make(folder: Path, shape: Shape, *, sparse: bool = False) -> None:
    """Write a base and its adapters; of a sparse base one adapter, with its values."""
    _write_base(folder / "base", shape, sparse=sparse)
    _write_adapter(folder / "linear", shape, adapter_tensors(shape, LINEAR), targets=LINEAR, seed=1)
    if sparse:
        return
    _write_adapter(folder / "linear-2", shape, adapter_tensors(shape, LINEAR), targets=LINEAR, seed=2)
    ends, targets = ("embed_tokens", "lm_head"), ("lm_head", "embed_tokens", "q_proj")
    _write_adapter(folder / "embeddings", shape, adapter_tensors(shape, targets, ends), targets=targets, seed=3)
    tensors = adapter_tensors(shape, ("q_proj",), ends)
    _write_adapter(folder / "whole", shape, tensors, targets=("q_proj",), seed=4, modules_to_save=list(ends))


def make_headers(folder: Path, shape: Shape) -> None:
    """Write a base and its adapter `linear` as headers alone, which tell all sizes."""
    _write_base(folder / "base", shape, sparse=True)
    _write_adapter(folder / "linear", shape, adapter_tensors(shape, LINEAR), targets=LINEAR, seed=None)


def _write_base(folder: Path, shape: Shape, *, sparse: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config, indent=1), encoding="utf-8")
    width = _WIDTHS[shape.dtype][1]
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    room = SHARD_BYTES
    for name, size in base_tensors(shape).items():
        taken = int(np.prod(size)) * width
        if taken > room and shards[-1]:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = size
        room -= taken
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    names = ["model.safetensors"] if len(shards) == 1 else names
    stream = np.random.default_rng(0)
    for name, tensors in zip(names, shards, strict=True):
        _write(folder / name, tensors, shape.dtype, None if sparse else stream)
    if len(shards) > 1:
        places = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
        index = {"metadata": {}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _write_adapter(
    folder: Path,
    shape: Shape,
    tensors: dict[str, tuple[int, ...]],
    *,
    targets: tuple[str, ...],
    seed: int | None,
    modules_to_save: list[str] | None = None,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": list(targets),
        "modules_to_save": modules_to_save,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    # PEFT saves factors in float32, and a whole module in its own dtype
    whole = {name for name in tensors if ".lora_" not in name}
    dtypes = {name: shape.dtype if name in whole else "float32" for name in tensors}
    stream = None if seed is None else np.random.default_rng(seed)
    _write(folder / "adapter_model.safetensors", tensors, dtypes, stream)


def _write(
    path: Path,
    tensors: dict[str, tuple[int, ...]],
    dtype: str | dict[str, str],
    stream: np.random.Generator | None,
) -> None:
    """Write a safetensors file, one tensor after the other; without a stream its data are a hole."""
    dtypes = dtype if isinstance(dtype, dict) else dict.fromkeys(tensors, dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in tensors.items():
        code, width = _WIDTHS[dtypes[name]]
        start, end = end, end + int(np.prod(size)) * width
        header[name] = {"dtype": code, "shape": size, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if stream is None:
            file.truncate(8 + len(text) + end)
            return
        for name, size in tensors.items():
            for part in _values(stream, int(np.prod(size)), dtypes[name], normal=len(size) > 1):
                file.write(part.data)


def _values(stream: np.random.Generator, count: int, dtype: str, *, normal: bool) -> Iterator[np.ndarray]:
    """Yield the values of a tensor in parts: normal ones, or ones for a norm's weight."""
    for start in range(0, count, 1 << 22):
        size = min(count - start, 1 << 22)
        values = stream.standard_normal(size, dtype=np.float32) * np.float32(0.02) if normal else np.ones(size, "f4")
        # truncated to bfloat16: the upper half of the bits
        yield values if dtype == "float32" else (values.view(np.uint32) >> 16).astype(np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--sparse", action="store_true", help="a base without data, which takes no room on disk")
    arguments = parser.parse_args()
    make(arguments.folder, SHAPES[arguments.shape], sparse=arguments.sparse)


if __name__ == "__main__":
    main()
