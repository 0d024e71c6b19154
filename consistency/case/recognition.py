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

from consistency.errors import InputError, did_you_mean

BASE_CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"


@dataclass(frozen=True, slots=True)
class _Format:
    """Weights in a form that is not loaded here: the names of their files, what they are, and what to do."""

    patterns: tuple[str, ...]
    what: str
    todo: str


_IN_CACHE = re.compile(r"(?:^|/)models--([^/]+)/snapshots/[^/]+/*$")
_CONVERTED = "give the folder of safetensors that they were converted from"

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
    _Format(("model_index.json", "pytorch_lora_weights.*"), "a pipeline or LoRA of diffusers",
            "this tool checks models of transformers; for another module use --base python:package.module:function"),
    _Format(("*.pt", "*.pth", "*.ckpt", "*.bin"), "pickled weights",
            "save them by save_pretrained(), which writes safetensors"),
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
_VOCABULARY = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")
_BESIDE = ("README*", "LICENSE*", ".gitattributes", "*.md", "generation_config.json", ".cache", ".git")


def has_tokenizer(folder: Path) -> bool:
    """Report whether a folder has the vocabulary of a tokenizer; without one transformers makes an empty tokenizer."""
    return any(_is(name, _VOCABULARY) for name in _names(folder) or ())


def base_folder(folder: Path) -> None:
    """Raise, and say what the folder is, unless it has the config of a base."""
    names = _names(folder)
    if names is not None and BASE_CONFIG in names and _field(folder / BASE_CONFIG, "_diffusers_version"):
        names = {"model_index.json"}  # a part of a pipeline, such as its `unet`
    if names is None or BASE_CONFIG in names:
        return
    if ADAPTER_CONFIG in names:
        own = _field(folder / ADAPTER_CONFIG, "base_model_name_or_path")
        raise InputError(
            "this is an adapter, not a base model",
            where=folder,
            got=ADAPTER_CONFIG,
            wanted=f"a folder with {BASE_CONFIG}",
            hint="give it as --adapter, and the model that it was trained on as --base" + (f": {own}" if own else ""),
        )
    _refuse(folder, names, role="base model", config=BASE_CONFIG, weights="model.safetensors")


def adapter_folder(folder: Path) -> None:
    """Raise, and say what the folder is, unless it has the config of an adapter."""
    names = _names(folder)
    if names is None or ADAPTER_CONFIG in names:
        return
    if BASE_CONFIG in names and _inner(folder, ADAPTER_CONFIG) is None:
        training = next((name for name in sorted(names) if _is(name, _TRAINING)), None)
        kind = "a training checkpoint of a whole model" if training else "a whole model"
        raise InputError(
            f"this is {kind}, not an adapter",
            where=folder,
            got=", ".join(filter(None, (BASE_CONFIG, training))),
            wanted=f"a folder with {ADAPTER_CONFIG}, as PEFT's save_pretrained() writes it",
            hint="an adapter that was merged into a model cannot be taken out again: give that model alone as --base, "
            "or check what is in it by `consistency check-merged`",
        )
    _refuse(folder, names, role="adapter", config=ADAPTER_CONFIG, weights="adapter_model.safetensors")


def swapped(base: Path, adapter: Path) -> None:
    """Raise if the base is an adapter and the adapter is a base."""
    of_base, of_adapter = _names(base) or set(), _names(adapter) or set()
    is_adapter = ADAPTER_CONFIG in of_base and BASE_CONFIG not in of_base
    if is_adapter and BASE_CONFIG in of_adapter and ADAPTER_CONFIG not in of_adapter:
        raise InputError(
            "base and adapter are swapped",
            where="--base, --adapter",
            got=f"an adapter as base ({base}), and a base as adapter ({adapter})",
            hint=f"--base {shlex.quote(str(adapter))} --adapter {shlex.quote(str(base))}",
        )


def in_place_of_weights(folder: Path, wanted: str) -> tuple[str, str | None]:
    """Return what a folder with a config holds in place of its weights, and what to do; empty if that is not known."""
    names = _names(folder) or set()
    other = [name for name in sorted(names) if name.endswith(".safetensors")]
    if len(other) == 1:
        return f"weights under another name, {other[0]}", f"rename {other[0]} to {wanted}"
    if other:
        return f"{len(other)} other safetensors files and no index", f"download {wanted}.index.json as well"
    if found := _format(names):
        return found
    if all(_is(name, (*_TOKENIZER, *_BESIDE, BASE_CONFIG, ADAPTER_CONFIG)) for name in names):
        has = {"a config": names & {BASE_CONFIG, ADAPTER_CONFIG}, "a tokenizer": any(_is(n, _TOKENIZER) for n in names)}
        alone = " and ".join(what for what, there in has.items() if there)
        return f"{alone} alone" if alone else "", "download the weights as well, or train and save them first"
    if any(_is(name, _TRAINING) for name in names):
        return "the state of a training", "give a checkpoint that was saved with its weights"
    return "", None


def _refuse(folder: Path, names: set[str], *, role: str, config: str, weights: str) -> None:
    """Raise what the folder is, where it has no config of this role and is recognised."""
    what, hint = _recognised(folder, names, role=role, config=config, weights=weights)
    if what:
        listing = ", ".join(sorted(names)[:8]) + (" …" if len(names) > 8 else "")
        raise InputError(what, where=folder, got=listing or None, wanted=f"a folder with {config}", hint=hint)


def _recognised(folder: Path, names: set[str], *, role: str, config: str, weights: str) -> tuple[str, str | None]:
    is_adapter = config == ADAPTER_CONFIG
    option, article = ("--adapter", "an") if is_adapter else ("--base", "a")
    if not names:
        return f"an empty folder was given for the {role}", "was the download or the training stopped?"
    if "model_index.json" not in names and (inner := _inner(folder, config)) is not None:
        return f"the {role} is not in this folder, but in one inside it", f"{option} {inner}"
    if found := _format(names):
        return f"this folder holds {found[0]}, not {article} {role} of transformers", found[1]
    if any(name.endswith(".safetensors") for name in names):
        maker = "PEFT's save_pretrained()" if is_adapter else "save_pretrained()"
        return f"weights without {config}", f"copy {config} into the folder: {maker} wrote it beside {weights}"
    if any(_is(name, _TOKENIZER) for name in names) and all(_is(name, (*_TOKENIZER, *_BESIDE)) for name in names):
        return f"this folder holds a tokenizer, not {article} {role}", f"give the {role}'s own folder"
    if any(_is(name, _TRAINING) for name in names):
        return "a training checkpoint without a model", "give a checkpoint that was saved with its model"
    return "", None


def _format(names: set[str]) -> tuple[str, str] | None:
    for one in _FORMATS:
        found = next((name for name in sorted(names) if _is(name, one.patterns) and not _is(name, _TRAINING)), None)
        if found is not None:
            return f"{one.what} ({found})", one.todo
    return None


def _inner(folder: Path, config: str) -> Path | None:
    """Return the folder inside that has the config: a snapshot of the hub's cache, or the latest checkpoint."""
    with suppress(OSError):
        found = [path.parent for pattern in (config, f"*/{config}") for path in folder.glob(f"*/{pattern}")]
        return max(found, key=lambda one: (_step(one), -len(one.parts), one.name), default=None)
    return None


def _step(folder: Path) -> int:
    found = re.search(r"-(\d+)$", folder.name)
    return int(found[1]) if found else 0


def _is(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _names(folder: Path) -> set[str] | None:
    """Return the names in a folder, None where it cannot be read: what reads it next says why."""
    with suppress(OSError):
        return {path.name for path in folder.iterdir()}
    return None


def _field(path: Path, name: str) -> str | None:
    with suppress(OSError, ValueError, RecursionError):
        table = json.loads(path.read_text(encoding="utf-8"))
        value = table.get(name) if isinstance(table, dict) else None
        return value if isinstance(value, str) and value else None
    return None


# --- files ----------------------------------------------------------------------------------------------------------

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
    """Return what a file is whose name ends in `.safetensors`, and what to do, from its first bytes; None if unknown.

    A safetensors file starts with the length of its header, in eight bytes of which the last ones are 0, and a brace.
    """
    if head[8:9] == b"{" or (not any(head[4:8]) and any(head)):
        return None
    return next(((what, todo) for start, what, todo in _STARTS if head.startswith(start)), None)


def missing_bytes(path: Path) -> str:
    """Return how much of a safetensors file is there, by its header; only its size where it has no sound header."""
    size = path.stat().st_size
    with suppress(OSError, ValueError, struct.error, RecursionError, AttributeError, TypeError, LookupError):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length + 8 > size:
                # the library refuses longer headers than 100 MB, so that is no length but other data
                return f"{size} bytes" + (f" of a header of {length + 8}" if length < 100_000_000 else "")
            header = json.loads(file.read(length))
        ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
        whole = 8 + length + max(ends, default=0)
        return f"{size} of {whole} bytes" if size != whole else f"{size} bytes"
    return f"{size} bytes"


# --- methods of PEFT ------------------------------------------------------------------------------------------------


def check_method(name: object, where: Path, config: Mapping[str, Any]) -> None:
    """Raise if the installed PEFT does not know an adapter's method."""
    known = peft_methods()
    if not known or name in known:
        return
    saved_by = config.get("peft_version")
    version = importlib.metadata.version("peft")
    raise InputError(
        f"the installed PEFT {version} does not know the adapter's method {name}",
        where=where,
        got=f"peft_type {name}" + (f", saved by PEFT {saved_by}" if saved_by else ""),
        wanted=", ".join(known),
        hint=did_you_mean(str(name), known)
        or "install the PEFT that it was saved by, or a later one: pip install -U peft",
    )


def peft_methods() -> tuple[str, ...]:
    """Return the methods of the installed PEFT, from its source and without importing it; empty if it shows none."""
    with suppress(OSError, SyntaxError, ValueError, ImportError):
        spec = importlib.util.find_spec("peft")
        if spec is not None and spec.origin is not None:
            source = Path(spec.origin).with_name("utils") / "peft_types.py"
            return _methods_in(source.read_text(encoding="utf-8"))
    return ()


@functools.lru_cache(maxsize=1)
def _methods_in(source: str) -> tuple[str, ...]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == "PeftType":
            values = [line.value for line in node.body if isinstance(line, ast.Assign)]
            return tuple(str(one.value) for one in values if isinstance(one, ast.Constant))
    return ()


def repository_of(path: PurePath) -> str:
    """Return the id of the model that a folder in the cache of a hub is of; empty for any other folder."""
    in_cache = _IN_CACHE.search(path.as_posix())
    return "" if in_cache is None else in_cache.group(1).replace("--", "/")


def name_of(path: Path) -> str:
    """Return what a folder is called: in the cache of a hub, whose folders are commits, the id of the model."""
    if repository := repository_of(path):
        return repository
    return (path.parent.name or path.name) if path.name in ("base", "adapter") else path.name or str(path)
