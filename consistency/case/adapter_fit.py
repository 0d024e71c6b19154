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
from consistency.case.checkpoint import Checkpoint, TensorHeader, read_checkpoint, read_json, read_model_weights
from consistency.case.quantized import weights_of
from consistency.errors import InputError

# For each `task_type` of PEFT: the ending of the class names that its `AutoPeftModel…` load for this task.
_CLASS_ENDINGS = {
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
`target_modules` names.

Other fields make blocks (`use_bdlora`), make groups, or leave layers out, and so may fields of later versions of PEFT:
an adapter that sets any of them is not checked here, and PEFT alone decides whether it loads."""

_DEFAULT_RANK = 8  # what `LoraConfig` uses where the config has no `r`
_LORA_KEY = re.compile(r"^(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.weight)?$")


def check_files(base: Path | None, adapter: Path | None, *, allow_pickle: bool, weights_alone: bool = False) -> None:
    """Check a base folder, an adapter folder, and that the adapter fits the base.

    Parameters
    ----------
    weights_alone : bool, optional
        Whether nothing but weights is read of the base, so that a model of diffusers is one too.

    Raises
    ------
    InputError
        A folder is of another kind, a file is damaged, or PEFT could not load the adapter into the base.
    """
    # Swapped folders come first: each check below would report only a missing config.
    if base is not None and adapter is not None:
        recognition.refuse_swapped_folders(base, adapter)
    weights: Checkpoint | None = None
    base_config: dict[str, Any] = {}
    if base is not None:
        recognition.refuse_base_without_config(base, weights_alone=weights_alone)
        if not recognition.is_of_diffusers(base):
            base_config = read_json(base / "config.json", needed=("model_type",))
        weights = read_model_weights(base, allow_pickle=allow_pickle)
    if adapter is None:
        return
    config, tensors = read_adapter(adapter, allow_pickle=allow_pickle)
    if weights is not None and tensors and _loads_as_saved(base_config, config):
        _check_saved_whole(weights, adapter, config, tensors)
    # A pickled base shows no tensors, so there is nothing to compare the adapter's layers with.
    if weights is not None and weights.tensors and _is_plain_lora(config):
        _check_adapter_fits(weights, adapter, config, tensors)


def read_adapter(folder: Path, *, allow_pickle: bool) -> tuple[dict[str, Any], Mapping[str, TensorHeader]]:
    """Return an adapter's config and the headers of its tensors by name; no headers where it is an allowed pickle.

    Raises
    ------
    InputError
        The folder is no adapter, PEFT does not know its method, or its file is damaged or has tensors without elements.
    """
    recognition.refuse_adapter_without_config(folder)
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
    targets = config.get("target_modules")
    lists_targets = isinstance(targets, list) and all(isinstance(target, str) for target in targets)
    set_fields = [field for field, value in config.items() if value]
    return config["peft_type"] == "LORA" and lists_targets and all(field in PLAIN for field in set_fields)


def _loads_as_saved(base: Mapping[str, Any], adapter: Mapping[str, Any]) -> bool:
    """Return whether the base is certainly loaded as the class that wrote its file.

    Only then are the modules of the loaded model those of the file. `base` and `adapter` are the two configs.
    """
    classes = base.get("architectures")
    saved_class = classes[0] if isinstance(classes, list) and len(classes) == 1 else None
    if not isinstance(saved_class, str):
        return False
    mapping = adapter.get("auto_mapping")
    trained_class = mapping.get("base_model_class") if isinstance(mapping, dict) else None
    ending = _CLASS_ENDINGS.get(str(adapter.get("task_type")), "")
    return trained_class in (None, saved_class) and saved_class.endswith(ending)


def _check_saved_whole(
    base: Checkpoint, folder: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]
) -> None:
    """Check that the adapter's file has every tensor of each module in `modules_to_save`: PEFT fails where one lacks.

    Some modules are left to the worker: those that the base's file does not have, such as a new head; those of which
    the adapter has tensors that the base has not; tied ones, which PEFT may save once; and numbered tensors, which
    transformers may fuse.
    """
    modules = config.get("modules_to_save")
    if not isinstance(modules, list) or config.get("ensure_weight_tying"):
        return
    # PEFT's wrapper adds these components to the names of the modules that it saves as a whole.
    saved_names = {name.replace(".modules_to_save.", ".").replace(".default.", ".") for name in tensors}
    for module in modules:
        if not isinstance(module, str) or not module:
            continue
        base_endings = _parameter_endings(module, base.tensors)
        saved_endings = _all_endings(module, saved_names)
        if not saved_endings <= set(base_endings):
            continue
        missing = next((ending for ending in base_endings if ending not in saved_endings), None)
        if missing is not None:
            tensor_ending = f"{module}.{missing}"
            raise InputError(
                f"the adapter's file lacks a tensor that its config asks for: {tensor_ending}",
                where=folder,
                got=f"{len(tensors)} tensors, none of which ends in {tensor_ending}",
                wanted=f"the whole of {module}, which is in modules_to_save of adapter_config.json",
                hint="save it again by PEFT's save_pretrained(), or take the module out of modules_to_save",
            )


def _parameter_endings(module: str, names: Iterable[str]) -> list[str]:
    """Return what follows a module's name in the names of its weights and biases; numbered parts are left out."""
    pattern = re.compile(rf"(?:^|\.){re.escape(module)}\.(?P<ending>[A-Za-z_.]*(?:weight|bias))$")
    matches = [pattern.search(name) for name in names]
    return [match["ending"] for match in matches if match is not None]


def _all_endings(module: str, names: Iterable[str]) -> set[str]:
    """Return what follows a module's name in the names of all of its tensors."""
    pattern = re.compile(rf"(?:^|\.){re.escape(module)}\.(?P<ending>.+)$")
    matches = [pattern.search(name) for name in names]
    return {match["ending"] for match in matches if match is not None}


def _check_adapter_fits(
    base: Checkpoint, folder: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]
) -> None:
    """Compare each adapted layer's rank with the config, and its (in, out) features with the base weight of the layer.

    Names in a file and in the model differ by leading components (`model.`, `transformer.`), so layers are matched by
    the end of their path; a layer with several matches, or whose weight is not a plain matrix, is left to the worker.
    """
    targets = config["target_modules"]
    weights_by_ending = _group_by_ending(weights_of(base.tensors).values())
    pairs = _lora_pairs(tensors.values())
    any_in_base = False
    for module, pair in pairs.items():
        weight = _match(f"{module}.weight", weights_by_ending)
        any_in_base = any_in_base or weight is not None
        if weight is None or len(weight.shape) != 2 or not _is_named(module, targets):
            continue
        for side, header in pair.items():
            _check_rank(folder, config, header, module, side)
        _check_features(module, pair, weight)
    if not pairs or any_in_base:
        return
    if any(_is_named(name.rpartition(".")[0], targets) for name in base.tensors):
        return
    # No layer was matched. Loading may still rename, fuse or tie weights, and then PEFT loads the adapter.
    if _shares_modules(base, pairs) or _may_be_tied(base, pairs) or _may_be_renamed(base, pairs):
        return
    raise InputError(
        f"the adapter is for another base: none of its {len(pairs)} layers is in the base",
        where=folder,
        got=next(iter(pairs)),
        wanted=f"layers such as {next(iter(base.tensors), 'none')} of {base.folder}",
    )


def _group_by_ending(headers: Iterable[TensorHeader]) -> dict[str, list[TensorHeader]]:
    """Return the headers by each of the `endings` of their names."""
    headers_by_ending: dict[str, list[TensorHeader]] = {}
    for header in headers:
        for ending in endings(header.name):
            headers_by_ending.setdefault(ending, []).append(header)
    return headers_by_ending


def _lora_pairs(headers: Iterable[TensorHeader]) -> dict[str, dict[str, TensorHeader]]:
    """Return the matrices `A` and `B` of each adapted module, by module and side; a damaged file may lack one."""
    pairs: dict[str, dict[str, TensorHeader]] = {}
    for header in headers:
        match = _LORA_KEY.match(header.name)
        if match is not None and len(header.shape) == 2:
            pairs.setdefault(match["module"], {})[match["side"]] = header
    return pairs


def _features(pair: Mapping[str, TensorHeader]) -> tuple[int, int] | None:
    """Return the (out, in) features that `lora_B` and `lora_A` adapt; None where one of them lacks."""
    if set(pair) != {"A", "B"}:
        return None
    return pair["B"].shape[0], pair["A"].shape[1]


def _check_features(module: str, pair: Mapping[str, TensorHeader], weight: TensorHeader) -> None:
    features = _features(pair)
    # Some layers, such as GPT-2's Conv1D, store their weight as (in, out).
    if features is None or features in (weight.shape, weight.shape[::-1]):
        return
    raise InputError(
        f"the adapter is for another base: at {module} it adapts {features}, the base has {weight.shape}",
        where=pair["A"].file,
        got=f"lora_A {pair['A'].shape}, lora_B {pair['B'].shape}",
        wanted=f"in and out features of {weight.name} in {weight.file.name}",
    )


def _is_named(module: str, names: Iterable[str]) -> bool:
    """Return whether a list in `target_modules` names a layer: by its whole path or by the end of it, as in PEFT."""
    return any(module == name or module.endswith(f".{name}") for name in names)


def _check_rank(folder: Path, config: Mapping[str, Any], header: TensorHeader, module: str, side: str) -> None:
    """Check that one matrix, `side` A or B, has a rank that `r` or `rank_pattern` of the config allows."""
    config_path = folder / "adapter_config.json"
    pattern = config.get("rank_pattern") or {}
    usual_rank = config.get("r") or _DEFAULT_RANK
    if not isinstance(pattern, dict):
        raise InputError("rank_pattern must map layers to ranks", where=config_path, got=type(pattern).__name__)
    ranks = [usual_rank, *pattern.values()]
    if not all(isinstance(rank, int) for rank in ranks):
        raise InputError("a rank is a whole number", where=config_path, got=ranks)
    # lora_A is (rank, in), lora_B is (out, rank)
    if side == "A":
        rank, wanted_shape = header.shape[0], (usual_rank, header.shape[1])
    else:
        rank, wanted_shape = header.shape[1], (header.shape[0], usual_rank)
    if rank not in ranks:
        raise InputError(
            f"adapter file has shape {header.shape}, its config wants {wanted_shape} at {module}.lora_{side}: was it "
            f"trained with r={rank}?",
            where=header.file,
            got=f"rank {rank}",
            wanted="r=" + " or ".join(map(str, sorted(set(ranks)))) + f" in {config_path}",
        )


def endings(name: str) -> Iterator[str]:
    """Yield a dotted name with ever fewer leading components, down to two components.

    `a.b.c` gives `a.b.c` and `b.c`; a name of one component gives itself.
    """
    components = name.split(".")
    for start in range(max(1, len(components) - 1)):
        yield ".".join(components[start:])


def _match(name: str, headers_by_ending: Mapping[str, list[TensorHeader]]) -> TensorHeader | None:
    """Return the header with the longest common ending; None where there is none, or several have that ending."""
    for ending in endings(name):
        headers = headers_by_ending.get(ending, [])
        if headers:
            return headers[0] if len(headers) == 1 else None
    return None


def _may_be_tied(base: Checkpoint, pairs: Mapping[str, Mapping[str, TensorHeader]]) -> bool:
    """Return whether every adapted layer may be a head with the weight of an embedding, which a file holds once.

    Such a head is a module of the model itself, and its in and out features are those of a matrix in the file.
    """
    shapes = {header.shape for header in base.tensors.values()}
    return all("." not in module and _features(pair) in shapes for module, pair in pairs.items())


def _may_be_renamed(base: Checkpoint, pairs: Mapping[str, Mapping[str, TensorHeader]]) -> bool:
    """Return whether the base has a layer with the last name component and the features of an adapted layer.

    transformers renames some parents on loading: the router of Mixtral is `block_sparse_moe.gate` in its files and
    `mlp.gate` in the model.
    """
    base_layers = {
        (name.rpartition(".weight")[0].rpartition(".")[2], header.shape) for name, header in base.tensors.items()
    }
    return any((module.rpartition(".")[2], _features(pair)) in base_layers for module, pair in pairs.items())


def _shares_modules(base: Checkpoint, modules: Iterable[str]) -> bool:
    """Return whether the parent of any adapted layer is in the base: transformers fuses some weights on loading."""
    base_modules: set[str] = set()
    for name in base.tensors:
        components = name.split(".")
        for end in range(1, len(components)):
            base_modules.update(endings(".".join(components[:end])))
    for module in modules:
        parent = module.rpartition(".")[0]
        # a module of the model itself has the parent "", which is no module of a file
        if any(ending in base_modules for ending in endings(parent) if ending):
            return True
    return False
