"""Tiny models of every family from their configurations, and adapters of every method that PEFT can save for them.

Nothing here lists PEFT's methods: they are the configuration classes that PEFT registers, and each switch of a class is
a variant. What stands here is what PEFT cannot know: sizes that fit a tiny model, by name of the field. Weights are
random; the fresh parameters of an adapter are moved by noise from NumPy, so that every one has an effect.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

HIDDEN, WORDS = 32, 64

NOISE = 0.02
"""Standard deviation of what is added to fresh parameters: that of the fresh weights of most models."""

_SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,  # X-LoRA insists
}
_PIXELS: dict[str, Any] = {"image_size": 16, "patch_size": 8}
_SIDES: dict[str, Any] = {
    "d_model": HIDDEN,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 2 * HIDDEN,
    "decoder_ffn_dim": 2 * HIDDEN,
    "vocab_size": WORDS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    """A model: its class and the fields of its configuration.

    Attributes
    ----------
    task : str or None
        Type of task that PEFT has to know for prompts; None where it has none for such a model.
    """

    family: str
    type: str
    model: str
    config: Mapping[str, Any]
    task: str | None = None


MODELS: dict[str, Tiny] = {
    "llama": Tiny(
        family="decoder", type="llama", model="LlamaForCausalLM", task="CAUSAL_LM",
        config={**_SIZES, "num_key_value_heads": 2},
    ),
    "gpt2": Tiny(
        family="decoder", type="gpt2", model="GPT2LMHeadModel", task="CAUSAL_LM",
        config={"n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": WORDS,
                "bos_token_id": 1, "eos_token_id": 2},
    ),
    "bert": Tiny(
        family="encoder", type="bert", model="BertForSequenceClassification", task="SEQ_CLS", config=_SIZES,
    ),
    "t5": Tiny(
        family="encoder–decoder", type="t5", model="T5ForConditionalGeneration", task="SEQ_2_SEQ_LM",
        config={"d_model": HIDDEN, "d_kv": 8, "d_ff": 2 * HIDDEN, "num_layers": 2, "num_heads": 4, "vocab_size": WORDS,
                "decoder_start_token_id": 0},
    ),
    "bart": Tiny(
        family="encoder–decoder", type="bart", model="BartForConditionalGeneration", task="SEQ_2_SEQ_LM",
        config={**_SIDES, "max_position_embeddings": 64},
    ),
    "vit": Tiny(
        family="vision", type="vit", model="ViTForImageClassification", config={**_SIZES, **_PIXELS},
    ),
    "resnet": Tiny(
        family="vision", type="resnet", model="ResNetForImageClassification",
        config={"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic",
                "image_size": 32, "num_labels": 4},
    ),
    "videomae": Tiny(
        family="video", type="videomae", model="VideoMAEForVideoClassification",
        config={**_SIZES, **_PIXELS, "num_frames": 4, "tubelet_size": 2},
    ),
    "whisper": Tiny(
        family="audio", type="whisper", model="WhisperForConditionalGeneration",
        config={**_SIDES, "num_mel_bins": 16, "max_source_positions": 16, "max_target_positions": 32},
    ),
    "wav2vec2": Tiny(
        family="audio", type="wav2vec2", model="Wav2Vec2ForCTC",
        config={**_SIZES, "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 8],
                "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4},
    ),
    "clip": Tiny(
        family="vision–language", type="clip", model="CLIPModel",
        config={"projection_dim": HIDDEN, "text_config": _SIZES,
                "vision_config": {**{n: s for n, s in _SIZES.items() if not n.endswith("_id")}, **_PIXELS}},
    ),
    "llava": Tiny(
        family="vision–language", type="llava", model="LlavaForConditionalGeneration", task="CAUSAL_LM",
        config={"image_token_index": WORDS - 1, "image_seq_length": 4,
                "text_config": {**_SIZES, "model_type": "llama", "num_key_value_heads": 2},
                "vision_config": {**{n: s for n, s in _SIZES.items() if not n.endswith("_id")}, **_PIXELS,
                                  "model_type": "clip_vision_model", "projection_dim": HIDDEN}},
    ),
    "mixtral": Tiny(
        family="mixture of experts", type="mixtral", model="MixtralForCausalLM", task="CAUSAL_LM",
        config={**_SIZES, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "mamba": Tiny(
        family="state space", type="mamba", model="MambaForCausalLM", task="CAUSAL_LM",
        config={"hidden_size": HIDDEN, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4,
                "vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    ),
}  # fmt: skip

FIRST = "llama"
"""The model on which every switch of every method is tried."""

_FITTING: dict[str, Any] = {
    "r": 4,
    "init_r": 4,
    "target_r": 2,
    "total_step": 10,
    "num_virtual_tokens": 4,
    "num_subspaces": 2,
    "n_frequency": 16,
    "block_size": 8,
    "group_size": 8,
    "oft_block_size": 8,
    "num_vectors": 8,
    "vector_length": 8,
    "theta_d_length": 64,
    "sparse_rate": 0.1,
    "sparsity": 0.9,
    "adapter_len": 4,
    "adapter_layers": 2,
    "token_indices": [1, 5, 9],
    "encoder_hidden_size": HIDDEN,
    "cpt_token_ids": [3, 4, 5, 6],
    "cpt_mask": [1, 1, 1, 1],
    "cpt_tokens_type_mask": [1, 2, 3, 4],
    "prompt_tuning_init": "RANDOM",
    "progressbar": False,
    "shadow_num_hidden_layers": 1,
    "hidden_size": HIDDEN,
}
"""Fields of PEFT's configurations whose defaults do not fit a tiny model, or are missing."""

_WITHOUT_EFFECT = {"inference_mode", "init_weights", "progressbar", "init_lora_weights", "init_ia3_weights",
                   "runtime_offload_base_weight", "enable_softmax"}  # fmt: skip
"""Switches that are no part of what is saved: of the initialization, which noise replaces, and of the training."""

_WHOLE_BLOCKS = {"SHADOW"}
"""Methods whose targets are the blocks of a model, all of them by default, and no layers."""

_LORA: dict[str, dict[str, Any]] = {
    "bias=all": {"bias": "all"},
    "rank_pattern": {"rank_pattern": {"0": 8, "1": 2}, "alpha_pattern": {"0": 3}},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "modules_to_save embedding": {"modules_to_save": ["embed_tokens", "norm"]},
    "layers_to_transform": {"layers_to_transform": [1]},
    "layer_replication": {"layer_replication": [[0, 2], [1, 2]]},
    "trainable_token_indices": {"trainable_token_indices": [1, 5, 9]},
    "aLoRA": {"alora_invocation_tokens": [3, 4]},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "exclude_modules": {"exclude_modules": "model.layers.1.*"},
    "head": {"target_modules": ["lm_head"]},
}
"""Variants of LoRA that no switch asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """An adapter to make: a method of PEFT, with the fields that make it a variant, on one kind of layer of a model."""

    model: str
    layer: str
    method: str
    variant: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)
    targets: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return its name as a row of the page."""
        return f"{self.method} {self.variant}".strip()

    @property
    def folder(self) -> str:
        return ".".join((self.model, self.layer, *self.name.replace("=", "-").split())).replace("*", "any")


def combinations(models: Iterator[str] | tuple[str, ...] = tuple(MODELS)) -> Iterator[Combination]:
    """Yield every method on every kind of layer of every model, and on the first model each variant of a method."""
    for model in models:
        kinds = layers(model)
        for method, config in methods().items():
            for layer, targets in kinds.items() if takes_layers(method) else [("model", ())]:
                yield Combination(model=model, layer=layer, method=method, targets=targets)
            if model != FIRST:
                continue
            layer, targets = next(iter(kinds.items())) if takes_layers(method) else ("model", ())
            for switch in switches(config):
                value = {switch: not next(f.default for f in dataclasses.fields(config) if f.name == switch)}
                yield Combination(
                    model=model, layer=layer, method=method, variant=switch, fields=value, targets=targets
                )
            for variant, given in _LORA.items() if method == "LORA" else ():
                yield Combination(
                    model=model, layer=layer, method=method, variant=variant, fields=given, targets=targets
                )
        experts = tuple(dict.fromkeys(".".join(name.split(".")[-2:]) for name in _experts(model)))
        if experts:
            given = {"target_parameters": list(experts), "target_modules": []}
            yield Combination(model=model, layer="experts", method="LORA", variant="target_parameters", fields=given)


def methods() -> dict[str, type[Any]]:
    """Return PEFT's configuration classes by the name of the method."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING as CONFIGS

    return {kind.value: config for kind, config in sorted(CONFIGS.items(), key=lambda one: one[0].value)}


def takes_layers(method: str) -> bool:
    if method in _WHOLE_BLOCKS:
        return False
    names = {one.name for one in dataclasses.fields(methods()[method])}
    return "target_modules" in names and "adapter_layers" not in names


def switches(config: type[Any]) -> Iterator[str]:
    """Yield the switches of a configuration class that change what is saved or computed."""
    for one in dataclasses.fields(config):
        if isinstance(one.default, bool) and one.name not in _WITHOUT_EFFECT:
            yield one.name


@functools.cache
def layers(model: str) -> dict[str, tuple[str, ...]]:
    """Return up to two names of layers of each kind, those inside repeated blocks first."""
    made = _without_weights(model)
    head = made.get_output_embeddings() if hasattr(made, "get_output_embeddings") else None  # type: ignore[operator]
    found: dict[str, dict[str, bool]] = {}
    for name, module in made.named_modules():
        kind, last = type(module).__name__, name.rpartition(".")[2]
        is_layer = isinstance(module, (torch.nn.Linear, torch.nn.Embedding, torch.nn.modules.conv._ConvNd))
        if (is_layer or kind == "Conv1D") and module is not head and not last.isdigit():
            inside = any(part.isdigit() for part in name.split("."))
            known = found.setdefault(kind, {})
            known[last] = known.get(last, False) or inside
    order = ("Linear", "Conv1D", "Conv2d")
    kinds = sorted(found, key=lambda kind: order.index(kind) if kind in order else len(order))
    return {kind: tuple(sorted(found[kind], key=lambda name: not found[kind][name])[:2]) for kind in kinds}


def _experts(model: str) -> list[str]:
    """Return the parameters of three dimensions, one slice per expert, that belong to no layer of torch."""
    made = _without_weights(model)
    return [
        name for name, one in made.named_parameters()
        if one.dim() == 3 and type(made.get_submodule(name.rpartition(".")[0])).__module__.startswith("transformers")
        and "expert" in name
    ]  # fmt: skip


def _without_weights(model: str) -> torch.nn.Module:
    import transformers

    getattr(transformers, MODELS[model].model)  # parts of torch 2.8 cannot be imported with another default device
    with torch.device("meta"):
        return build(MODELS[model])


def build(tiny: Tiny) -> torch.nn.Module:
    """Return a model with random weights."""
    import transformers

    config = transformers.AutoConfig.for_model(tiny.type, **copy.deepcopy(dict(tiny.config)))
    torch.manual_seed(0)
    model: torch.nn.Module = getattr(transformers, tiny.model)(config)
    return model.eval()


def save_model(name: str, folder: Path) -> torch.nn.Module:
    """Write a model to a folder, its fresh biases and norms moved by noise."""
    model = build(MODELS[name])
    move(model, np.random.default_rng(0), every=True)
    saved: Any = model
    saved.save_pretrained(folder)
    return model


def save_adapter(one: Combination, model: torch.nn.Module, base: Path, folder: Path) -> str:
    """Write an adapter for a copy of a model; return in PEFT's words why there is none, or nothing."""
    import peft
    import safetensors

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            adapted = peft.get_peft_model(_copied(model, base), _config(one, folder.parent))
            move(adapted, np.random.default_rng(1))
            adapted.save_pretrained(folder)
        except Exception as error:  # what PEFT cannot make is part of the page
            return f"{type(error).__name__}: {str(error).strip()}".split("\n")[0].split(". ")[0]
    file = folder / "adapter_model.safetensors"
    if not file.exists():
        return "saves no adapter_model.safetensors"
    with safetensors.safe_open(file, framework="numpy") as saved:
        return "" if list(saved.keys()) else "saves a file without a tensor"


def _copied(model: torch.nn.Module, base: Path) -> Any:
    made = copy.deepcopy(model)
    made.name_or_path = str(base)  # type: ignore[assignment]
    made.config._name_or_path = str(base)  # type: ignore[union-attr]
    return made


def _config(one: Combination, adapters: Path) -> Any:
    defaults = {f.name for f in dataclasses.fields(methods()[one.method])}
    given: dict[str, Any] = {"task_type": MODELS[one.model].task}
    if one.targets:
        given["target_modules"] = list(one.targets)
    if "adapters" in defaults:  # a mixture of LoRAs that are saved already
        saved = sorted(adapters.glob(f"{one.model}.*.LORA"))[:2]
        given["adapters"] = {path.name.replace(".", "_"): str(path) for path in saved}
    given |= one.fields
    if "feedforward_modules" in defaults:
        given["feedforward_modules"] = given["target_modules"][-1:]
    return fitted(one.method, given)


def fitted(method: str, given: Mapping[str, Any]) -> Any:
    """Return a configuration of a method with these fields, and for the rest with what fits a tiny model."""
    config = methods()[method]
    defaults = {f.name: f.default for f in dataclasses.fields(config)}
    fitting = {name: value for name, value in _FITTING.items() if name in defaults and defaults[name] != 0}
    return config(**{**fitting, **given})


def move(model: torch.nn.Module, stream: np.random.Generator, *, every: bool = False) -> None:
    """Add noise to the parameters of a model, or to those alone that are trained."""
    with torch.no_grad():
        for parameter in model.parameters():
            if (every or parameter.requires_grad) and parameter.is_floating_point():
                noise = stream.standard_normal(tuple(parameter.shape), dtype=np.float32) * np.float32(NOISE)
                parameter.add_(torch.from_numpy(np.asarray(noise)).to(parameter.dtype))


def quiet() -> None:
    """Keep the libraries from the network, and from writing to the terminal."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable(logging.WARNING)
