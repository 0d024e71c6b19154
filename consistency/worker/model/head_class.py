"""Choose the class that a base is loaded as, and the number of labels of its head, by base and adapter.

An adapter for classification is often trained on a base that was saved for another task: then the class follows the
adapter, as in PEFT's `AutoPeftModel…`, and the head's size follows the head in the adapter's file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from consistency.case.case import Case
from consistency.case.checkpoint import read_checkpoint
from consistency.numerics.dtype import UNIT_ROUNDOFF
from consistency.numerics.identity import start_of

HEAD = re.compile(r"(?:^|\.)(?:classifier|score)(?:\.out_proj)?\.(?:weight|bias)$")
"""Names of heads that PEFT saves whole with an adapter for classification (`peft.peft_model`, `modules_to_save`)."""

# classes that PEFT's `AutoPeftModel…` load, by the adapter's task; for text generation the base's own class comes first
_HEADED = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}
_GENERATING = {"CAUSAL_LM": "AutoModelForCausalLM", "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM"}

# the usual classes: an architecture that several can make is loaded by the first of these
_FIRST = [
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
    "AutoModelForImageClassification",
    "AutoModelForImageTextToText",
    "AutoModelForSpeechSeq2Seq",
]


def auto_class(config: Any, case: Case) -> Any:
    """Choose the Auto class to load a base with.

    In this order: the class that the adapter names, the head that its task needs, the config's `architectures`, the
    bare model.
    """
    from transformers.models.auto import modeling_auto

    remote = getattr(config, "auto_map", None) or {}
    if case.trust_remote_code:
        for name in remote:
            if name.startswith("AutoModel"):
                return getattr(modeling_auto, name)
    adapter = adapter_table(case)
    trained_on = (adapter.get("auto_mapping") or {}).get("base_model_class")
    if trained_on:
        auto = _auto_class_of(trained_on, config)
        if auto is not None:
            return auto
    task = str(adapter.get("task_type"))
    if task in _HEADED and _classes(getattr(modeling_auto, _HEADED[task]), config):
        return getattr(modeling_auto, _HEADED[task])
    architectures = getattr(config, "architectures", None)
    if isinstance(architectures, list):
        for architecture in architectures:
            auto = _auto_class_of(architecture, config)
            if auto is not None:
                return auto
    return getattr(modeling_auto, _GENERATING.get(task, "AutoModel"))


def labels(config: Any, case: Case) -> int | None:
    """Return the number of labels of the adapter's own head; None where that is the base's, or there is no head."""
    if case.adapter is None:
        return None
    weights = read_checkpoint(
        Path(case.adapter), stem="adapter_model", pickle_stem="adapter_model", allow_pickle=case.allow_pickle
    )
    for header in weights.tensors.values():
        # of a LoRA on the head, lora_B has a row for each label
        name = header.name.replace(".lora_B.weight", ".weight")
        if HEAD.search(name) and len(header.shape) == 2:
            count = header.shape[0]
            return count if count != getattr(config, "num_labels", None) else None
    return None


def adapter_table(case: Case) -> dict[str, Any]:
    """Return the adapter's config as it was saved."""
    if case.adapter is None:
        return {}
    return dict(json.loads((Path(case.adapter) / "adapter_config.json").read_text(encoding="utf-8")))


def _auto_class_of(architecture: str, config: Any) -> Any:
    """Return the Auto class that makes a model of this class from this config, None if none does."""
    from transformers.models.auto import modeling_auto

    names = [name for name in vars(modeling_auto) if name.startswith("AutoModel")]
    unusual = sorted(name for name in names if name not in ("AutoModelWithLMHead", *_FIRST))
    for name in (*_FIRST, *unusual):
        if architecture in _classes(getattr(modeling_auto, name), config):
            return getattr(modeling_auto, name)
    return None


def _classes(auto: Any, config: Any) -> tuple[str, ...]:
    """Return the names of the classes that an Auto class makes of a config; empty where it makes none."""
    try:
        mapped = auto._model_mapping[type(config)]
    except (KeyError, AttributeError, ImportError, ValueError):
        return ()
    classes = mapped if isinstance(mapped, (tuple, list)) else (mapped,)
    return tuple(model_class.__name__ for model_class in classes if model_class is not None)


STANDARD_DEVIATION = 0.02
"""transformers' usual `initializer_range`."""


def is_synthetic(tensor: torch.Tensor) -> bool:
    """Report whether a parameter that no file holds gets synthetic values.

    Vectors do not, as models initialise them with constants, and integers do not, which are tables.
    """
    return tensor.dim() >= 2 and tensor.dtype in UNIT_ROUNDOFF


def synthetic(name: str, like: torch.Tensor) -> torch.Tensor:
    """Return the values of a parameter on the CPU, in its dtype: normal, the same on every machine."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    generator = np.random.Generator(np.random.PCG64(seed))
    values = generator.standard_normal(size=tuple(like.shape), dtype=np.float32) * np.float32(STANDARD_DEVIATION)
    return torch.from_numpy(values).to(like.dtype)


def overwrite(model: torch.nn.Module, names: Iterable[str]) -> frozenset[str]:
    """Set the parameters that no file holds, and return their names.

    Of tied parameters only the first in the model's order is among them, and none whose storage a file fills under
    another name.
    """
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    missing = set(names)
    filled = {start_of(tensor) for name, tensor in tensors.items() if name not in missing}
    overwritten = set()
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name in missing and start_of(tensor) not in filled:
                filled.add(start_of(tensor))
                overwritten.add(name)
                if is_synthetic(tensor):
                    tensor.copy_(synthetic(name, tensor))
    return frozenset(overwritten)
