"""Load a model in parts by transformers' tensor parallel plan, and an adapter by PEFT onto it."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch

from consistency.case.case import Case
from consistency.worker.model.loading import ADAPTER_NAME, class_and_labels


def load_tensor_parallel(case: Case, world: int) -> torch.nn.Module:
    """Load the base of a case over the ranks of the default process group, then its adapter.

    Raises
    ------
    ValueError
        There is no folder, this transformers has no such plan, or weights that no file holds would differ by rank.
    """
    from peft import PeftModel

    if case.factory is not None:
        raise ValueError("a function makes the base, and no plan splits it")
    try:
        from transformers.distributed import DistributedConfig
    except ImportError as error:
        raise ValueError("this version of transformers has no DistributedConfig") from error
    try:
        distributed = DistributedConfig(tp_size=world, **_expert_options(case, world))
    except TypeError as error:
        version = importlib.metadata.version("transformers")
        raise ValueError(
            f"DistributedConfig of transformers {version} takes no tp_size, as a later one does"
        ) from error
    auto, labels = class_and_labels(case)
    arguments: dict[str, Any] = {} if labels is None else {"num_labels": labels, "ignore_mismatched_sizes": True}
    model, info = auto.from_pretrained(
        case.base,
        dtype=case.dtype if case.dtype == "auto" else getattr(torch, case.dtype),
        trust_remote_code=case.trust_remote_code,
        use_safetensors=None if case.allow_pickle else True,
        distributed_config=distributed,
        output_loading_info=True,
        **arguments,
    )
    if missing := info.get("missing_keys"):
        raise ValueError(f"no file holds {sorted(missing)[0]}")
    adapted: Any = PeftModel.from_pretrained(model, case.adapter, adapter_name=ADAPTER_NAME)
    assert isinstance(adapted, torch.nn.Module)
    return adapted.eval()


def _expert_options(case: Case, world: int) -> dict[str, int]:
    """Return the option that distributes experts over all ranks, where the model has a plan for that; else none."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(case.base, trust_remote_code=case.trust_remote_code)
    return {"ep_size": world} if getattr(config.get_text_config(), "base_model_ep_plan", None) else {}


def ranks_of_a_plan(model: torch.nn.Module, ranks: int) -> int:
    """Return the largest number of ranks that divides the model's attention heads: 1 where none does."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    settings = [getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")]
    head_counts = [count for count in settings if isinstance(count, int)]
    for size in range(ranks, 1, -1):
        if all(count % size == 0 for count in head_counts):
            return size
    return 1
