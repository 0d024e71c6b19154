"""Turn what a user asked for into a case that can be run, or say what is wrong before any worker starts.

Everything here is read from JSON files and safetensors headers: no torch, no tensor data, no pickle.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from consistency.case.case import Case
from consistency.case.checkpoint import Checkpoint, TensorHeader, read_checkpoint, read_header, read_json
from consistency.case.options import Options
from consistency.case.stages import LEVELS, Stage
from consistency.errors import InputError, UsageError

BUILTIN_CASES = ("llama", "gpt2", "bert")
DEVICE_MAPS = ("auto", "balanced", "sequential")
"""Device maps that transformers makes itself."""

_FACTORY = re.compile(r"python:[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_LORA_KEY = re.compile(r"^(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.weight)?$")


def prepare_case(options: Options) -> Case:
    """Resolve names and hub ids to folders, check the files, and freeze the case.

    Raises
    ------
    InputError
        A file is missing, is a pickle or a Git LFS pointer, is cut short, or does not fit the others.
    UsageError
        The options contradict one another.
    """
    base, adapter = _builtin(options)
    if base is None:
        raise UsageError("an adapter without a base", where="--base", wanted="the base's folder or hub id")
    base_folder = None
    if not base.startswith("python:"):
        base_folder = _local_folder(base, what="base", options=options)
    elif not _FACTORY.fullmatch(base):
        raise UsageError("not a model factory", where="--base", got=base, wanted="python:package.module:function")
    adapter_folder = None if adapter is None else _local_folder(adapter, what="adapter", options=options)
    check_files(base_folder, adapter_folder, allow_pickle=options.allow_pickle)
    inputs = None if options.inputs is None else _inputs_file(options.inputs)
    device_map = None if options.device_map is None else _device_map(options.device_map)
    stages = _stages(options)
    plan = LEVELS[options.level]
    return Case(
        name=options.name or _case_name(base, adapter),
        base=base if base_folder is None else str(base_folder),
        adapter=None if adapter_folder is None else str(adapter_folder),
        dtype=options.dtype,
        stages=stages,
        load_paths=options.load_paths,
        level=options.level,
        inputs=inputs,
        repeat=options.repeat or plan.repeat,
        only=options.only,
        keep=options.keep,
        tolerance=options.tolerance,
        wrapper=options.wrapper,
        device_map=device_map,
        allow_pickle=options.allow_pickle,
        trust_remote_code=options.trust_remote_code,
    )


def check_files(base: Path | None, adapter: Path | None, *, allow_pickle: bool) -> None:
    """Check a base folder and an adapter folder, each alone and one against the other."""
    weights = None
    if base is not None:
        read_json(base / "config.json", needed=("model_type",))
        weights = read_checkpoint(base, stem="model", pickle_stem="pytorch_model", allow_pickle=allow_pickle)
    if adapter is None:
        return
    config, tensors = read_adapter(adapter, allow_pickle=allow_pickle)
    if config["peft_type"] == "LORA":
        _check_ranks(adapter, config, tensors)
        if weights is not None and weights.tensors:
            _check_adapter_fits(weights, adapter, tensors)


def read_adapter(folder: Path, *, allow_pickle: bool) -> tuple[dict[str, Any], Mapping[str, TensorHeader]]:
    """Return an adapter's config and the headers of its tensors (none where it is an allowed pickle)."""
    config = read_json(folder / "adapter_config.json", needed=("peft_type",))
    if config["peft_type"] == "LORA":
        needed = ("r", "target_parameters" if config.get("target_parameters") else "target_modules")
        read_json(folder / "adapter_config.json", needed=needed)
    weights = read_checkpoint(folder, stem="adapter_model", pickle_stem="adapter_model", allow_pickle=allow_pickle)
    if not weights.tensors and not weights.pickled:
        raise InputError("the adapter's file holds no tensor", where=weights.files[0])
    return config, weights.tensors


def builtin_folder(name: str) -> Path:
    """Return the folder of a case that ships with the package."""
    here = Path(__file__).resolve().parents[1]
    for root in (here / "fixtures", here.parent / "fixtures"):
        if (root / name / "base" / "config.json").exists():
            return root / name
    raise InputError(
        f"the built-in case {name!r} is not installed", where=here, wanted="one of " + ", ".join(BUILTIN_CASES)
    )


def builtin_name(base: str, adapter: str | None) -> str | None:
    """Return the name of the built-in case that these folders are, None where they are of the user's own."""
    for name in BUILTIN_CASES:
        try:
            folder = builtin_folder(name)
        except InputError:
            continue
        if (base, adapter) == (str(folder / "base"), str(folder / "adapter")):
            return name
    return None


def _builtin(options: Options) -> tuple[str | None, str | None]:
    """Replace `builtin:NAME` by folders; without base and adapter, take the first built-in case."""
    base, adapter = options.base, options.adapter
    if base is None and adapter is None:
        base = f"builtin:{BUILTIN_CASES[0]}"
    if base is not None and base.startswith("builtin:"):
        folder = builtin_folder(base.removeprefix("builtin:"))
        base, adapter = str(folder / "base"), adapter or str(folder / "adapter")
    if adapter is not None and adapter.startswith("builtin:"):
        adapter = str(builtin_folder(adapter.removeprefix("builtin:")) / "adapter")
    return base, adapter


def _local_folder(text: str, *, what: str, options: Options) -> Path:
    path = Path(text).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise InputError(f"the {what} must be a folder", where=path, got="a file", wanted="the folder that holds it")
    if text.startswith((".", "/", "~")) or (os.sep in text.rstrip(os.sep) and text.count("/") > 1):
        raise InputError(f"no such folder for the {what}", where=path)
    if not _HUB_ID.match(text):
        raise InputError(f"neither a folder nor a hub id for the {what}", where=f"--{what}", got=text)
    return _download(text, what=what, options=options)


def _download(repository: str, *, what: str, options: Options) -> Path:
    """Fetch a hub repository into the hub's own cache; offline, take what the cache holds."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model"]
    patterns += ["*.bin"] if options.allow_pickle else []
    patterns += ["*.py"] if options.trust_remote_code else []
    try:
        return Path(snapshot_download(repository, allow_patterns=patterns)).resolve()
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        offline = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
        raise InputError(
            f"no folder {repository!r} for the {what}, and the hub does not give it{offline}",
            where=f"--{what}",
            got=str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
            hint="give the path of a local folder",
        ) from None


def _inputs_file(text: str) -> str:
    path = Path(text).expanduser()
    if not path.is_file():
        raise InputError("no such inputs file", where=path)
    if path.suffix != ".safetensors":
        raise InputError(
            "inputs are a safetensors file with the model's keyword arguments",
            where=path,
            got=path.suffix or "no ending",
            wanted=".safetensors with input_ids, attention_mask, …",
        )
    if not read_header(path):
        raise InputError("the inputs file holds no tensor", where=path)
    return str(path.resolve())


def _stages(options: Options) -> tuple[Stage, ...]:
    """Return the stages asked for, or the level's, with the stage that an option alone makes possible."""
    if options.wrapper is not None and not _FACTORY.fullmatch(options.wrapper):
        raise UsageError(
            "not a wrapper", where="--wrapper", got=options.wrapper, wanted="python:package.module:function"
        )
    asked = options.stages
    if asked is not None and Stage.WRAPPING in asked and options.wrapper is None:
        raise UsageError(
            "nothing wraps the base",
            where="--stages wrapping",
            wanted="--wrapper python:package.module:function",
            hint="the function takes the plain model and returns it wrapped",
        )
    for stage, option, value in (
        (Stage.WRAPPING, "--wrapper", options.wrapper),
        (Stage.SHARDING, "--device-map", options.device_map),
    ):
        if asked is not None and value is not None and stage not in asked:
            raise UsageError(f"{option} is for the stage {stage}, which --stages leaves out", where=option, got=value)
    if asked is not None:
        return asked
    stages = set(LEVELS[options.level].stages)
    stages |= {Stage.WRAPPING} if options.wrapper is not None else set()
    stages |= {Stage.SHARDING} if options.device_map is not None else set()
    return tuple(stage for stage in Stage if stage in stages)


def _device_map(text: str) -> str:
    """Check a device map that transformers makes, or the JSON file of one that a user made."""
    if text in DEVICE_MAPS:
        return text
    path = Path(text).expanduser()
    if path.suffix != ".json":
        raise UsageError(
            "not a device map", where="--device-map", got=text, wanted=f"{', '.join(DEVICE_MAPS)}, or FILE.json"
        )
    table = read_json(path)
    for module, device in table.items():
        if isinstance(device, bool) or not isinstance(device, (int, str)):
            raise InputError(
                "a device map maps modules to devices",
                where=f"{module} in {path}",
                got=device,
                wanted='a number, or a name such as "cpu", "disk", "cuda:1"',
            )
    if not table:
        raise InputError("the device map is empty", where=path)
    return str(path.resolve())


def _case_name(base: str, adapter: str | None) -> str:
    names = []
    for text in (base, adapter):
        if text is not None:
            path = Path(text)
            names.append(path.parent.name if path.name in ("base", "adapter") else path.name or text)
    return names[0] if len(set(names)) == 1 else " + ".join(names)


def _check_ranks(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]) -> None:
    pattern = config.get("rank_pattern") or {}
    if not isinstance(pattern, dict):
        raise InputError(
            "rank_pattern must map layers to ranks", where=folder / "adapter_config.json", got=type(pattern).__name__
        )
    ranks = [config["r"], *pattern.values()]
    if not all(isinstance(rank, int) for rank in ranks):
        raise InputError("a rank is a whole number", where=folder / "adapter_config.json", got=ranks)
    for header in tensors.values():
        match = _LORA_KEY.match(header.name)
        if match is None or len(header.shape) != 2 or config.get("target_parameters"):
            continue
        rank = header.shape[0 if match["side"] == "A" else 1]
        if rank not in ranks:
            wanted = (config["r"], header.shape[1]) if match["side"] == "A" else (header.shape[0], config["r"])
            raise InputError(
                f"adapter file has shape {header.shape}, its config wants {wanted} at "
                f"{match['module']}.lora_{match['side']}: was it trained with r={rank}?",
                where=header.file,
                got=f"rank {rank}",
                wanted="r=" + " or ".join(map(str, sorted(set(ranks)))) + f" in {folder / 'adapter_config.json'}",
            )


def _check_adapter_fits(base: Checkpoint, folder: Path, tensors: Mapping[str, TensorHeader]) -> None:
    """Hold each adapted layer's (in, out) features against the base weight of the same layer.

    Names in a file and in the model differ by leading components (`model.`, `transformer.`), so layers are matched by
    the end of their path; a layer that is found under several names, or whose weight is not a plain matrix, is left
    to the worker.
    """
    by_ending: dict[str, list[TensorHeader]] = {}
    for header in base.tensors.values():
        for ending in _endings(header.name):
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
        if owner is None or len(owner.shape) != 2 or set(pair) != {"A", "B"}:
            continue
        features = (pair["B"].shape[0], pair["A"].shape[1])
        if features not in (owner.shape, owner.shape[::-1]):
            raise InputError(
                f"the adapter is for another base: at {module} it adapts {features}, the base has {owner.shape}",
                where=pair["A"].file,
                got=f"lora_A {pair['A'].shape}, lora_B {pair['B'].shape}",
                wanted=f"in and out features of {owner.name} in {owner.file.name}",
            )
    if sides and not known and not _shares_modules(base, sides):
        first = next(iter(sides))
        raise InputError(
            f"the adapter is for another base: none of its {len(sides)} layers is in the base",
            where=folder,
            got=first,
            wanted=f"layers such as {next(iter(base.tensors), 'none')} of {base.folder}",
        )


def _endings(name: str) -> Iterator[str]:
    """Yield the name and what is left when leading components are taken off, two components at least."""
    parts = name.split(".")
    for i in range(max(1, len(parts) - 1)):
        yield ".".join(parts[i:])


def _match(name: str, by_ending: Mapping[str, list[TensorHeader]]) -> TensorHeader | None:
    for ending in _endings(name):
        found = by_ending.get(ending, [])
        if found:
            return found[0] if len(found) == 1 else None
    return None


def _shares_modules(base: Checkpoint, modules: Mapping[str, object]) -> bool:
    """Tell whether any adapted layer's parent is in the base: transformers fuses some weights when it loads them."""
    paths = {
        ending
        for name in base.tensors
        for i in range(1, name.count(".") + 1)
        for ending in _endings(".".join(name.split(".")[:i]))
    }
    return any(ending in paths for module in modules for ending in _endings(module.rpartition(".")[0]) if ending)
