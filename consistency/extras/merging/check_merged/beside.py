"""What lies beside the weights of a merged folder: settings, tokenizer and end of text against the base's.

A merge changes weights alone. So a setting that a forward pass depends on is wrong where it is another one than the
base's, whatever the weights are. Settings of a head of its own, of training, of generation and of versions are the
writer's to choose. Where two files config.json differ they are compared as transformers reads them, since its versions
write the same setting under different names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from consistency.case.case import Case
from consistency.comparison import kinds
from consistency.comparison.result import Finding, Severity
from consistency.extras.merging.check_merged.folder import Folder
from consistency.extras.merging.settings import (
    GENERATION,
    SettingDifference,
    differences,
    end_tokens,
    listed_differences,
    text_differences,
)
from consistency.worker.model.loading import UNUSABLE

_COMPUTES = re.compile(
    r"rope|theta|rotary|partial_rotary|num_(attention|key_value|kv)_heads|n_head|head_dim|num_(hidden_)?layers|n_layer"
    r"|hidden_size|intermediate_size|hidden_act|activation|_eps|epsilon|sliding_window|layer_types|attention_bias"
    r"|mlp_bias|softcap|multiplier|logit_scale|query_pre_attn_scalar|experts|top_k_prob|routed_scaling|^model_type$"
)
"""Settings by which a forward pass computes other numbers from the same weights."""

_OF_THE_WRITER = re.compile(
    r"^_|^(bos|pad|sep|cls|mask|decoder_start|forced_\w+)_token_id$|^eos_token_id$|^(architectures|num_labels|id2label"
    r"|label2id|problem_type|quantization(_config)?|tie_word_embeddings|vocab_size|max_position_embeddings"
    r"|initializer_\w+|output_\w+|return_dict|use_bfloat16|torchscript|pruned_heads|pretraining_tp|auto_map"
    r"|attn_implementation|is_decoder|chunk_size_feed_forward|task_specific_params|tokenizer_class|model_name"
    r"|unsloth_\w+)$|dropout|_coef$|gradient_checkpointing"
)
"""Settings of a head, of training, of generation and of versions; tying, shapes and ends are judged by themselves."""

_COPY = "copy {} of the base beside the weights, unless the adapter was trained with the other one"


def settings_findings(case: Case, before: Folder, after: Folder, dtype: str) -> Iterator[Finding]:
    """Yield how the settings beside a folder's weights differ from those of its base.

    Parameters
    ----------
    dtype : str
        Most frequent dtype of the folder's matrices.
    """
    if not (before.path.is_dir() and after.path.is_dir()) or after.reader == "llama.cpp":
        return  # a file has nothing beside it, and GGUF has its settings inside
    if after.config:
        yield from _config_findings(case, before, after)
        yield from _dtype_findings(after, dtype)
    yield from _text_findings(before, after)


def _config_findings(case: Case, before: Folder, after: Folder) -> Iterator[Finding]:
    """Yield a finding per severity of settings of config.json that differ."""
    if all(_severity(one) is None for one in differences(after.config, before.config)):
        return
    got, wanted = _as_transformers_reads(case, after), _as_transformers_reads(case, before)
    is_complete = got is not None and wanted is not None
    if got is None or wanted is None:
        got, wanted = after.config, before.config
    by_severity: dict[Severity, list[SettingDifference]] = {"error": [], "warning": [], "note": []}
    for difference in differences(got, wanted):
        severity = _severity(difference)
        # a setting that one file lacks may have its default there, which transformers alone knows
        is_open = not is_complete and None in (difference.actual, difference.expected)
        if severity is not None:
            by_severity["note" if is_open or case.adapter is None else severity].append(difference)
    for severity, alike in by_severity.items():
        if alike:
            message = f"config.json differs from the base's: {listed_differences(alike)}"
            todo = None if severity == "note" else _COPY.format("config.json")
            yield Finding(kind=kinds.SETTINGS, severity=severity, message=message, next=todo)


def _severity(difference: SettingDifference) -> Severity | None:
    """Return how severe it is that a setting differs; None where nobody needs to know."""
    if difference.is_harmless:
        return None
    # of a table it may be the table's name that tells: `rope_parameters.factor`, `id2label.2`
    table = difference.key.partition(".")[0]
    if _OF_THE_WRITER.search(difference.name) or _OF_THE_WRITER.search(table):
        return None if difference.name in ("quantization_config", "quantization") else "note"
    return "error" if _COMPUTES.search(difference.key) else "warning"


def _as_transformers_reads(case: Case, folder: Folder) -> Mapping[str, Any] | None:
    """Return all settings of a folder's config.json as transformers reads them; None where it cannot."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder.path, trust_remote_code=case.trust_remote_code)
        table: dict[str, Any] = config.to_dict()
    except (StrictDataclassError, *UNUSABLE):
        return None
    return table


def _dtype_findings(after: Folder, dtype: str) -> Iterator[Finding]:
    """Note a config that has transformers round the weights to another dtype than theirs on loading."""
    stated = _stated_dtype(after.config)
    narrower = {"float32": ("bfloat16", "float16"), "bfloat16": ("float16",), "float16": ("bfloat16",)}
    if stated in narrower.get(dtype, ()) and not after.reader and not after.unread:
        yield Finding(
            kind=kinds.SETTINGS,
            severity="note",
            message=f"config.json says {stated}, and the weights are {dtype}: transformers rounds them on loading, "
            f"unless it is given dtype={dtype}",
        )


def _stated_dtype(config: Mapping[str, Any]) -> str:
    stated = config.get("dtype", config.get("torch_dtype"))
    return stated.removeprefix("torch.") if isinstance(stated, str) else ""


def _text_findings(before: Folder, after: Folder) -> Iterator[Finding]:
    """Yield how the folder reads, writes and ends text otherwise than its base."""
    generates = after.config.get("architectures") == before.config.get("architectures")  # a classifier does not
    got, wanted = end_tokens(after.path), end_tokens(before.path)
    lost = [token for token in wanted if token not in got]
    if lost and generates:
        yield Finding(
            kind=kinds.SETTINGS,
            severity="warning",
            message=f"generation ends at token {_ids(got)}, that of the base at {_ids(wanted)}: texts may not end",
            next=_COPY.format("generation_config.json"),
        )
    for difference in text_differences(after.path, before.path):
        if difference.file == GENERATION and not generates:
            continue
        message = difference.sentence("the folder", "the base")
        yield Finding(kind=kinds.SETTINGS, severity="note", message=message)


def _ids(tokens: tuple[Any, ...]) -> str:
    return " or ".join(map(str, tokens)) or "none"
