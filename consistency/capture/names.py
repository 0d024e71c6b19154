"""Names of layers and tensors as reports, records and test items show them. No torch here."""

from __future__ import annotations

import re

_PREFIX = "base_model.model."
# PEFT names its parameters after the method: `lora_A`, `lora_magnitude_vector`, `hada_w1_a`, `vera_lambda_b`, …
_METHOD = re.compile(
    r"^(?P<layer>.+?)\.(?P<tensor>(?:lora|ada|hada|lokr|oft|boft|ia3|vera|hra|bone|ln_tuning|shira|c3a|road|waveft|"
    r"randlora|fourierft|trainable_tokens|miss|delora)_[^.]*)(?:\.weight)?$"
)

SETTINGS_LAYER = "adapter_settings"
"""Layer name of the rows for what is no tensor of the adapter: scaling, rank, active adapters, loading it again."""

RANK_AND_SCALING, LOADED_AGAIN = "rank_and_scaling", "loaded_again"
"""Tensors of that layer: the adapter's settings, and whether PEFT could load the adapter a second time."""

WHOLE_MODEL = "model"
"""Layer name of a row that stands for a stage as a whole."""

DELTA, WEIGHT, SAFE_WEIGHT = "delta", "weight", "weight_safe_merge"
"""Tensors of the stage `merged`, per adapted layer."""

PLACEMENT, MERGE_PEAK, SAFE_MERGE_PEAK = "placement", "merge_peak", "safe_merge_peak"
"""Facts of the stage `memory`, per adapted layer; its other layers are devices."""

ADAPTER_ON, ADAPTER_OFF, ADAPTER_MERGED = "adapter_on", "adapter_off", "adapter_merged"
"""Modes of the stage `forward`, per activation."""

GRADIENT, UPDATED = "gradient", "updated"
"""What follows the name of an adapter's tensor in the stage `gradient`: `lora_A.gradient`, `lora_A.updated`."""

UNSUPPORTED = "unsupported"
"""Evidence of a skipped row: the device has no such dtype or kernel at all, so that it failed at nothing."""
DIRECT, STRIDED, CASTING = "direct", "strided", "casting"
"""Tensors of the stage `transfer`, per ordered pair of devices: one memory to another as it lies, between layouts with
gaps, and with a cast inside the copy."""

HOST_STAGED, CHAIN, OVERLAPPED = "host_staged", "chain", "overlapped"
"""The same: by way of the host, by way of a third device, and several at once beside running work."""

FILLING, READING = "filling", "reading"
"""Where a device could not be filled with what it was to send, and where not even what it made itself can be read."""

HOST = "cpu"
"""What the host is called at either end of a copy, whatever kernels its processor runs."""

_TO = "->"
CAST_ON_THE_WAY = "cast_on_the_way"
"""Evidence of a row whose bytes are the file's after a cast that only its road makes: the dtype it goes through."""

TOLERANCE = "tolerance"
"""Evidence of a row that a user's tolerance judged: that tolerance, as the command line takes it."""


def split_name(name: str) -> tuple[str, str]:
    """Split a parameter's name into layer and tensor: `model.norm.weight` gives `model.norm`, `weight`."""
    layer, _, tensor = name.rpartition(".")
    return (layer, tensor) if layer else (name, "tensor")


def adapter_place(key: str) -> tuple[str, str]:
    """Split a key of an adapter's file: `….layers.0.self_attn.q_proj.lora_A.weight` gives `…q_proj`, `lora_A`."""
    name = key.removeprefix(_PREFIX)
    match = _METHOD.match(name)
    return (match["layer"], match["tensor"]) if match else split_name(name)


def is_method_tensor(key: str) -> bool:
    """Tell whether a key of an adapter's file is a tensor of the method, and not a layer that was saved whole."""
    return _METHOD.match(key.removeprefix(_PREFIX)) is not None


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
    """Return the tensor that a copy too large for every machine is recorded as: `direct_256MiB`."""
    return f"{DIRECT}_{size >> 20}MiB"
