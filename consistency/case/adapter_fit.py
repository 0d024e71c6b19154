"""Check from headers alone that the files of a base and an adapter are sound and belong together.

Only what PEFT cannot load is refused: its own error comes after minutes of loading, and names no rank. Whether a file
is of this base where PEFT loads it, a run shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from consistency.case import recognition
from consistency.case.checkpoint import Checkpoint, TensorHeader, read_checkpoint, read_json
from consistency.case.quantized import weights_of
from consistency.errors import InputError

# by PEFT's task_type: how the names of the classes end that its `AutoPeftModel…` load for it
_HEADED = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
    "FEATURE_EXTRACTION": "Model",
}
PLAIN = frozenset({
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "r", "target_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "bias", "use_rslora",
    "modules_to_save", "init_lora_weights", "layers_pattern", "rank_pattern", "alpha_pattern", "megatron_core",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "use_dora", "alora_invocation_tokens",
    "qalora_group_size", "runtime_config", "lora_bias", "trainable_token_indices", "ensure_weight_tying",
})  # fmt: skip
"""Fields of PEFT's `LoraConfig` that leave `lora_A` a (rank, in) and `lora_B` an (out, rank) matrix in each layer that
`target_modules` names. Others make blocks (`use_bdlora`), groups, or leave layers out, and so may those of later
versions: of an adapter that sets one PEFT decides alone."""

_DEFAULT_RANK = 8  # of `LoraConfig`
_LORA_KEY = re.compile(r"^(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.weight)?$")


def check_files(base: Path | None, adapter: Path | None, *, allow_pickle: bool) -> None:
    """Check a base folder, an adapter folder, and that the adapter fits the base."""
    if base is not None and adapter is not None:
        recognition.swapped(base, adapter)
    weights, of_base = None, {}
    if base is not None:
        recognition.base_folder(base)
        of_base = read_json(base / "config.json", needed=("model_type",))
        weights = read_checkpoint(base, stem="model", pickle_stem="pytorch_model", allow_pickle=allow_pickle)
    if adapter is None:
        return
    config, tensors = read_adapter(adapter, allow_pickle=allow_pickle)
    if weights is not None and tensors and _loads_as_saved(of_base, config):
        _check_saved_whole(weights, adapter, config, tensors)
    if weights is not None and weights.tensors and _is_plain_lora(config):
        _check_adapter_fits(weights, adapter, config, tensors)


def read_adapter(folder: Path, *, allow_pickle: bool) -> tuple[dict[str, Any], Mapping[str, TensorHeader]]:
    """Return an adapter's config and the headers of its tensors (none where it is an allowed pickle)."""
    recognition.adapter_folder(folder)
    config = read_json(folder / "adapter_config.json", needed=("peft_type",))
    recognition.check_method(config["peft_type"], folder / "adapter_config.json", config)
    weights = read_checkpoint(folder, stem="adapter_model", pickle_stem="adapter_model", allow_pickle=allow_pickle)
    if empty := [name for name, header in weights.tensors.items() if tuple(header.shape) == (0,)]:
        raise InputError(
            "the adapter's file is broken: it has tensors without elements",
            where=folder,
            got=f"{len(empty)} of shape (0,), such as {empty[0]}",
            hint="save it again from gathered weights: a rank of DeepSpeed ZeRO-3 or FSDP has its part alone",
        )
    return config, weights.tensors


def _is_plain_lora(config: Mapping[str, Any]) -> bool:
    """Return whether PEFT adapts each layer that the config names by two matrices, and by nothing else."""
    named = config.get("target_modules")
    listed = isinstance(named, list) and all(isinstance(one, str) for one in named)
    return config["peft_type"] == "LORA" and listed and all(name in PLAIN for name, given in config.items() if given)


def _loads_as_saved(base: Mapping[str, Any], adapter: Mapping[str, Any]) -> bool:
    """Return whether the base is certainly loaded as the class that wrote its file, so that its modules are those."""
    classes = base.get("architectures")
    own = classes[0] if isinstance(classes, list) and len(classes) == 1 else None
    mapping = adapter.get("auto_mapping")
    trained_on = mapping.get("base_model_class") if isinstance(mapping, dict) else None
    head = _HEADED.get(str(adapter.get("task_type")), "")
    return isinstance(own, str) and trained_on in (None, own) and own.endswith(head)


def _check_saved_whole(
    base: Checkpoint, folder: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]
) -> None:
    """Check that the file has what PEFT saves of a module as a whole: it loads every tensor of one, or fails.

    Left to the worker are modules that the base's file does not have, such as a new head; those of which the adapter
    has other tensors; tied ones, which PEFT may save once; and numbered tensors, which transformers may fuse.
    """
    modules = config.get("modules_to_save")
    if not isinstance(modules, list) or config.get("ensure_weight_tying"):
        return
    saved = {name.replace(".modules_to_save.", ".").replace(".default.", ".") for name in tensors}
    for module in (one for one in modules if isinstance(one, str) and one):
        inside = re.compile(rf"(?:^|\.){re.escape(module)}\.(?P<rest>[A-Za-z_.]*(?:weight|bias))$")
        owned = [found["rest"] for name in base.tensors if (found := inside.search(name)) is not None]
        given = {found[1] for name in saved if (found := re.search(rf"(?:^|\.){re.escape(module)}\.(.+)$", name))}
        if not given <= set(owned):
            continue
        lost = next((rest for rest in owned if rest not in given), None)
        if lost is not None:
            ending = f"{module}.{lost}"
            raise InputError(
                f"the adapter's file lacks a tensor that its config asks for: {ending}",
                where=folder,
                got=f"{len(tensors)} tensors, none of which ends in {ending}",
                wanted=f"the whole of {module}, which is in modules_to_save of adapter_config.json",
                hint="save it again by PEFT's save_pretrained(), or take the module out of modules_to_save",
            )


def _check_adapter_fits(
    base: Checkpoint, folder: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]
) -> None:
    """Compare each adapted layer's rank with the config, and its (in, out) features with the base weight of the layer.

    Names in a file and in the model differ by leading components (`model.`, `transformer.`), so layers are matched by
    the end of their path; a layer with several matches, or whose weight is not a plain matrix, is left to the worker.
    """
    by_ending: dict[str, list[TensorHeader]] = {}
    for header in weights_of(base.tensors).values():
        for ending in endings(header.name):
            by_ending.setdefault(ending, []).append(header)
    sides: dict[str, dict[str, TensorHeader]] = {}
    for header in tensors.values():
        match = _LORA_KEY.match(header.name)
        if match is not None and len(header.shape) == 2:
            sides.setdefault(match["module"], {})[match["side"]] = header
    known = False
    for module, pair in sides.items():
        owner = _match(f"{module}.weight", by_ending)
        known = known or owner is not None
        if owner is None or len(owner.shape) != 2 or not _is_named(module, config["target_modules"]):
            continue
        for side, header in pair.items():
            _check_rank(folder, config, header, module, side)
        if set(pair) != {"A", "B"}:
            continue
        features = (pair["B"].shape[0], pair["A"].shape[1])
        if features not in (owner.shape, owner.shape[::-1]):
            raise InputError(
                f"the adapter is for another base: at {module} it adapts {features}, the base has {owner.shape}",
                where=pair["A"].file,
                got=f"lora_A {pair['A'].shape}, lora_B {pair['B'].shape}",
                wanted=f"in and out features of {owner.name} in {owner.file.name}",
            )
    if not sides or known or any(_is_named(name.rpartition(".")[0], config["target_modules"]) for name in base.tensors):
        return
    if not any(here(base, sides) for here in (_shares_modules, _may_be_tied, _may_be_renamed)):
        first = next(iter(sides))
        raise InputError(
            f"the adapter is for another base: none of its {len(sides)} layers is in the base",
            where=folder,
            got=first,
            wanted=f"layers such as {next(iter(base.tensors), 'none')} of {base.folder}",
        )


def _is_named(module: str, names: Iterable[str]) -> bool:
    """Return whether `target_modules` names a layer, as PEFT reads a list there."""
    return any(module == name or module.endswith(f".{name}") for name in names)


def _check_rank(folder: Path, config: Mapping[str, Any], header: TensorHeader, module: str, side: str) -> None:
    pattern, usual = config.get("rank_pattern") or {}, config.get("r") or _DEFAULT_RANK
    if not isinstance(pattern, dict):
        raise InputError(
            "rank_pattern must map layers to ranks", where=folder / "adapter_config.json", got=type(pattern).__name__
        )
    ranks = [usual, *pattern.values()]
    if not all(isinstance(rank, int) for rank in ranks):
        raise InputError("a rank is a whole number", where=folder / "adapter_config.json", got=ranks)
    rank = header.shape[0 if side == "A" else 1]
    if rank not in ranks:
        wanted = (usual, header.shape[1]) if side == "A" else (header.shape[0], usual)
        raise InputError(
            f"adapter file has shape {header.shape}, its config wants {wanted} at {module}.lora_{side}: was it trained "
            f"with r={rank}?",
            where=header.file,
            got=f"rank {rank}",
            wanted="r=" + " or ".join(map(str, sorted(set(ranks)))) + f" in {folder / 'adapter_config.json'}",
        )


def endings(name: str) -> Iterator[str]:
    """Yield the name with ever fewer leading components, of two components at least."""
    parts = name.split(".")
    for i in range(max(1, len(parts) - 1)):
        yield ".".join(parts[i:])


def _match(name: str, by_ending: Mapping[str, list[TensorHeader]]) -> TensorHeader | None:
    for ending in endings(name):
        found = by_ending.get(ending, [])
        if found:
            return found[0] if len(found) == 1 else None
    return None


def _may_be_tied(base: Checkpoint, sides: Mapping[str, Mapping[str, TensorHeader]]) -> bool:
    """Return whether all that is adapted may be a head with the weight of an embedding, which a file holds once.

    Such a head is a module of the model itself, in and out features those of a matrix in the file.
    """
    tables = {header.shape for header in base.tensors.values()}
    return all(
        "." not in module and set(pair) == {"A", "B"} and (pair["B"].shape[0], pair["A"].shape[1]) in tables
        for module, pair in sides.items()
    )


def _may_be_renamed(base: Checkpoint, sides: Mapping[str, Mapping[str, TensorHeader]]) -> bool:
    """Return whether the base has a layer of the own name and the features of one that is adapted.

    transformers renames some parents on loading: the router of Mixtral is `block_sparse_moe.gate` in its files and
    `mlp.gate` in the model.
    """
    shapes = {(name.rpartition(".weight")[0].rpartition(".")[2], one.shape) for name, one in base.tensors.items()}
    return any(
        (module.rpartition(".")[2], features) in shapes
        for module, pair in sides.items()
        if set(pair) == {"A", "B"}
        for features in [(pair["B"].shape[0], pair["A"].shape[1])]
    )


def _shares_modules(base: Checkpoint, modules: Mapping[str, object]) -> bool:
    """Return whether the parent of any adapted layer is in the base: transformers fuses some weights on loading."""
    paths = {
        ending
        for name in base.tensors
        for i in range(1, name.count(".") + 1)
        for ending in endings(".".join(name.split(".")[:i]))
    }
    return any(ending in paths for module in modules for ending in endings(module.rpartition(".")[0]) if ending)
