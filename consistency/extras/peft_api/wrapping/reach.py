"""Compare the attributes and methods that PEFT and trainers use through a wrapper and without it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

import torch

from consistency.extras.peft_api.wrapping.report import WrapperFinding
from consistency.extras.peft_api.wrapping.spec import HIDDEN

_ASKED = {
    "config": "PEFT and trainers read the kind of model from it",
    "hf_device_map": "accelerate and trainers use it to recognize a model laid out over devices",
    "is_loaded_in_8bit": "PEFT chooses 8-bit adapter layers and prepares the model for training by it",
    "is_loaded_in_4bit": "PEFT chooses 4-bit adapter layers and prepares the model for training by it",
    "is_quantized": "trainers use it to decide whether the model can be trained",
    "quantization_method": "prepare_model_for_kbit_training uses it to decide what to cast to float32",
    "hf_quantizer": "trainers use it to check that the quantized model can be trained",
    "config.quantization_config": "trainers use it to decide whether the model can be trained",
}
_CALLED = {
    "gradient_checkpointing_enable": "without it every activation of a training step stays in memory",
    "enable_input_require_grads": "without it a frozen base under gradient checkpointing has no gradients",
    "get_input_embeddings": "PEFT and trainers find the embeddings by it",
}
HINT = (
    "wrap the model after get_peft_model, or let the wrapper's __getattr__ forward missing attributes to the model "
    "inside it"
)


def hidden(wrapped: torch.nn.Module, plain: torch.nn.Module) -> Iterator[WrapperFinding]:
    """Yield findings of attributes and methods that the plain model has and the wrapper lacks or changes.

    An attribute that the plain model lacks, or that is None or False, may be missing: libraries ask with a default.
    """
    models: tuple[Any, Any] = (plain, wrapped)
    for name, why in _ASKED.items():
        *path, last = name.split(".")
        owners = [reduce(lambda owner, attribute: getattr(owner, attribute, None), path, model) for model in models]
        if owners[1] is None:
            continue  # a hidden config is already one finding
        wanted, got = (getattr(owner, last, None) for owner in owners)
        if wanted is not None and wanted is not False and not _same(got, wanted):
            yield _finding(name, why, _shown(got), _shown(wanted))
    for name, why in _CALLED.items():
        if callable(getattr(plain, name, None)) and not callable(getattr(wrapped, name, None)):
            yield _finding(name, why, "nothing", "a method")
    if callable(getattr(wrapped, "get_input_embeddings", None)):
        wanted, got = _embeddings(plain), _embeddings(wrapped)
        if wanted is not None and not _same_shape(got, wanted):
            yield _finding("get_input_embeddings", _CALLED["get_input_embeddings"], _shown(got), _shown(wanted))


def _finding(name: str, why: str, got: str, wanted: str) -> WrapperFinding:
    return WrapperFinding(
        check="reach",
        kind=HIDDEN,
        what=f"the wrapper hides {name}: {why}",
        where=name,
        got=got,
        wanted=wanted,
        hint=HINT,
    )


def _same(got: Any, wanted: Any) -> bool:
    if got is wanted:
        return True
    if type(got) is not type(wanted):
        return False
    if hasattr(wanted, "to_dict"):
        return bool(got.to_dict() == wanted.to_dict())
    if hasattr(wanted, "quantization_config"):  # a quantizer: a separate object for each model
        return _same(got.quantization_config, wanted.quantization_config)
    return bool(got == wanted)


def _embeddings(model: Any) -> Any:
    try:
        return model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def _same_shape(got: Any, wanted: Any) -> bool:
    got_weight, wanted_weight = (getattr(module, "weight", None) for module in (got, wanted))
    has_same_shape = getattr(got_weight, "shape", None) == getattr(wanted_weight, "shape", None)
    return type(got) is type(wanted) and has_same_shape


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, (bool, int, str, dict)):
        return str(value)[:120]
    return type(value).__name__
