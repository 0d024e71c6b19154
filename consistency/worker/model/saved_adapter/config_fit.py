"""Hold an adapter's file against its adapter_config.json, and both against the names of a base. No torch here.

PEFT makes the layers that the config names, and fills them from the file. What only one of the two has is passed over
in silence or with a warning: a layer of the file that the config does not name is ignored, one that the file lacks
stays as it began, and a key of a pattern that matches nothing leaves its layers with the usual rank and scaling.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from consistency.capture.wording import counted, layers_text, listed, some
from consistency.worker.model.saved_adapter.contents import TensorContents
from consistency.worker.model.saved_adapter.untrained import is_known_method

DEFAULT_RANK = DEFAULT_ALPHA = 8
"""The rank, and the alpha, that PEFT takes where adapter_config.json has none (defaults of `LoraConfig`)."""

_FACTOR = re.compile(r"lora_(?:embedding_)?(?P<side>[AB])")
_MOST_NAMED = 4

Layers = Mapping[str, Mapping[str, TensorContents]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Something that file and config, or file and base, say differently.

    Attributes
    ----------
    is_error : bool
        Loading fails, or loads another adapter than was trained; else it may be meant.
    todo : str
        What to do.
    """

    text: str
    todo: str
    is_error: bool = True


def mismatches(config: Mapping[str, Any], layers: Layers, keys: Collection[str]) -> Iterator[Mismatch]:
    """Yield what the file and the config say differently.

    Parameters
    ----------
    layers : mapping
        Tensors by layer, and by name in the layer.
    keys : collection of str
        All keys of the file.
    """
    adapted = [layer for layer, parts in layers.items() if is_known_method(parts)]
    if config.get("peft_type") == "LORA":
        yield from _ranks(config, layers)
        yield from _defaults(config)
        for name in ("rank_pattern", "alpha_pattern"):
            yield from _pattern(config, name, adapted)
    yield from _not_targeted(config, adapted)
    yield from _targets_without_layers(config, adapted)
    yield from _saved_whole(config, layers)
    yield from _token_rows(config, keys)


def scalings(config: Mapping[str, Any], layers: Layers) -> dict[float, list[str]]:
    """Return the layers by the scaling that PEFT gives them; nothing for other methods than LoRA."""
    if config.get("peft_type") != "LORA":
        return {}
    by_scaling: dict[float, list[str]] = {}
    for layer, parts in layers.items():
        if any(_FACTOR.fullmatch(part) for part in parts):
            alpha = float(_setting(config, "lora_alpha", "alpha_pattern", DEFAULT_ALPHA, layer))
            rank = int(_setting(config, "r", "rank_pattern", DEFAULT_RANK, layer))
            divisor = math.sqrt(rank) if config.get("use_rslora") else rank
            by_scaling.setdefault(alpha / max(divisor, 1), []).append(layer)
    return by_scaling


def targeted(config: Mapping[str, Any], module: str) -> bool | None:
    """Report whether `target_modules` names a module, as PEFT reads it; None where the config leaves that open."""
    named = config.get("target_modules")
    if named == "all-linear" or not named or config.get("target_parameters"):
        return None
    if isinstance(named, str):
        try:
            return re.fullmatch(named, module) is not None
        except re.error:
            return None
    if config.get("layers_to_transform") is not None or config.get("exclude_modules"):
        return None
    return any(module == name or module.endswith(f".{name}") for name in named)


def without_factors(config: Mapping[str, Any], adapted: Collection[str], base_modules: Sequence[str]) -> list[str]:
    """Return the modules of a base that the config names, and for which the file has nothing.

    Names in a file and in a base differ by leading components, so that a module is taken for a layer where one name
    ends in the other.
    """
    endings = {ending for layer in adapted for ending in _endings(layer)}
    return [
        module
        for module in base_modules
        if targeted(config, module) and module not in endings and not any(end in adapted for end in _endings(module))
    ]


def _endings(name: str) -> Iterator[str]:
    """Yield a name with ever fewer leading components, of two components at least."""
    parts = name.split(".")
    for start in range(max(1, len(parts) - 1)):
        yield ".".join(parts[start:])


def _is_method(part: str) -> bool:
    return part not in ("weight", "bias", "tensor")


def _setting(config: Mapping[str, Any], name: str, patterns: str, default: int, layer: str) -> Any:
    """Return `r` or `lora_alpha` of one layer: the value of the first key of its pattern that matches, or the usual."""
    for key, value in (config.get(patterns) or {}).items():
        if _matches(key, layer):
            return value
    value = config.get(name)
    return default if value is None else value


def _matches(key: str, layer: str) -> bool:
    """Report whether a key of a pattern is for a layer, as PEFT's `get_pattern_key` (`utils/other.py`) has it."""
    try:
        return re.match(rf"(.*\.)?({key})$", layer) is not None
    except re.error:
        return False


def _ranks(config: Mapping[str, Any], layers: Layers) -> Iterator[Mismatch]:
    """Yield layers whose factors have another rank than the config gives them, or each another one."""
    wrong: dict[tuple[int, int], list[str]] = {}
    unequal: list[str] = []
    for layer, parts in layers.items():
        ranks = {
            match["side"]: parts[part].shape[0 if match["side"] == "A" else 1]
            for part in parts
            if (match := _FACTOR.fullmatch(part)) is not None and len(parts[part].shape) == 2
        }
        if len(set(ranks.values())) > 1:
            unequal.append(layer)
            continue
        wanted = int(_setting(config, "r", "rank_pattern", DEFAULT_RANK, layer))
        # the factors of stacked experts have the ranks of all of them side by side
        if ranks and min(ranks.values()) % wanted:
            wrong.setdefault((min(ranks.values()), wanted), []).append(layer)
    for (rank, wanted), names in wrong.items():
        yield Mismatch(
            text=f"factors of rank {rank}, where adapter_config.json gives {wanted}: {layers_text(names)}",
            todo=f"set r, or rank_pattern for these layers, to the rank that was trained ({rank}), and lora_alpha with "
            "it: the scaling is lora_alpha / r",
        )
    if unequal:
        yield Mismatch(
            text=f"lora_A and lora_B of different ranks: {layers_text(unequal)}",
            todo="save the adapter again: its two factors cannot be multiplied",
        )


def _defaults(config: Mapping[str, Any]) -> Iterator[Mismatch]:
    defaults = {"r": DEFAULT_RANK, "lora_alpha": DEFAULT_ALPHA}
    absent = [name for name in defaults if config.get(name) is None]
    if absent:
        values = listed([f"{name} = {defaults[name]}" for name in absent])
        yield Mismatch(
            text=f"adapter_config.json has no {listed(absent)}: PEFT takes {values}",
            todo="add what the adapter was trained with: the scaling is lora_alpha / r",
            is_error=False,
        )


def _pattern(config: Mapping[str, Any], name: str, adapted: Sequence[str]) -> Iterator[Mismatch]:
    keys = config.get(name) or {}
    unused = [key for key in keys if not any(_matches(key, layer) for layer in adapted)]
    if unused and adapted:
        yield Mismatch(
            text=f"{name} has {counted(len(unused), 'key')} that PEFT matches with no layer of the file, so that their "
            f"layers have the usual value: {some([f'{key}: {keys[key]}' for key in unused], _MOST_NAMED)}",
            todo="a key is the end of a layer's name, such as self_attn.q_proj, or a regular expression for it: a part "
            "in its middle matches nothing",
        )


def _not_targeted(config: Mapping[str, Any], adapted: Sequence[str]) -> Iterator[Mismatch]:
    ignored = [layer for layer in adapted if targeted(config, layer) is False]
    if ignored:
        names = some(sorted({layer.rpartition(".")[2] for layer in ignored}), _MOST_NAMED)
        yield Mismatch(
            text=f"{counted(len(ignored), 'layer')} of the file that target_modules does not name, which PEFT leaves "
            f"out on loading: {layers_text(ignored)}",
            todo=f"add {names} to target_modules in adapter_config.json",
        )


def _targets_without_layers(config: Mapping[str, Any], adapted: Sequence[str]) -> Iterator[Mismatch]:
    named = config.get("target_modules")
    if not isinstance(named, list) or config.get("peft_type") == "TRAINABLE_TOKENS":
        return
    unused = [name for name in named if not any(layer == name or layer.endswith(f".{name}") for layer in adapted)]
    if unused and adapted:
        yield Mismatch(
            text=f"target_modules names {some(unused, _MOST_NAMED)}, and the file has no layer of "
            f"{'this name' if len(unused) == 1 else 'these names'}",
            todo="where the base has such layers, they are without an adapter: give --base to see which",
            is_error=False,
        )


def _saved_whole(config: Mapping[str, Any], layers: Layers) -> Iterator[Mismatch]:
    """Yield modules that the config has as trained whole, where the file has none of them.

    PEFT adds the usual names of heads for a classifier (`classifier` and `score`), of which a model has one.
    """
    modules = config.get("modules_to_save")
    if not isinstance(modules, list) or not modules:
        return
    whole = [layer for layer, parts in layers.items() if any(not _is_method(part) for part in parts)]
    if not any(f".{name}." in f".{layer}." for name in modules for layer in whole):
        yield Mismatch(
            text=f"modules_to_save names {some(modules, _MOST_NAMED)}, and the file has no tensor of them",
            todo="save it again by PEFT's save_pretrained(): what was trained whole is not in this file",
        )


def _token_rows(config: Mapping[str, Any], keys: Collection[str]) -> Iterator[Mismatch]:
    """Yield trained rows of an embedding that only the file or only the config has."""
    is_in_config = bool(config.get("trainable_token_indices") or config.get("token_indices"))
    is_in_file = any("trainable_tokens_delta" in key for key in keys)
    if is_in_config and not is_in_file:
        yield Mismatch(
            text="trainable_token_indices names tokens, and the file has no rows of them",
            todo="save it again by PEFT's save_pretrained(): the trained rows are not in this file",
        )
    elif is_in_file and not is_in_config:
        yield Mismatch(
            text="the file has trained rows of tokens, and adapter_config.json does not say of which",
            todo="add trainable_token_indices as they were in training",
        )
