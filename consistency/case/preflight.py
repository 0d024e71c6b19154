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
    first_adapter = options.adapters[0].path if options.adapters else options.adapter
    base, adapter = resolve(options.base, first_adapter)
    if base is None:
        raise UsageError("--base is required with an adapter", where="--base", wanted="the base's folder or hub id")
    # Contradictions among options are found before any file is read or downloaded.
    _check_soak(options)
    stages = _stages(options)
    _check_anything_is_checked(options, stages, has_adapter=adapter is not None)
    base_folder = _base_folder(base, options)
    adapter_folder = None
    if adapter is not None:
        adapter_folder = _local_folder(adapter, what="adapter", options=options)
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


def _base_folder(base: str, options: Options) -> Path | None:
    """Return the folder of the base, downloaded where needed; None where a function makes it."""
    if base.startswith("python:"):
        _check_function(base, what="model factory", where="--base")
        return None
    return _local_folder(base, what="base", options=options)


def _engine_files(options: Options) -> tuple[EngineFile, ...]:
    """Return the files of engine outputs by their full paths."""
    files = options.engine_outputs or ()
    return tuple(EngineFile(name=file.name, path=str(Path(file.path).expanduser().resolve())) for file in files)


def _named_folders(options: Options, base: Path | None) -> tuple[NamedAdapter, ...]:
    """Check the files of each named adapter against the base folder, and return the adapters by their folders."""
    adapters = []
    for adapter in options.adapters or ():
        _, path = resolve(options.base, adapter.path)
        folder = _local_folder(str(path), what="adapter", options=options)
        check_files(base, folder, allow_pickle=options.allow_pickle)
        adapters.append(NamedAdapter(name=adapter.name, path=str(folder)))
    return tuple(adapters)


def _check_anything_is_checked(options: Options, stages: Sequence[Stage], *, has_adapter: bool) -> None:
    """Raise UsageError where nothing would be compared: a stage of the adapter without one, or an empty `--only`."""
    possible_stages = [stage for stage in stages if has_adapter or not SPECS[stage].needs_adapter]
    impossible_stages = [stage for stage in stages if stage not in possible_stages]
    # Stages of a level that need an adapter are passed over without one; a stage that the user named is an error.
    if options.stages is not None and impossible_stages:
        raise UsageError(
            f"{' and '.join(impossible_stages)} without an adapter",
            where="--stages",
            got=",".join(options.stages),
            wanted="--adapter with its folder",
            hint="leave out what needs an adapter to check the base alone",
        )
    if options.only and not any(prefix.partition("::")[0] in possible_stages for prefix in options.only):
        raise UsageError(
            "nothing of this is checked",
            where="--only",
            got=",".join(options.only),
            wanted=f"stage::layer of {', '.join(possible_stages)}",
            hint=None if has_adapter else "no adapter was given",
        )


def _check_soak(options: Options) -> None:
    """Raise UsageError for options of a soak that contradict each other."""
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


def _check_function(reference: str, *, what: str, where: str) -> None:
    """Check the form `python:package.module:function`; `what` is the noun of the error message."""
    if not _FUNCTION.fullmatch(reference):
        raise UsageError(f"not a {what}", where=where, got=reference, wanted="python:package.module:function")


def _local_folder(name: str, *, what: str, options: Options) -> Path:
    """Return the folder that a path or a hub id names; a repository of the hub is downloaded.

    `what` is `base` or `adapter`: the noun of the error messages, and the option that they name.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        got, wanted = "a file", "the folder that holds it"
        if path.suffix == ".gguf":
            got, wanted = "GGUF weights of llama.cpp", "the folder of safetensors that they were converted from"
        raise InputError(f"the {what} must be a folder", where=path, got=got, wanted=wanted)
    # A hub id has one slash at most, so this cannot be one.
    has_several_parts = os.sep in name.rstrip(os.sep) and name.count("/") > 1
    if name.startswith((".", "/", "~")) or has_several_parts:
        raise InputError(f"no such folder for the {what}", where=path, hint=_similar(path))
    if not _HUB_ID.match(name):
        raise InputError(
            f"neither a folder nor a hub id for the {what}",
            where=f"--{what}",
            got=name,
            wanted="a folder, or a hub id such as org/name",
        )
    return _download(name, what=what, options=options)


def folder_in_cache(name: str, *, what: str) -> Path:
    """Return the folder that a path names, or a hub id whose repository is in the hub's cache; nothing is downloaded.

    `what` is `base` or `adapter`, as in `_local_folder`.

    Raises
    ------
    InputError
        There is no such folder, and the cache does not hold a repository of this name.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    path = Path(name).expanduser()
    if path.exists() or not _HUB_ID.match(name):
        return path
    try:
        return Path(snapshot_download(name, local_files_only=True)).resolve()
    except (LocalEntryNotFoundError, HFValidationError, OSError, ValueError):
        raise InputError(
            f"no folder {name!r} for the {what}, and the hub's cache does not hold it",
            where=f"--{what}",
            hint=_similar(path) or f"give the path of a folder, or download it first: hf download {name}",
        ) from None


def _download(repository: str, *, what: str, options: Options) -> Path:
    """Download a hub repository into the hub's cache; offline, use what the cache holds."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model"]
    # What can run code is not even fetched unless the user allowed it.
    patterns += ["*.bin"] if options.allow_pickle else []
    patterns += ["*.py"] if options.trust_remote_code else []
    try:
        return Path(snapshot_download(repository, allow_patterns=patterns)).resolve()
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        raise _download_error(error, repository, what=what) from None


def _download_error(error: Exception, repository: str, *, what: str) -> InputError:
    """Return the error for a repository that cannot be downloaded, with the cause and what to do about it."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    offline = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
    hint = "give the path of a local folder"
    match error:
        case GatedRepoError():
            cause, hint = "the repository is gated", "accept its conditions on the hub, then run `hf auth login`"
        case RepositoryNotFoundError():
            cause, hint = "no such repository", "check the name; a private one needs `hf auth login`"
        case LocalEntryNotFoundError() if constants.HF_HUB_OFFLINE:
            cause = "it is not in the hub's cache"
        case LocalEntryNotFoundError():
            cause = "the hub cannot be reached, and its cache does not hold it"
        case _:
            cause = first_line(error)
    return InputError(
        f"no folder {repository!r} for the {what}, and it cannot be downloaded from the hub{offline}",
        where=f"--{what}",
        got=cause,
        hint=_similar(Path(repository)) or hint,
    )


def _similar(path: Path) -> str | None:
    """Return a hint at a folder beside a missing one that has a close name; None where there is none."""
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_dir()]
    except OSError:
        return None
    hint = did_you_mean(path.name, names)
    return hint and hint.replace(" mean ", f" mean {path.parent}/", 1)


def _refuse_absent(options: Options) -> None:
    """Raise UsageError for an option that nothing installed reads: the extra that adds it is missing."""
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
    if options.stages is None:
        return requested(options.level, options)
    for stage in options.stages:
        spec = SPECS[stage]
        if spec.needs is not None and not getattr(options, spec.option):
            raise UsageError(spec.needs.sentence, where="--stages", wanted=spec.needs.wanted, hint=spec.needs.hint)
    _refuse_unused_options(options, options.stages)
    return with_judges(options.stages)


def _refuse_unused_options(options: Options, stages: Sequence[Stage]) -> None:
    """Raise UsageError for an option that asks for a stage which `--stages` leaves out."""
    for stage, spec in SPECS.items():
        if not spec.option or stage in stages:
            continue
        value = getattr(options, spec.option)
        if value is None:
            continue
        option = Edge.COMMAND_LINE.spell(spec.option)
        if spec.adapters is Adapters.ALL:
            option = "--adapter NAME=PATH"
        if isinstance(value, tuple):
            value = ", ".join(map(str, value))
        raise UsageError(f"{option} is for the stage {stage}, which is not in --stages", where=option, got=value)


def _device_map(name: str) -> str:
    """Return the name of a device map of transformers, or the full path of a user's JSON file, after a check of it."""
    if name in DEVICE_MAPS:
        return name
    path = Path(name).expanduser()
    if path.suffix != ".json":
        raise UsageError(
            "not a device map",
            where="--device-map",
            got=name,
            wanted=f"{', '.join(DEVICE_MAPS)}, or FILE.json",
            hint=did_you_mean(name, DEVICE_MAPS),
        )
    table = read_json(path)
    for module, device in table.items():
        # True is an int in Python, but no number of a device
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
    """Return the name of a case: the user's, or one of the base and its adapters, whose files need not exist."""
    base, adapter = resolve(options.base, options.adapter)
    adapters: list[str | None] = [resolve(options.base, named.path)[1] for named in options.adapters or ()]
    if not adapters:
        adapters = [adapter]
    paths = [Path(path) for path in (base, *adapters) if path is not None]
    return options.name or " + ".join(dict.fromkeys(map(name_of, paths)))
