"""Whether transformers can load a merged folder: its keys and shapes against the model that its own config makes.

transformers itself loads the folder's tensors, without their values, into its class on the device `meta`: so every
renaming, fusing and tying that it does on loading is done here too, and nothing is read or computed. Where base and
folder have the same keys, shapes and settings, the folder loads as the base does, and transformers is not asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from huggingface_hub.errors import StrictDataclassError

from consistency.capture.wording import counted
from consistency.case.case import Case
from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.extras.merging.check_merged.folder import Folder, Problem, Severity
from consistency.extras.merging.check_merged.wrappers import WRAPPERS, without_wrappers, wrapper_in
from consistency.extras.merging.settings import differences
from consistency.worker.model.head_class import auto_class
from consistency.worker.model.loading import UNUSABLE

Shape = tuple[int, ...]

_SAVE_AGAIN = "save the merged model again by save_pretrained(), which writes weights and config.json for each other"
_NO_CONFIG = "save the merged model by save_pretrained(), or copy config.json of the base into the folder"
_OTHER_CONFIG = "copy config.json of the base into the folder, or save the merged model again by save_pretrained()"
_NO_HEAD = "set tie_word_embeddings in config.json as it is in the base, or save the head too"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """What transformers says of loading a folder.

    Attributes
    ----------
    class_name : str
        The class that was made of its config.
    missing : frozenset of str
        Tensors of the model that the folder does not fill: they begin as random values.
    unexpected : frozenset of str
        Keys of the folder that the model has no place for.
    mismatched : dict of str to tuple of Shape
        Tensors with another shape in the folder than in the model, with both.
    prefix : str
        What the names of the model have before those of the model without a head (`model`).
    """

    class_name: str
    missing: frozenset[str]
    unexpected: frozenset[str]
    mismatched: Mapping[str, tuple[Shape, Shape]]
    prefix: str = ""


class CannotTellError(Exception):
    """It cannot be told whether a folder loads; the text says why."""


def loading_problems(case: Case, before: Folder, after: Folder, absent: Set[str]) -> tuple[list[Problem], list[str]]:
    """Return what of a merged folder transformers does not load, and what could not be checked.

    Parameters
    ----------
    before, after : Folder
        The base and the merged folder.
    absent : set of str
        Tensors of the base that the folder is known to lack: they are told elsewhere.
    """
    if after.path.is_file() or after.reader:
        return [], []  # one file of several, or a format that transformers does not load
    if not (after.path / "config.json").exists():
        text = "the folder has no config.json, without which transformers makes no model"
        return [Problem(cause=MergeCause.DOES_NOT_LOAD, text=text, todo=_NO_CONFIG)], []
    if _is_like(before, after):
        return [], []
    try:
        loading = _load(case, after, before)
    except CannotTellError as reason:
        return [], [f"whether transformers loads the folder ({reason})"]
    except (StrictDataclassError, *UNUSABLE) as error:
        return _not_made(case, before, error)
    problem = _problem(case, before, after, loading, absent)
    return [] if problem is None else [problem], []


def _is_like(before: Folder, after: Folder) -> bool:
    """Return whether a folder loads as its base does: the same keys, shapes and settings."""
    if _other_settings(before, after):
        return False
    return _shapes(before) == _shapes(after)


def _other_settings(before: Folder, after: Folder) -> bool:
    """Return whether a setting differs that a class may be made by."""
    return any(not difference.is_harmless for difference in differences(after.config, before.config))


def _shapes(folder: Folder) -> dict[tuple[str, ...], Shape]:
    return {stored.keys: stored.shape for stored in folder.tensors.values()}


def _not_made(case: Case, before: Folder, error: Exception) -> tuple[list[Problem], list[str]]:
    """Return the problem that transformers makes no model of a folder; not checked where it makes none of the base."""
    message = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    try:
        _load(case, before, before)
    except (CannotTellError, StrictDataclassError, *UNUSABLE):
        return [], [f"whether transformers loads the folder (it does not load the base: {message})"]
    text = f"transformers cannot load the folder by its config.json: {message}"
    return [Problem(cause=MergeCause.DOES_NOT_LOAD, text=text, todo=_OTHER_CONFIG)], []


def _load(case: Case, folder: Folder, base: Folder) -> Loading:
    """Load a folder's tensors without values into the class of its config.

    Raises
    ------
    CannotTellError
        There is no class for it here, or its format is not read.
    """
    from transformers import AutoConfig

    if folder.unread:
        raise CannotTellError("its weights are in a format that is not read here")
    if not folder.config.get("model_type"):
        raise CannotTellError("config.json has no model_type")
    with _quiet():
        try:
            config: Any = AutoConfig.from_pretrained(folder.path, trust_remote_code=case.trust_remote_code)
        except (ImportError, ValueError, KeyError) as error:
            if "trust_remote_code" in str(error):
                raise CannotTellError("its class is made by its own code: --trust-remote-code runs it") from None
            if folder.config.get("model_type") == base.config.get("model_type"):
                raise CannotTellError(f"transformers makes nothing of config.json: {_first_line(error)}") from None
            raise
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # its tensors are dequantized here
        model_class = _class_of(case, folder, base, config)
        try:
            _, told = model_class.from_pretrained(
                None,
                config=config,
                state_dict={
                    key: torch.empty(stored.shape, dtype=stored.dtype, device="meta")
                    for key, stored in folder.tensors.items()
                },
                device_map={"": "meta"},
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except ImportError as error:
            raise CannotTellError(f"its class needs a library that is not installed: {_first_line(error)}") from None
    mismatched = {}
    for name, in_file, in_model in told["mismatched_keys"]:
        mismatched[name] = (tuple(in_file), tuple(in_model))
    return Loading(
        class_name=model_class.__name__,
        missing=frozenset(told["missing_keys"]) - mismatched.keys(),
        unexpected=frozenset(told["unexpected_keys"]),
        mismatched=mismatched,
        prefix=str(getattr(model_class, "base_model_prefix", "")),
    )


def _class_of(case: Case, folder: Folder, base: Folder, config: Any) -> Any:
    """Return the class that a folder's config names, or that of its base where it names none."""
    import transformers

    names = folder.config.get("architectures")
    if not names and folder.config.get("model_type") == base.config.get("model_type"):
        names = base.config.get("architectures")
    if not isinstance(names, list) or not names:
        raise CannotTellError("config.json names no class in architectures")
    known = getattr(transformers, str(names[0]), None)
    if known is not None:
        return known
    if not (case.trust_remote_code and getattr(config, "auto_map", None)):
        raise CannotTellError(f"transformers has no {names[0]}, and its own code runs with --trust-remote-code alone")
    auto = auto_class(config, msgspec.structs.replace(case, base=str(folder.path), adapter=None))
    with torch.device("meta"):
        return type(auto.from_config(config, trust_remote_code=True))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from printing its own report, and its progress."""
    from transformers.utils import logging

    verbosity, shows_progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_progress:
            logging.enable_progress_bar()


def _problem(case: Case, before: Folder, after: Folder, loading: Loading, absent: Set[str]) -> Problem | None:
    """Return what a folder's loading loses, but for what it is known to lack, and what its base loses as well."""
    missing = {name for name in loading.missing if not _is_among(name, absent)}
    unexpected = {name for name in loading.unexpected if _is_of_base(name, before)}
    mismatched = dict(loading.mismatched)
    if not missing and not unexpected and not mismatched:
        return None
    severity: Severity = "error"
    as_base = _base_loading(case, before)
    if as_base is not None and as_base.class_name == loading.class_name:
        missing -= as_base.missing
        unexpected -= as_base.unexpected
        for name in as_base.mismatched.keys() & mismatched.keys():
            del mismatched[name]
    elif not missing and not mismatched and not any(name.startswith(f"{loading.prefix}.") for name in unexpected):
        severity = "note"  # a head that the folder's own class does not have
    if not missing and not unexpected and not mismatched:
        return None
    total = len(after.tensors)
    loaded = total - len(loading.unexpected) - len(mismatched)
    text = f"as {loading.class_name} of its config.json: {_parts_text(missing, unexpected, mismatched)}"
    if severity == "error":
        text = f"{loaded} of {counted(total, 'tensor')} of the folder load {text}"
    else:
        text = f"loaded {text}"
    names = tuple(sorted({*unexpected, *mismatched, *missing}))
    todo = _todo(before, after, missing, unexpected)
    return Problem(cause=MergeCause.DOES_NOT_LOAD, text=text, tensors=names, severity=severity, todo=todo)


def _parts_text(missing: set[str], unexpected: set[str], mismatched: Mapping[str, tuple[Shape, Shape]]) -> str:
    parts = []
    if unexpected:
        first = min(unexpected)
        verb = "has" if len(unexpected) == 1 else "have"
        part = f"{counted(len(unexpected), 'key')} {verb} no place in it, such as {first}"
        if wrapper := wrapper_in(first):
            part = f"{part}, for {wrapper}. in its name"
        parts.append(part)
    if mismatched:
        first = min(mismatched)
        in_file, in_model = mismatched[first]
        verb = "has" if len(mismatched) == 1 else "have"
        parts.append(f"{len(mismatched)} {verb} another shape: {first} is {in_file}, config.json makes it {in_model}")
    if missing:
        first = min(missing)
        verb = "is in no file and begins" if len(missing) == 1 else "are in no file and begin"
        example = f" ({first})" if len(missing) == 1 else f", such as {first}"
        parts.append(f"{counted(len(missing), 'tensor')} of it {verb} as random values{example}")
    return "; ".join(parts)


def _todo(before: Folder, after: Folder, missing: set[str], unexpected: set[str]) -> str:
    for name in sorted(unexpected):
        if wrapper := wrapper_in(name):
            return f"{WRAPPERS[wrapper]}; or take {wrapper}. out of the keys"
    if not unexpected and missing and before.ties and not after.ties:
        return _NO_HEAD
    if _other_settings(before, after):
        return _OTHER_CONFIG
    return _SAVE_AGAIN


def _base_loading(case: Case, before: Folder) -> Loading | None:
    """Return what transformers says of the base; None where it cannot load it."""
    try:
        return _load(case, before, before)
    except (CannotTellError, StrictDataclassError, *UNUSABLE):
        return None


def _is_among(name: str, names: Set[str]) -> bool:
    """Return whether a name is among others, which may have other first components."""
    if name in names:
        return True
    return any(name.endswith(f".{other}") or other.endswith(f".{name}") for other in names)


def _is_of_base(name: str, before: Folder) -> bool:
    """Return whether a key of the folder is a tensor of the base: others are told as extra ones."""
    return _is_among(without_wrappers(name), before.tensors.keys())
