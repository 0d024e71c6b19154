"""Check that the device's library dequantizes the base's quantized weights to the values that their bytes stand for.

The stage `base` compares the stored parts with the file, bit by bit. Here the library dequantizes each weight on its
device, and that is compared with the formula on the file's bytes, made on the CPU. Where only this differs, codes,
scales and table are right and are read in another way: wrong order, wrong table, wrong kernel.
"""

from __future__ import annotations

from typing import Any

import torch

from consistency.capture.names import AFTER_A_PASS, DEQUANTIZED, SETTINGS
from consistency.capture.records import TensorRecord
from consistency.numerics import words
from consistency.numerics.chunks import exact_chunks
from consistency.numerics.error import measure_against_exact
from consistency.numerics.identity import start_of
from consistency.numerics.quantized import QuantizedWeight
from consistency.numerics.rules import Rule
from consistency.worker.context import Context
from consistency.worker.model.loading import LoadedBase
from consistency.worker.model.running import model_code
from consistency.worker.quantized.exact import as_loaded
from consistency.worker.quantized.held import (
    STATE,
    dequantized,
    quantized_layers,
    settings_in,
    stated_settings,
    stored_names,
    weight_of_layer,
)
from consistency.worker.recorder import Skip


def run(context: Context) -> None:
    """Record each quantized weight as the device dequantizes it, and the settings that its file states."""
    layers = list(quantized_layers(context.base.model))
    for done, (name, layer) in enumerate(layers):
        if context.record.wants("base", name):
            context.events.step(f"{name}, dequantized", done, len(layers))
            _record_settings(context, name, layer)
            with context.record.skipping("base", DEQUANTIZED, layer=name, rule=Rule.BOUND):
                _record_dequantized(context, name, layer)
    for name, layer in layers:
        if stated_settings(layer.weight):
            if context.record.wants("base", name):
                _record_after_a_pass(context, name, layer)
            break


_NOT_DEQUANTIZED = (NotImplementedError, RuntimeError, TypeError, ValueError)
"""Errors that a library raises for a kind of weight that it does not dequantize."""


def _record_after_a_pass(context: Context, name: str, layer: Any) -> None:
    """Record whether a 4-bit layer dequantizes to the same after a pass, and leave it as it was.

    One layer is tried for all: they have the same kernels. Every other pass of this tool ends with the weights as they
    were loaded (`as_loaded`).
    """
    before = dequantized(layer).to("cpu", torch.float32)
    attributes = dict(vars(layer))  # a first pass fixes the dtype that it computes in
    with torch.no_grad(), as_loaded(layer):
        try:
            with model_code(layer):
                layer(torch.zeros(1, before.shape[1], dtype=before.dtype, device=context.device))
        except Skip:  # kernels that refuse a shape: the stage `forward` states it
            vars(layer).update(attributes)
            return
        packing = str(layer.weight.quant_state.__dict__.get("packing_format_for_cpu", False))
        try:
            with model_code(context.device, kinds=_NOT_DEQUANTIZED):
                after = dequantized(layer).to("cpu", torch.float32)
            is_same, problem = torch.equal(after, before), ""
            if not is_same:
                error, largest = float((after - before).abs().max()), float(before.abs().max())
                problem = f"off by up to {error:.3g}, where the largest is {largest:.3g}"
        except Skip as refused:
            is_same, problem = False, str(refused)
    vars(layer).update(attributes)
    evidence = {} if is_same else {"read": problem, "how": f"packed for the CPU: {packing}"}
    context.record.fact("base", name, AFTER_A_PASS, status="equal" if is_same else "within", evidence=evidence)


def _record_dequantized(context: Context, name: str, layer: Any) -> None:
    """Record a weight as the device dequantizes it, by the bound of the formula on the file's bytes.

    A kind of weight without a formula is compared with other workers alone.
    """
    weight = from_file(context.base, name, layer)
    prefix = "this kind of weight is not dequantized: "
    with model_code(context.device, prefix, kinds=_NOT_DEQUANTIZED), torch.no_grad():
        actual = dequantized(layer)
    if weight is None or tuple(actual.shape) != weight.shape:
        reason = f"no formula for {type(layer.weight).__name__}: its stored bytes alone are compared with the file"
        row = TensorRecord("base", name, DEQUANTIZED, rule=Rule.PEER, status="measured", reason=reason)
        context.record.computed(row, actual)
        return
    host = actual.to("cpu")
    expected = weight.rounded().to(host.dtype).to(torch.float64)
    allowed = weight.dequantized_allowance(expected)
    context.record.computed(
        TensorRecord("base", name, DEQUANTIZED, rule=Rule.BOUND, status="measured"),
        actual,
        measure=measure_against_exact(host, expected, allowed),
        chunks=lambda: exact_chunks(host, expected, allowed),
        ingredients={"exact": expected},
    )


def from_file(base: LoadedBase, name: str, layer: Any) -> QuantizedWeight | None:
    """Return a layer's weight by the bytes in the file, on the CPU; its shape and blocks are those in the model.

    What no file holds is taken from the model: tables and zero points of a model that was quantized while loading.
    """
    held = weight_of_layer(layer)
    if held is None:
        return None
    names = {start_of(tensor): stored for stored, _, tensor in stored_names(f"{name}.weight", layer.weight)}
    parts_in_file = {}
    for part, tensor in held.parts.items():
        stored = names.get(start_of(tensor))
        if stored is None or stored not in base.tensors:
            continue
        expected = base.expected(stored)
        if expected is not None:
            parts_in_file[part] = expected
    settings = _settings_in_file(base, name)
    # the file states this one as a number among the settings, not as a tensor
    if "nested_offset" in settings and "offset" in held.parts:
        parts_in_file["offset"] = torch.tensor(float(settings["nested_offset"]), dtype=torch.float32)
    return held.on_cpu().of(parts_in_file)


def _record_settings(context: Context, name: str, layer: Any) -> None:
    """Record whether a 4-bit weight has the settings of its file: block size, kind, shape, offset of the scales."""
    in_file, in_model = _settings_in_file(context.base, name), stated_settings(layer.weight)
    if not in_file or not in_model:
        return
    wrong = {}
    for key in sorted(in_file.keys() & in_model.keys()):  # another version may state more
        if in_model[key] != in_file[key]:
            wrong[key] = f"got {in_model[key]}, wanted {in_file[key]}"
    evidence = wrong or {key: str(value) for key, value in in_file.items()}
    context.record.fact(
        "base",
        name,
        SETTINGS,
        status="outside" if wrong else "equal",
        word=words.DIFFERS if wrong else None,
        evidence=evidence,
    )


def _settings_in_file(base: LoadedBase, name: str) -> dict[str, Any]:
    """Return the settings of a 4-bit weight that its file states; empty where it has none."""
    files = base.files
    if files is None:
        return {}
    for kind in ("nf4", "fp4"):
        key = f"{name}.weight{STATE}{kind}"
        if files.has(key):
            return settings_in(files.read(key))
    return {}
