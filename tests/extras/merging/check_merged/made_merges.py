"""Folders of merged weights, made by hand: right ones in the order of any writer, and each mistake that is known."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from consistency.comparison.result import Comparison
from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.extras.merging.check_merged.result import check_merged

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], object]

PREFIX = "base_model.model."


@dataclass(frozen=True)
class Case:
    """A base and an adapter in folders, and what the adapter adds to each weight: s, B and A."""

    base: Path
    adapter: Path
    tensors: Tensors
    deltas: Mapping[str, tuple[float, torch.Tensor, torch.Tensor]]

    def right(self, dtype: torch.dtype = torch.float32) -> Tensors:
        """Return the merge with one rounding at the end."""
        found = {name: tensor.to(dtype) for name, tensor in self.tensors.items()}
        for name in self.deltas:
            found[name] = self.with_delta(name, dtype=dtype)
        return found

    def with_delta(self, name: str, times: float = 1.0, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (self.tensors[name].double() + times * self.delta(name)).to(dtype)

    def delta(self, name: str) -> torch.Tensor:
        scaling, b, a = self.deltas[name]
        return scaling * (b.double() @ a.double())


def llama(folder: Path, *, config: Mapping[str, Any] | None = None, square: bool = False) -> Case:
    """Return a Llama of two blocks with a LoRA on all of its projections; with `square`, all of these are square."""
    hidden, inner = (32, 32) if square else (32, 48)
    tensors = random(
        {
            "model.embed_tokens.weight": (64, hidden),
            **{
                f"model.layers.{n}.{name}.weight": shape
                for n in range(2)
                for name, shape in {
                    "self_attn.q_proj": (32, hidden), "self_attn.k_proj": (16, hidden),
                    "self_attn.v_proj": (16, hidden), "self_attn.o_proj": (hidden, 32),
                    "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
                    "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
                }.items()
            },
            "model.norm.weight": (hidden,),
            "lm_head.weight": (64, hidden),
        }
    )  # fmt: skip
    settings = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64,
        "tie_word_embeddings": False,
    }  # fmt: skip
    targets = [name for name in tensors if "_proj" in name]
    return save(folder, tensors, settings, targets, config=config)


def fused(folder: Path) -> Case:
    """Return a model whose gate and up projections are one weight."""
    tensors = random({f"model.layers.{n}.mlp.{name}.weight": shape for n in range(2)
                      for name, shape in {"gate_up_proj": (64, 32), "down_proj": (32, 32)}.items()})  # fmt: skip
    return save(folder, tensors, {"model_type": "fused", "architectures": ["Fused"]}, list(tensors))


def random(shapes: Mapping[str, tuple[int, ...]], *, seed: int = 0) -> Tensors:
    stream = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=stream) * 0.05 for name, shape in shapes.items()}


def save(
    folder: Path, tensors: Tensors, settings: Mapping[str, Any], targets: list[str], *,
    config: Mapping[str, Any] | None = None,
) -> Case:  # fmt: skip
    """Write base and adapter."""
    given = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 16,
        "target_modules": sorted({name.removesuffix(".weight").rpartition(".")[2] for name in targets}),
        **(config or {}),
    }
    rank = given["r"]
    scaling = given["lora_alpha"] / (math.sqrt(rank) if given.get("use_rslora") else rank)
    factors = random(
        {
            key: shape
            for name in targets
            for key, shape in (
                (f"{name}.B", (tensors[name].shape[0], rank)),
                (f"{name}.A", (rank, tensors[name].shape[1])),
            )
        },
        seed=1,
    )
    deltas = {name: (scaling, factors[f"{name}.B"], factors[f"{name}.A"]) for name in targets}
    saved: Tensors = {}
    for name, (_, b, a) in deltas.items():
        module = f"{PREFIX}{name.removesuffix('.weight')}"
        saved |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    base, adapter = folder / "base", folder / "adapter"
    for path in (base, adapter):
        path.mkdir(parents=True)
    write(base, tensors, settings)
    save_file(saved, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps(given))
    return Case(base=base, adapter=adapter, tensors=tensors, deltas=deltas)


def write(folder: Path, tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    (folder / "config.json").write_text(json.dumps(dict(settings or {})))
    return folder


def checked(
    case: Case, folder: Path, tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any] | None = None
) -> Comparison:
    """Write a merged folder with the base's config, and check it."""
    merged = folder / "merged"
    shutil.rmtree(merged, ignore_errors=True)
    write(merged, tensors, settings or json.loads((case.base / "config.json").read_text()))
    return check_merged(merged, base=case.base, adapter=case.adapter)


def kinds(comparison: Comparison) -> list[str]:
    """Return the kinds of what has to be acted on."""
    return [finding.kind for finding in comparison.findings if finding.severity != "note"]


def message(comparison: Comparison, cause: MergeCause) -> str:
    """Return all that the one finding of a cause says."""
    (finding,) = (one for one in comparison.findings if one.kind == cause)
    return "\n".join([finding.message, *finding.detail])


def change_adapter(case: Case, change: Change, **config: object) -> None:
    """Write an adapter anew, with other tensors or settings."""
    file, settings = case.adapter / "adapter_model.safetensors", case.adapter / "adapter_config.json"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **config}))
