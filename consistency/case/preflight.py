"""Turn options into a case that can be run, or report what is wrong before any worker starts.

Only JSON files and safetensors headers are read: no torch, no tensor data, no pickle.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from consistency import plugins
from consistency.case.adapter_fit import check_files
from consistency.case.builtin import resolve
from consistency.case.case import Case
from consistency.case.checkpoint import read_json
from consistency.case.engine_file import EngineFile
from consistency.case.inputs_file import check_inputs_file
from consistency.case.named_adapters import NamedAdapter
from consistency.case.options import OPTIONS, Edge, Options
from consistency.case.recognition import name_of
from consistency.case.stage import Adapters, Stage
from consistency.case.stages import LEVELS, SPECS, requested, with_judges
from consistency.errors import ConsistencyError, InputError, UsageError, did_you_mean, first_line

DEVICE_MAPS = ("auto", "balanced", "sequential")
"""Device maps that transformers computes."""

_FUNCTION = re.compile(r"python:[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")


def prepare_case(options: Options) -> Case:
    """Resolve names and hub ids to folders, check the files, and freeze the case.

    Errors name the options as they were given.

    Raises
    ------
    InputError
        A file is missing, is a pickle or a Git LFS pointer, is cut short, or does not fit the others.
    UsageError
        The options contradict one another.
    """
    with options.source.naming():
        return _prepared(options)


def _prepared(options: Options) -> Case:
    if options.adapters and options.adapter is not None:
        raise UsageError("some adapters have names and one has none", where="--adapter", got=options.adapter)
    first = options.adapters[0].path if options.adapters else options.adapter
    base, adapter = resolve(options.base, first)
    if base is None:
        raise UsageError("--base is required with an adapter", where="--base", wanted="the base's folder or hub id")
    _check_soak(options)
    stages = _stages(options)
    _check_anything_is_checked(options, stages, has_adapter=adapter is not None)
    base_folder = None
    if base.startswith("python:"):
        _check_function(base, what="model factory", where="--base")
    else:
        base_folder = _local_folder(base, what="base", options=options)
    adapter_folder = None if adapter is None else _local_folder(adapter, what="adapter", options=options)
    check_files(base_folder, adapter_folder, allow_pickle=options.allow_pickle)
    adapters = _named_folders(options, base_folder)
    case = Case(
        name=case_name(options),
        base=base if base_folder is None else str(base_folder),
        adapter=None if adapter_folder is None else str(adapter_folder),
        adapters=adapters,
        dtype=options.dtype,
        profile=options.profile,
        settings=options.set,
        placement=options.placement,
        stages=stages,
        load_paths=options.load_paths,
        level=options.level,
        inputs=None if options.inputs is None else check_inputs_file(options.inputs, base_folder),
        engine_outputs=_engine_files(options),
        repeat=options.repeat or LEVELS[options.level].repeat,
        steps=options.steps,
        soak_s=options.soak,
        load=options.load,
        only=options.only,
        keep=options.keep,
        tolerance=options.tolerance,
        wrapper=options.wrapper,
        device_map=None if options.device_map is None else _device_map(options.device_map),
        allow_pickle=options.allow_pickle,
        trust_remote_code=options.trust_remote_code,
    )
    for reference, check in plugins.offered("case_checks"):
        with plugins.at_own_cost(reference, f"the check of a case {reference}", passes=(ConsistencyError,)):
            check(case)
    return case


def _engine_files(options: Options) -> tuple[EngineFile, ...]:
    files = options.engine_outputs or ()
    return tuple(EngineFile(name=one.name, path=str(Path(one.path).expanduser().resolve())) for one in files)


def _named_folders(options: Options, base: Path | None) -> tuple[NamedAdapter, ...]:
    """Return the adapters of a case with several, by their folders, whose files are checked."""
    found = []
    for one in options.adapters or ():
        _, path = resolve(options.base, one.path)
        folder = _local_folder(str(path), what="adapter", options=options)
        check_files(base, folder, allow_pickle=options.allow_pickle)
        found.append(NamedAdapter(name=one.name, path=str(folder)))
    return tuple(found)


def _check_anything_is_checked(options: Options, stages: Sequence[Stage], *, has_adapter: bool) -> None:
    """Refuse what would compare nothing: a stage of the adapter without one, or a choice that no stage has."""
    possible = [stage for stage in stages if has_adapter or not SPECS[stage].needs_adapter]
    without = [stage for stage in stages if stage not in possible]
    if options.stages is not None and without:
        raise UsageError(
            f"{' and '.join(without)} without an adapter",
            where="--stages",
            got=",".join(options.stages),
            wanted="--adapter with its folder",
            hint="leave out what needs an adapter to check the base alone",
        )
    if options.only and not any(one.partition("::")[0] in possible for one in options.only):
        raise UsageError(
            "nothing of this is checked",
            where="--only",
            got=",".join(options.only),
            wanted=f"stage::layer of {', '.join(possible)}",
            hint=None if has_adapter else "no adapter was given",
        )


def _check_soak(options: Options) -> None:
    if options.load and options.soak is None:
        raise UsageError(
            "there is no soak to load devices during", where="--load", wanted="--for with the time of the soak"
        )
    if options.soak is not None and options.timeout is not None and options.timeout <= options.soak:
        raise UsageError(
            "a worker would be stopped during its soak",
            where="--timeout",
            got=f"{options.timeout:g} s",
            wanted=f"more than the {options.soak:g} s of --for, which follow all stages",
        )


def _check_function(text: str, *, what: str, where: str) -> None:
    if not _FUNCTION.fullmatch(text):
        raise UsageError(f"not a {what}", where=where, got=text, wanted="python:package.module:function")


def _local_folder(text: str, *, what: str, options: Options) -> Path:
    path = Path(text).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        got, wanted = "a file", "the folder that holds it"
        if path.suffix == ".gguf":
            got, wanted = "GGUF weights of llama.cpp", "the folder of safetensors that they were converted from"
        raise InputError(f"the {what} must be a folder", where=path, got=got, wanted=wanted)
    if text.startswith((".", "/", "~")) or (os.sep in text.rstrip(os.sep) and text.count("/") > 1):
        raise InputError(f"no such folder for the {what}", where=path, hint=_similar(path))
    if not _HUB_ID.match(text):
        raise InputError(
            f"neither a folder nor a hub id for the {what}",
            where=f"--{what}",
            got=text,
            wanted="a folder, or a hub id such as org/name",
        )
    return _download(text, what=what, options=options)


def _download(repository: str, *, what: str, options: Options) -> Path:
    """Download a hub repository into the hub's cache; offline, use what the cache holds."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model"]
    patterns += ["*.bin"] if options.allow_pickle else []
    patterns += ["*.py"] if options.trust_remote_code else []
    try:
        return Path(snapshot_download(repository, allow_patterns=patterns)).resolve()
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        offline = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
        hint = "give the path of a local folder"
        match error:
            case GatedRepoError():
                got, hint = "the repository is gated", "accept its conditions on the hub, then run `hf auth login`"
            case RepositoryNotFoundError():
                got, hint = "no such repository", "check the name; a private one needs `hf auth login`"
            case LocalEntryNotFoundError() if constants.HF_HUB_OFFLINE:
                got = "it is not in the hub's cache"
            case LocalEntryNotFoundError():
                got = "the hub cannot be reached, and its cache does not hold it"
            case _:
                got = first_line(error)
        raise InputError(
            f"no folder {repository!r} for the {what}, and it cannot be downloaded from the hub{offline}",
            where=f"--{what}",
            got=got,
            hint=_similar(Path(repository)) or hint,
        ) from None


def _similar(path: Path) -> str | None:
    """Return a hint at a folder whose name is close to that of one that does not exist."""
    try:
        names = [one.name for one in path.parent.iterdir() if one.is_dir()]
    except OSError:
        return None
    close = did_you_mean(path.name, names)
    return close and close.replace(" mean ", f" mean {path.parent}/", 1)


def _refuse_absent(options: Options) -> None:
    """Raise UsageError for an option that nothing here reads: its extra is not installed."""
    for field, extra in plugins.absent("options").items():
        if getattr(options, field):
            name = next(option.name for option in OPTIONS if option.attribute == field)
            sentence = plugins.not_installed(f"the option {name}", extra)
            raise UsageError(sentence, where=Edge.COMMAND_LINE.spell(name), hint=plugins.INSTALL)


def _stages(options: Options) -> tuple[Stage, ...]:
    """Return the stages of `--stages`, or those of the level and of the options that ask for one."""
    _refuse_absent(options)
    if options.wrapper is not None:
        _check_function(options.wrapper, what="wrapper", where="--wrapper")
    asked = options.stages
    for stage in asked or ():
        spec = SPECS[stage]
        if spec.needs is not None and not getattr(options, spec.option):
            raise UsageError(spec.needs.sentence, where="--stages", wanted=spec.needs.wanted, hint=spec.needs.hint)
    for stage, spec in SPECS.items():
        value = getattr(options, spec.option) if spec.option else None
        if asked is not None and value is not None and stage not in asked:
            several = spec.adapters is Adapters.ALL
            option = "--adapter NAME=PATH" if several else Edge.COMMAND_LINE.spell(spec.option)
            value = ", ".join(map(str, value)) if isinstance(value, tuple) else value
            raise UsageError(f"{option} is for the stage {stage}, which is not in --stages", where=option, got=value)
    return requested(options.level, options) if asked is None else with_judges(asked)


def _device_map(text: str) -> str:
    """Check the name of a device map of transformers, or the JSON file of one of the user's."""
    if text in DEVICE_MAPS:
        return text
    path = Path(text).expanduser()
    if path.suffix != ".json":
        raise UsageError(
            "not a device map",
            where="--device-map",
            got=text,
            wanted=f"{', '.join(DEVICE_MAPS)}, or FILE.json",
            hint=did_you_mean(text, DEVICE_MAPS),
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


def case_name(options: Options) -> str:
    """Return the name of a case, whose files need not exist."""
    base, first = resolve(options.base, options.adapter)
    others = [resolve(options.base, one.path)[1] for one in options.adapters or ()]
    paths = [Path(text) for text in (base, *(others or [first])) if text is not None]
    return options.name or " + ".join(dict.fromkeys(map(name_of, paths)))
