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

# what PEFT's `AutoPeftModel…` classes load; for text generation the base's own class comes first
_HEADED = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}
_GENERATING = {"CAUSAL_LM": "AutoModelForCausalLM", "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM"}

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
    task = str(adapter.get("task_type"))
    trained_on = (adapter.get("auto_mapping") or {}).get("base_model_class")
    found = _that_makes(trained_on, config) if trained_on else None
    if found is None and task in _HEADED and _classes(getattr(modeling_auto, _HEADED[task]), config):
        found = getattr(modeling_auto, _HEADED[task])
    named = getattr(config, "architectures", None)
    for architecture in named if isinstance(named, list) else ():
        found = found or _that_makes(architecture, config)
    return found or getattr(modeling_auto, _GENERATING.get(task, "AutoModel"))


def labels(config: Any, case: Case) -> int | None:
    """Return the number of labels of the adapter's own head, where the base's config has another."""
    if case.adapter is None:
        return None
    weights = read_checkpoint(
        Path(case.adapter), stem="adapter_model", pickle_stem="adapter_model", allow_pickle=case.allow_pickle
    )
    for header in weights.tensors.values():
        if HEAD.search(header.name) and len(header.shape) == 2:
            return header.shape[0] if header.shape[0] != getattr(config, "num_labels", None) else None
    return None


def adapter_table(case: Case) -> dict[str, Any]:
    """Return the adapter's config as it was saved."""
    if case.adapter is None:
        return {}
    found = json.loads((Path(case.adapter) / "adapter_config.json").read_text(encoding="utf-8"))
    return dict(found)


def _that_makes(architecture: str, config: Any) -> Any:
    """Return the Auto class that makes a model of this class from this config, the usual ones first."""
    from transformers.models.auto import modeling_auto

    every = [n for n in vars(modeling_auto) if n.startswith("AutoModel") and n not in ("AutoModelWithLMHead", *_FIRST)]
    for name in (*_FIRST, *sorted(every)):
        if architecture in _classes(getattr(modeling_auto, name), config):
            return getattr(modeling_auto, name)
    return None


def _classes(auto: Any, config: Any) -> tuple[str, ...]:
    try:
        found = auto._model_mapping[type(config)]
    except (KeyError, AttributeError, ImportError, ValueError):
        return ()
    return tuple(c.__name__ for c in (found if isinstance(found, (tuple, list)) else (found,)) if c is not None)


STANDARD_DEVIATION = 0.02
"""transformers' usual `initializer_range`."""


def is_synthetic(tensor: torch.Tensor) -> bool:
    """Report whether a parameter that no file holds gets values: vectors have constants, integers are tables."""
    return tensor.dim() >= 2 and tensor.dtype in UNIT_ROUNDOFF


def synthetic(name: str, like: torch.Tensor) -> torch.Tensor:
    """Return the values of a parameter on the CPU, in its dtype: normal, the same on every machine."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    generator = np.random.Generator(np.random.PCG64(seed))
    values = generator.standard_normal(size=tuple(like.shape), dtype=np.float32) * np.float32(STANDARD_DEVIATION)
    return torch.from_numpy(values).to(like.dtype)


def overwrite(model: torch.nn.Module, names: Iterable[str]) -> frozenset[str]:
    """Set the parameters that no file holds, and return their names.

    Of tied ones the first in the model's order, and none whose storage a file fills under another name.
    """
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    wanted = set(names)
    done = {start_of(tensor) for name, tensor in named.items() if name not in wanted}
    anew = set()
    with torch.no_grad():
        for name, tensor in named.items():
            if name in wanted and start_of(tensor) not in done:
                done.add(start_of(tensor))
                anew.add(name)
                if is_synthetic(tensor):
                    tensor.copy_(synthetic(name, tensor))
    return frozenset(anew)
