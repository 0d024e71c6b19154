"""Recognise what a folder or file is that was given for a base or an adapter, and is neither.

Only names, the first bytes of a file and small JSON files are read: no torch, no pickle.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import json
import re
import shlex
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Any

from consistency.case.other_trainers import adapter_of_another_trainer
from consistency.errors import InputError, did_you_mean

BASE_CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"


@dataclass(frozen=True, slots=True)
class _Format:
    """A form of weights that is not loaded here.

    Attributes
    ----------
    patterns : tuple of str
        `fnmatch` patterns on the names of its files.
    noun : str
        Its name in an error message.
    hint : str
        What the user can do instead.
    """

    patterns: tuple[str, ...]
    noun: str
    hint: str


_IN_CACHE = re.compile(r"(?:^|/)models--([^/]+)/snapshots/[^/]+/*$")
_CONVERTED = "give the folder of safetensors that they were converted from"

# A folder may have files of several forms: the first form in this order is the one that is named.
_FORMATS = (
    _Format(("*.gguf", "*.ggml"), "GGUF weights of llama.cpp", _CONVERTED),
    _Format(("*.onnx",), "an ONNX model", _CONVERTED),
    _Format(("*.engine", "*.plan"), "a TensorRT engine", _CONVERTED),
    _Format(("*.mlmodel", "*.mlpackage"), "a Core ML model", _CONVERTED),
    _Format(("*.tflite", "tf_model.h5", "*.h5"), "TensorFlow weights", _CONVERTED),
    _Format(("flax_model*.msgpack", "*.msgpack"), "Flax weights", _CONVERTED),
    _Format(
        ("*.distcp", ".metadata"), "a distributed checkpoint of PyTorch",
        "gather it first: accelerate merge-weights, or torch.distributed.checkpoint.format_utils",
    ),
    _Format(
        ("zero_pp_rank_*", "global_step*", "zero_to_fp32.py"), "a checkpoint of DeepSpeed",
        "gather it first: python zero_to_fp32.py . OUT --safe_serialization",
    ),
    _Format(
        ("consolidated.*.pth", "consolidated*.safetensors"), "the weights in their maker's own layout",
        "give the repository in the layout of transformers, or convert them by its convert_*_weights_to_hf.py",
    ),
    _Format(
        ("model_index.json", "pytorch_lora_weights.*"), "a pipeline or LoRA of diffusers",
        "this tool checks models of transformers; for another module use --base python:package.module:function",
    ),
    _Format(
        ("*.pt", "*.pth", "*.ckpt", "*.bin"), "pickled weights",
        "save them by save_pretrained(), which writes safetensors",
    ),
)  # fmt: skip

_TRAINING = (
    "optimizer.pt",
    "optimizer.bin",
    "scheduler.pt",
    "trainer_state.json",
    "training_args.bin",
    "rng_state*.pth",
)
_TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
    "spiece.model",
    "sentencepiece*",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
)
# A vocabulary is what makes a tokenizer; the other files of one may lie in a folder without it.
_VOCABULARY = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")
# Files that a folder may have beside anything, and that say nothing of what it is.
_BESIDE = ("README*", "LICENSE*", ".gitattributes", "*.md", "generation_config.json", ".cache", ".git")


def has_tokenizer(folder: Path) -> bool:
    """Report whether a folder has the vocabulary of a tokenizer; without one transformers makes an empty tokenizer."""
    return any(_matches(name, _VOCABULARY) for name in _names(folder) or ())


def is_of_diffusers(folder: Path) -> bool:
    """Report whether a folder holds a part of a pipeline of diffusers, such as its UNet."""
    return (folder / BASE_CONFIG).is_file() and bool(_read_field(folder / BASE_CONFIG, "_diffusers_version"))


def refuse_base_without_config(folder: Path, *, weights_alone: bool = False) -> None:
    """Raise InputError, which says what the folder is, unless it has the config of a base.

    Parameters
    ----------
    weights_alone : bool, optional
        Whether nothing but the weights is read, so that a model of diffusers is a base too.

    Notes
    -----
    Nothing is raised for a folder that cannot be read or is not recognised: reading its config says why.
    """
    names = _names(folder)
    if names is None:
        return
    if is_of_diffusers(folder) and not weights_alone:
        class_name = _read_field(folder / BASE_CONFIG, "_class_name") or "a part of a pipeline"
        raise InputError(
            f"this folder holds {class_name} of diffusers, not a base model of transformers",
            where=folder,
            got=f"{BASE_CONFIG} with _diffusers_version",
            wanted="a model of transformers",
            hint="for another module use --base python:package.module:function",
        )
    if BASE_CONFIG in names:
        return
    if ADAPTER_CONFIG in names:
        base = _read_field(folder / ADAPTER_CONFIG, "base_model_name_or_path")
        hint = "give it as --adapter, and the model that it was trained on as --base"
        if base:
            hint += f": {base}"
        raise InputError(
            "this is an adapter, not a base model",
            where=folder,
            got=ADAPTER_CONFIG,
            wanted=f"a folder with {BASE_CONFIG}",
            hint=hint,
        )
    _refuse(folder, names, role="base model", config=BASE_CONFIG, weights="model.safetensors")


def refuse_adapter_without_config(folder: Path) -> None:
    """Raise InputError, which says what the folder is, unless it has the config of an adapter.

    Nothing is raised for a folder that cannot be read or is not recognised: reading its config says why.
    """
    names = _names(folder)
    # MLX's adapters have a config of that name too, beside a file of another
    may_be_pefts = names is not None and ADAPTER_CONFIG in names and bool(names & _ADAPTER_FILES)
    if not may_be_pefts:
        _refuse_adapter_of_another_trainer(folder)
    if names is None or ADAPTER_CONFIG in names:
        return
    # A model's folder may hold a training's checkpoints of adapters: then `_refuse` names the latest of them.
    if BASE_CONFIG in names and _find_inner(folder, ADAPTER_CONFIG) is None:
        training_file = next((name for name in sorted(names) if _matches(name, _TRAINING)), None)
        kind = "a training checkpoint of a whole model" if training_file else "a whole model"
        raise InputError(
            f"this is {kind}, not an adapter",
            where=folder,
            got=", ".join(filter(None, (BASE_CONFIG, training_file))),
            wanted=f"a folder with {ADAPTER_CONFIG}, as PEFT's save_pretrained() writes it",
            hint="an adapter that was merged into a model cannot be taken out again: give that model alone as --base, "
            "or check what is in it by `consistency check-merged`",
        )
    _refuse(folder, names, role="adapter", config=ADAPTER_CONFIG, weights="adapter_model.safetensors")


_ADAPTER_FILES = {"adapter_model.safetensors", "adapter_model.bin"}


def _refuse_adapter_of_another_trainer(folder: Path) -> None:
    """Raise InputError, which says how it is converted, where a folder or a file has another trainer's adapter."""
    known = adapter_of_another_trainer(folder)
    if known is None:
        return
    what, how_to_convert = known
    raise InputError(
        f"this is {what}",
        where=folder,
        wanted=f"a folder with {ADAPTER_CONFIG}, as PEFT's save_pretrained() writes it",
        hint=how_to_convert,
    )


def refuse_swapped_folders(base: Path, adapter: Path) -> None:
    """Raise InputError if the base is an adapter and the adapter is a base."""
    base_names = _names(base) or set()
    adapter_names = _names(adapter) or set()
    base_is_adapter = ADAPTER_CONFIG in base_names and BASE_CONFIG not in base_names
    adapter_is_base = BASE_CONFIG in adapter_names and ADAPTER_CONFIG not in adapter_names
    if base_is_adapter and adapter_is_base:
        raise InputError(
            "base and adapter are swapped",
            where="--base, --adapter",
            got=f"an adapter as base ({base}), and a base as adapter ({adapter})",
            hint=f"--base {shlex.quote(str(adapter))} --adapter {shlex.quote(str(base))}",
        )


def in_place_of_weights(folder: Path, wanted: str) -> tuple[str, str | None]:
    """Return what a folder with a config holds in place of its weights, and a hint; `("", None)` if that is not known.

    `wanted` is the name of the file that was looked for, such as `model.safetensors`.
    """
    names = _names(folder) or set()
    weight_files = [name for name in sorted(names) if name.endswith(".safetensors")]
    if len(weight_files) == 1:
        return f"weights under another name, {weight_files[0]}", f"rename {weight_files[0]} to {wanted}"
    if weight_files:
        return f"{len(weight_files)} other safetensors files and no index", f"download {wanted}.index.json as well"
    if (noun_and_hint := _find_format(names)) is not None:
        return noun_and_hint
    if all(_matches(name, (*_TOKENIZER, *_BESIDE, BASE_CONFIG, ADAPTER_CONFIG)) for name in names):
        nouns = []
        if names & {BASE_CONFIG, ADAPTER_CONFIG}:
            nouns.append("a config")
        if any(_matches(name, _TOKENIZER) for name in names):
            nouns.append("a tokenizer")
        content = " and ".join(nouns) + " alone" if nouns else ""
        return content, "download the weights as well, or train and save them first"
    if any(_matches(name, _TRAINING) for name in names):
        return "the state of a training", "give a checkpoint that was saved with its weights"
    return "", None


def _refuse(folder: Path, names: set[str], *, role: str, config: str, weights: str) -> None:
    """Raise InputError for a folder without the config of its role, where it is recognised as something else."""
    message, hint = _recognised(folder, names, role=role, config=config, weights=weights)
    if not message:
        return
    listing = ", ".join(sorted(names)[:8])
    if len(names) > 8:
        listing += " …"
    raise InputError(message, where=folder, got=listing or None, wanted=f"a folder with {config}", hint=hint)


def _recognised(folder: Path, names: set[str], *, role: str, config: str, weights: str) -> tuple[str, str | None]:
    """Return what a folder is that has no such config, and a hint; `("", None)` where it is not recognised."""
    is_adapter = config == ADAPTER_CONFIG
    option, article, maker = "--base", "a", "save_pretrained()"
    if is_adapter:
        option, article, maker = "--adapter", "an", "PEFT's save_pretrained()"
    if not names:
        return f"an empty folder was given for the {role}", "was the download or the training stopped?"
    # The parts of a pipeline of diffusers have configs too, but are no models of transformers.
    if "model_index.json" not in names and (inner := _find_inner(folder, config)) is not None:
        return f"the {role} is not in this folder, but in one inside it", f"{option} {inner}"
    if (noun_and_hint := _find_format(names)) is not None:
        noun, hint = noun_and_hint
        return f"this folder holds {noun}, not {article} {role} of transformers", hint
    if any(name.endswith(".safetensors") for name in names):
        return f"weights without {config}", f"copy {config} into the folder: {maker} wrote it beside {weights}"
    has_tokenizer_file = any(_matches(name, _TOKENIZER) for name in names)
    if has_tokenizer_file and all(_matches(name, (*_TOKENIZER, *_BESIDE)) for name in names):
        return f"this folder holds a tokenizer, not {article} {role}", f"give the {role}'s own folder"
    if any(_matches(name, _TRAINING) for name in names):
        return "a training checkpoint without a model", "give a checkpoint that was saved with its model"
    return "", None


def _find_format(names: set[str]) -> tuple[str, str] | None:
    """Return a noun, with the name of a file, for the first form of weights in a folder, and a hint; None for none."""
    for weight_format in _FORMATS:
        for name in sorted(names):
            # the state of a training is pickled too, but is no weights
            if _matches(name, weight_format.patterns) and not _matches(name, _TRAINING):
                return f"{weight_format.noun} ({name})", weight_format.hint
    return None


def _find_inner(folder: Path, config: str) -> Path | None:
    """Return the folder inside that has the config: a snapshot of the hub's cache, or the latest checkpoint.

    It is one or two levels down; None where there is none.
    """
    with suppress(OSError):
        paths = [*folder.glob(f"*/{config}"), *folder.glob(f"*/*/{config}")]
        folders = [path.parent for path in paths]
        return max(folders, key=lambda inner: (_training_step(inner), -len(inner.parts), inner.name), default=None)
    return None


def _training_step(folder: Path) -> int:
    """Return the step of a checkpoint, `checkpoint-500`; 0 for a folder of another name."""
    match = re.search(r"-(\d+)$", folder.name)
    return int(match[1]) if match else 0


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _names(folder: Path) -> set[str] | None:
    """Return the names in a folder; None where it cannot be read, because what reads it next says why."""
    with suppress(OSError):
        return {path.name for path in folder.iterdir()}
    return None


def _read_field(path: Path, name: str) -> str | None:
    """Return a text field of a JSON file; None where the file is not readable, or the field is empty or no text."""
    with suppress(OSError, ValueError, RecursionError):
        table = json.loads(path.read_text(encoding="utf-8"))
        value = table.get(name) if isinstance(table, dict) else None
        return value if isinstance(value, str) and value else None
    return None


# --- files ----------------------------------------------------------------------------------------------------------

# First bytes, what such a file is, and what the user can do.
_STARTS = (
    (b"GGUF", "GGUF weights of llama.cpp", "give the safetensors file that they were converted from"),
    (b"PK\x03\x04", "a pickle of torch.save (a ZIP file)", "it was renamed: save it by safetensors.torch.save_file"),
    *((bytes((0x80, n)), "a pickle", "it was renamed: save it by safetensors.torch.save_file") for n in range(2, 6)),
    (b"\x89HDF", "an HDF5 file", "save it by safetensors.torch.save_file"),
    (b"\x1f\x8b", "a gzip file", "unpack it"),
    *((start, "a web page", "a login or error page was saved in its place: download the file again")
      for start in (b"<!", b"<h", b"<H", b"<?")),
    (b"{", "a JSON text", "an error message was saved in its place: download the file again"),
    (b"\0" * 16, "zeros", "a download reserved the space and did not fill it: download the file again"),
)  # fmt: skip


def other_file(head: bytes) -> tuple[str, str] | None:
    """Return what a file is that is named `.safetensors` and is another, and a hint.

    None if it may be a safetensors file, or what it is is not known. `head` is its first bytes, 16 at least where the
    file has them.
    """
    # A safetensors file starts with the length of its header, in eight bytes of which the last ones are 0, and a brace.
    # One that is cut may have no brace, and zeros alone are no length.
    has_brace = head[8:9] == b"{"
    has_length = any(head) and not any(head[4:8])
    if has_brace or has_length:
        return None
    return next(((noun, hint) for start, noun, hint in _STARTS if head.startswith(start)), None)


def missing_bytes(path: Path) -> str:
    """Say how much of a safetensors file is there: `10 of 20 bytes`, or `10 bytes of a header of 20`.

    It is the size alone where the size is right, or where the header is not sound.
    """
    size = path.stat().st_size
    with suppress(OSError, ValueError, struct.error, RecursionError, AttributeError, TypeError, LookupError):
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes + 8 > size:
                # the library refuses longer headers than 100 MB, so that is no length but other data
                is_length = header_bytes < 100_000_000
                return f"{size} bytes of a header of {header_bytes + 8}" if is_length else f"{size} bytes"
            header = json.loads(file.read(header_bytes))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        whole_bytes = 8 + header_bytes + max(ends, default=0)
        return f"{size} of {whole_bytes} bytes" if size != whole_bytes else f"{size} bytes"
    return f"{size} bytes"


# --- methods of PEFT ------------------------------------------------------------------------------------------------


def check_method(name: object, where: Path, config: Mapping[str, Any]) -> None:
    """Raise InputError if the installed PEFT does not know an adapter's method, the `peft_type` of its config."""
    methods = peft_methods()
    if not methods or name in methods:
        return
    version = importlib.metadata.version("peft")
    stated = f"peft_type {name}"
    if saved_by := config.get("peft_version"):
        stated += f", saved by PEFT {saved_by}"
    raise InputError(
        f"the installed PEFT {version} does not know the adapter's method {name}",
        where=where,
        got=stated,
        wanted=", ".join(methods),
        hint=did_you_mean(str(name), methods)
        or "install the PEFT that it was saved by, or a later one: pip install -U peft",
    )


def peft_methods() -> tuple[str, ...]:
    """Return the methods of the installed PEFT, such as `LORA`, from its source; empty if the source shows none.

    PEFT is not imported: that takes seconds, and imports torch.
    """
    with suppress(OSError, SyntaxError, ValueError, ImportError):
        spec = importlib.util.find_spec("peft")
        if spec is not None and spec.origin is not None:
            source = Path(spec.origin).with_name("utils") / "peft_types.py"
            return _methods_in(source.read_text(encoding="utf-8"))
    return ()


@functools.lru_cache(maxsize=1)
def _methods_in(source: str) -> tuple[str, ...]:
    """Return the values of the enum `PeftType` in the source of PEFT's module."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == "PeftType":
            values = [statement.value for statement in node.body if isinstance(statement, ast.Assign)]
            return tuple(str(value.value) for value in values if isinstance(value, ast.Constant))
    return ()


def repository_of(path: PurePath) -> str:
    """Return the hub id of the model whose folder in the hub's cache this is; empty for any other folder."""
    match = _IN_CACHE.search(path.as_posix())
    return "" if match is None else match.group(1).replace("--", "/")


def name_of(path: Path) -> str:
    """Return the name that reports use for a folder: the hub id in the hub's cache, whose folders are commits.

    Else it is the folder's own name, or its parent's where that is `base` or `adapter`, as in the built-in cases.
    """
    if repository := repository_of(path):
        return repository
    if path.name in ("base", "adapter"):
        return path.parent.name or path.name
    return path.name or str(path)
