"""Names of layers and tensors as reports, records and test items show them. No torch here."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "base_model.model."
SETTINGS_LAYER = "adapter_settings"
"""Layer name of the rows that are about no tensor of the adapter: scaling, rank, active adapters, loading again."""

RANK_AND_SCALING, LOADED_AGAIN = "rank_and_scaling", "loaded_again"
"""Tensors of that layer: the adapter's settings, and whether PEFT could load the adapter a second time."""

TRAINED_ON, IGNORED_FIELDS, OLDER_LAYOUT = "names_another_base", "ignored_fields", "older_layout"
"""Evidence of the first of these."""

ANOTHER_BASE, THIS_BASE = "names another base: ", ", this one is "
"""Stand before and after the name of that other base, wherever a report says it: a redacted one leaves the name out."""

WHOLE_MODEL = "model"
"""Layer name of a row that stands for a stage as a whole."""

DELTA, WEIGHT, SAFE_WEIGHT = "delta", "weight", "weight_safe_merge"
"""Tensors of the stage `merged`, per adapted layer."""

DEQUANTIZED, SETTINGS, AFTER_A_PASS = "weight_dequantized", "weight_settings", "weight_after_a_pass"
"""Of a quantized weight in the stage `base`: as its library reads it, what its file states, and what a pass leaves."""

BIAS, SAFE_BIAS = "bias", "bias_safe_merge"
"""Further ones, of a layer whose bias a merge changes."""

PLACEMENT, MERGE_PEAK, SAFE_MERGE_PEAK = "placement", "merge_peak", "safe_merge_peak"
"""Facts of the stage `memory`, per adapted layer; its other layers are devices."""

ADAPTER_ON, ADAPTER_OFF, ADAPTER_MERGED = "adapter_on", "adapter_off", "adapter_merged"
"""Modes of the stage `forward`, per module and output."""

END_TO_END = "end_to_end"
"""Suffix of an output in that stage which the device computed on its own activations: shown, not judged."""

OVERFLOWS = "NaN or infinite too"
"""In the reason of a block whose passes on the CPU overflow: it has no error to compare with."""

EXCEEDED_TIMEOUT, SILENT, KILLED, DISK_FULL = (
    "exceeded --timeout",
    "gave no sign of life",
    "killed by SIGKILL",
    "is the disk full?",
)
"""In the reason why a worker was lost: what to do follows from it."""

BY_BLOCKS = "by_blocks"
"""Key in the evidence of such an output: false where the blocks of a large model were not compared in its mode."""

BATCHES = "batch_invariance"
"""Layer name in the stage `forward` of an inference engine's outputs of one row in batches of several sizes."""

LOGITS = "logits"
"""The output of a language model, as transformers names it."""

MERGING = "merging"
"""Stage of the record of what merging does to the outputs: it has no row, and is in a part of its own."""

GIVEN = "given"
"""Part of the name of a row: what the blocks of a mode are given."""

NOT_IN_FILE = "the engine's file has none"
"""Why the outputs of a mode are skipped: the engine was not asked for them. Any other reason is a failure."""

ATTENTION = "attention"
"""Name of the row of a device that is there for one kernel of attention, where the model calls none."""

GRADIENT, UPDATED = "gradient", "updated"
"""Suffixes of an adapter's tensor in the stage `gradient`: `lora_A.gradient`, `lora_A.updated`."""

DECISIONS = "decisions"
"""Suffix of an operation whose decisions differ from the reference's: `relu.decisions`."""

NO_OUTPUT = "no output of the model depends on it"
"""Why a gradient is skipped: the model does not call its layer."""

UNSUPPORTED = "unsupported"
"""Evidence of a skipped row: the device has no such dtype or kernel, which is no failure."""

DIRECT, STRIDED, CASTING = "direct", "strided", "casting"
"""Tensors of the stage `transfer`, per ordered pair of devices: contiguous, strided, with a cast inside the copy."""

HOST_STAGED, CHAIN, OVERLAPPED, PINNED = "host_staged", "chain", "overlapped", "pinned"
"""The same: staged through the host, through a third device, several at once under load, and that with memory of the
host that is pinned, from which and to which no copy waits."""

FILLING, READING = "filling", "reading"
"""Where a device could not be filled with what it was to send, and where its own values cannot be read back."""

DIGEST_FAULT = "digest_fault"
"""In a worker's environment: what its device got wrong of the test words of the digest."""

HOST = "cpu"
"""Name of the host at either end of a copy, whichever kernels its processor runs."""

RAISED = "raised"
"""Evidence of the row in the place of a stage that failed, or that needs what one left changed: the error."""

CALLS, COMPUTED_AGAIN, NOT_RECOMPUTED = "calls", "computed_again_ratio", "not_recomputed"
"""The stored list of the operations that make a wrong result; in its evidence the error over its allowance when these
were computed again, or why there is no such list."""

LIMITS = "limits"
"""Evidence of a result outside the `block` rule: the limits of its figures, by their names."""

CUT = "cut."
"""Before `actual`, `expected` and `allowed` of the one operation that a list was cut to."""

_TO = "->"

CAST_ON_THE_WAY = "cast_on_the_way"
"""Evidence of a row that equals the file after a cast that only its load path makes: the dtype it goes through."""

SUM_OVER_RANKS = "sum over ranks"
"""Named like an operation without a deterministic version: any order of the ranks is right, and a library may choose
another one on another host. No sum of two ranks is named: it has one result in either order."""

TOLERANCE = "tolerance"
"""Evidence of a row judged by a user's tolerance: that tolerance, as the command line takes it."""


def split_name(name: str) -> tuple[str, str]:
    """Split a parameter's name into layer and tensor: `model.norm.weight` gives `model.norm`, `weight`."""
    layer, _, tensor = name.rpartition(".")
    return (layer, tensor) if layer else (name, "tensor")


def adapter_place(key: str) -> tuple[str, str]:
    """Split a key of an adapter's file: `….layers.0.self_attn.q_proj.lora_A.weight` gives `…q_proj`, `lora_A`."""
    name = key.removeprefix(_PREFIX)
    match = _method_tensor().match(name)
    return (match["layer"], match["tensor"]) if match else split_name(name)


def is_method_tensor(key: str) -> bool:
    """Report whether a key of an adapter's file is a tensor of the method, and not a layer that was saved whole."""
    return _method_tensor().match(key.removeprefix(_PREFIX)) is not None


@functools.cache
def _method_tensor() -> re.Pattern[str]:
    methods = "|".join(sorted({"lora_", *map(re.escape, peft_prefixes())}))
    return re.compile(rf"^(?P<layer>.+?)\.(?P<tensor>(?:{methods})[^.]*)(?:\.weight)?$")


def peft_prefixes() -> Iterator[str]:
    """Yield what the installed PEFT's methods begin their tensors' names with: `lora_`, `hada_`, `vera_`.

    They are read from the source, for importing PEFT imports torch: each method registers itself by a call of
    `register_peft_method`, whose prefix is its name unless another is given (VeRA saves tensors of both).
    """
    found = importlib.util.find_spec("peft")
    for folder in (found.submodule_search_locations if found else None) or ():
        for file in sorted(Path(folder, "tuners").glob("*/__init__.py")):
            for call in ast.walk(ast.parse(file.read_bytes())):
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "register_peft_method":
                    given = {k.arg: str(k.value.value) for k in call.keywords if isinstance(k.value, ast.Constant)}
                    yield f"{given['name']}_"
                    yield given.get("prefix", f"{given['name']}_")


def module_place(name: str) -> str:
    """Return the base's name for a module of the adapted model."""
    return name.removeprefix(_PREFIX)


def pair_name(source: str, destination: str) -> str:
    """Return the layer of the stage `transfer` for copies between two devices: `cuda:0->cuda:1`."""
    return f"{source}{_TO}{destination}"


def split_pair(layer: str) -> tuple[str, str] | None:
    """Return source and destination of a layer of the stage `transfer`, None where it names no pair."""
    source, arrow, destination = layer.partition(_TO)
    return (source, destination) if arrow and source and destination else None


def large_copy(size: int) -> str:
    """Return the tensor that a copy too large for some hosts is recorded as: `direct_256MiB`."""
    return f"{DIRECT}_{size >> 20}MiB"
