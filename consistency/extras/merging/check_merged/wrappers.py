"""Components that wrappers of a model put into the names of its tensors, by which nothing loads them. No torch here."""

from __future__ import annotations

import re

WRAPPERS = {
    "_orig_mod": "torch.compile() wraps a model so: save the model that it was given (model._orig_mod)",
    "_fsdp_wrapped_module": "FSDP wraps a model so: save its full state dict, by accelerator.get_state_dict(model)",
    "_checkpoint_wrapped_module": "checkpoint_wrapper() wraps a module so: save the model that it was given",
    "module": "DistributedDataParallel and DeepSpeed wrap a model so: save accelerator.unwrap_model(model)",
    "base_layer": "PEFT's layers hold a weight so: save what merge_and_unload() returns",
    "base_model.model": "PEFT wraps a model so: save what merge_and_unload() returns",
}
"""Components that a wrapper puts into the names of a model's tensors, and how to save the model without it."""

_WRAPPER = re.compile(rf"(?:^|(?<=\.))(?:{'|'.join(map(re.escape, WRAPPERS))})\.")


def wrapper_in(name: str) -> str:
    """Return the first component that a wrapper put into a name; empty where there is none."""
    match = _WRAPPER.search(name)
    return "" if match is None else match[0].removesuffix(".")


def without_wrappers(name: str) -> str:
    """Return a tensor's name without the components of wrappers."""
    return _WRAPPER.sub("", name)
