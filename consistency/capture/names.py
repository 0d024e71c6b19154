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
"""Tensors of the layer `adapter_settings`: the adapter's settings, and whether PEFT could load it a second time."""

TRAINED_ON, IGNORED_FIELDS, OLDER_LAYOUT = "names_another_base", "ignored_fields", "older_layout"
"""Keys in the evidence of the row `rank_and_scaling`."""

ANOTHER_BASE, THIS_BASE = "names another base: ", ", this one is "
"""Texts before and after the name of another base in a report: a redacted report leaves the name out by them."""

WHOLE_MODEL = "model"
"""Layer name of a row that stands for a stage as a whole."""

DELTA, WEIGHT, SAFE_WEIGHT = "delta", "weight", "weight_safe_merge"
"""Tensors of the stage `merged`, per adapted layer."""

DEQUANTIZED, SETTINGS, AFTER_A_PASS = "weight_dequantized", "weight_settings", "weight_after_a_pass"
"""Tensors of a quantized weight in the stage `base`: the weight as its library reads it, the settings that its file
states, and the weight after a pass."""

BIAS, SAFE_BIAS = "bias", "bias_safe_merge"
"""Further tensors of the stage `merged`, for a layer whose bias a merge changes."""

PLACEMENT, MERGE_PEAK, SAFE_MERGE_PEAK = "placement", "merge_peak", "safe_merge_peak"
"""Facts of the stage `memory`, per adapted layer; its other layers are devices."""

ADAPTER_ON, ADAPTER_OFF, ADAPTER_MERGED = "adapter_on", "adapter_off", "adapter_merged"
"""Modes of the stage `forward`, per module and output."""

END_TO_END = "end_to_end"
"""Suffix of an output in the stage `forward` which the device computed on its own activations: shown, not judged."""

LONG = "long"
"""Suffix of a mode in the stage `forward` for the rows of a long text."""

LONG_TOKENS, WRONG_TOKENS, WHERE = "tokens_of_the_text", "wrong_tokens", "where"
"""Keys in the evidence of such a row: the tokens of the text, the compared tokens whose rows are wrong, and these in
words."""

TO_DO = "to_do"
"""Key in the evidence of a row which says what mends it, where to run again would show the same."""

OVERFLOWS = "NaN or infinite too"
"""Text in the reason of a block whose passes on the CPU overflow: it has no error to compare with."""

EXCEEDED_TIMEOUT, SILENT, KILLED, DISK_FULL = (
    "exceeded --timeout",
    "gave no sign of life",
    "killed by SIGKILL",
    "is the disk full?",
)
"""Texts in the reason why a worker was lost, by which the advice is chosen."""

BY_BLOCKS = "by_blocks"
"""Key in the evidence of an output from end to end: false where the blocks of a large model were not compared in its
mode."""

BATCHES = "batch_invariance"
"""Layer name in the stage `forward` of an inference engine's outputs of one row in batches of several sizes."""

LOGITS = "logits"
"""The output of a language model, as transformers names it."""

MERGING = "merging"
"""Stage of the record of a `MergeEffect`: it has no row, and is in a part of its own."""

GIVEN = "given"
"""Part of the name of a row that is about the block inputs of a mode."""

NOT_IN_FILE = "the engine's file has none"
"""Reason of a mode whose outputs are skipped: the engine was not asked for them. Any other reason is a failure."""

ATTENTION = "attention"
"""Name of the row of a device that is there for one kernel of attention, where the model calls none."""

GRADIENT, UPDATED = "gradient", "updated"
"""Suffixes of an adapter's tensor in the stage `gradient`: `lora_A.gradient`, `lora_A.updated`."""

DECISIONS = "decisions"
"""Suffix of an operation whose decisions differ from the reference's: `relu.decisions`."""

NO_OUTPUT = "no output of the model depends on it"
"""Reason of a gradient that is skipped because the model does not call its layer."""

UNSUPPORTED = "unsupported"
"""Key in the evidence of a row that is skipped because the device has no such dtype or kernel, which is no failure."""

DIRECT, STRIDED, CASTING = "direct", "strided", "casting"
"""Tensors of the stage `transfer`, per ordered pair of devices: contiguous, strided, with a cast inside the copy."""

HOST_STAGED, CHAIN, OVERLAPPED, PINNED = "host_staged", "chain", "overlapped", "pinned"
"""Further tensors of the stage `transfer`: staged through the host, through a third device, several at once under load,
and several at once with pinned memory of the host, from which and to which no copy waits."""

FILLING, READING = "filling", "reading"
"""Tensors of the stage `transfer` where a device could not be filled with the values that it was to send, and where its
own values cannot be read back."""

DIGEST_FAULT = "digest_fault"
"""Key in a worker's environment: the test words of the digest that its device got wrong."""

ADAPTER_METHOD = "adapter_method"
"""Key in a worker's environment: PEFT's name of the method of the adapter that it loaded."""

HOST = "cpu"
"""Name of the host at either end of a copy, whichever kernels its processor runs."""

RAISED = "raised"
"""Key in the evidence of the row in the place of a stage that failed, or of a stage that needs what a failed one left
changed: the error."""

CALLS, COMPUTED_AGAIN, NOT_RECOMPUTED = "calls", "computed_again_ratio", "not_recomputed"
"""The stored list of the operations that make a wrong result; in its evidence the error over its allowance when these
were computed again, or why there is no such list."""

DEVICE = "device"
"""Key in the environment of a worker whose name is not that of its device: the device, as torch names it."""

LIMITS = "limits"
"""Key in the evidence of a result outside the `block` rule: the limits of its figures, by their names."""

CUT = "cut."
"""Prefix of `actual`, `expected` and `allowed` for the one operation that a list of operations was cut to."""

_TO = "->"

CAST_ON_THE_WAY = "cast_on_the_way"
"""Key in the evidence of a row that equals the file after a cast that only its load path makes: that cast's dtype."""

SUM_OVER_RANKS = "sum over ranks"
"""Name of a sum over ranks among the operations without a deterministic version: any order of the ranks is right, and a
library may choose another one on another host. A sum of two ranks is not named: it has one result in either order."""

TOLERANCE = "tolerance"
"""Key in the evidence of a row judged by a user's tolerance: that tolerance, as the command line takes it."""


def split_name(name: str) -> tuple[str, str]:
    """Split a parameter's name into layer and tensor: `model.norm.weight` gives `model.norm`, `weight`."""
    layer, _, tensor = name.rpartition(".")
    if not layer:  # a parameter of the model itself
        return name, "tensor"
    return layer, tensor


def adapter_place(key: str) -> tuple[str, str]:
    """Split a key of an adapter's file into layer and tensor.

    `base_model.model.….q_proj.lora_A.weight` gives `….q_proj`, `lora_A`.
    """
    name = key.removeprefix(_PREFIX)
    match = _method_key_pattern().match(name)
    return (match["layer"], match["tensor"]) if match else split_name(name)


def is_method_tensor(key: str) -> bool:
    """Report whether a key of an adapter's file is a tensor of the method, and not a layer that was saved whole."""
    return _method_key_pattern().match(key.removeprefix(_PREFIX)) is not None


@functools.cache
def _method_key_pattern() -> re.Pattern[str]:
    """Return the pattern of the keys of a method's tensors in an adapter's file, without PEFT's prefix."""
    prefixes = "|".join(sorted({"lora_", *map(re.escape, peft_prefixes())}))
    return re.compile(rf"^(?P<layer>.+?)\.(?P<tensor>(?:{prefixes})[^.]*)(?:\.weight)?$")


def peft_prefixes() -> Iterator[str]:
    """Yield the prefixes of tensor names of the installed PEFT's methods: `lora_`, `hada_`, `vera_`.

    They are read from the source, for importing PEFT imports torch: each method registers itself by a call of
    `register_peft_method`, whose prefix is its name unless another is given (VeRA saves tensors of both).
    """
    spec = importlib.util.find_spec("peft")
    folders = (spec.submodule_search_locations if spec else None) or ()
    for folder in folders:
        for file in sorted(Path(folder, "tuners").glob("*/__init__.py")):
            for arguments in _registrations(file.read_bytes()):
                yield f"{arguments['name']}_"
                yield arguments.get("prefix", f"{arguments['name']}_")


def _registrations(source: bytes) -> Iterator[dict[str, str]]:
    """Yield the constant keyword arguments of each call of `register_peft_method` in a module."""
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "register_peft_method":
            yield {str(k.arg): str(k.value.value) for k in call.keywords if isinstance(k.value, ast.Constant)}


def module_place(name: str) -> str:
    """Return the base's name for a module of the adapted model."""
    return name.removeprefix(_PREFIX)


def pair_name(source: str, destination: str) -> str:
    """Return the layer of the stage `transfer` for copies between two devices: `cuda:0->cuda:1`."""
    return f"{source}{_TO}{destination}"


def split_pair(layer: str) -> tuple[str, str] | None:
    """Return source and destination of a layer of the stage `transfer`; None where it names no pair."""
    source, arrow, destination = layer.partition(_TO)
    return (source, destination) if arrow and source and destination else None


def large_copy(size: int) -> str:
    """Return the tensor name of a copy that is too large for some hosts, by its bytes: `direct_256MiB`."""
    return f"{DIRECT}_{size >> 20}MiB"
