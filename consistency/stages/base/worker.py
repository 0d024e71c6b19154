"""Stage `base`: every parameter and buffer of the base, before and after the adapter is loaded.

Bytes were only moved, so nothing may differ from the file, read on the CPU and cast once to the dtype in the model.
Tensors that no file holds have another reference: a table that the model computes when it is built (rotary frequencies)
is compared with the same computation in float64; everything else with the reference worker.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch

from consistency.capture.names import split_name
from consistency.capture.records import TensorRecord
from consistency.numerics import words
from consistency.numerics.digest import TensorDigest, digest
from consistency.numerics.dtype import UNIT_ROUNDOFF, name_of
from consistency.numerics.error import measure_against_exact
from consistency.numerics.exact import in_float64
from consistency.numerics.measure import Measure
from consistency.numerics.not_finite import count_not_finite
from consistency.numerics.rules import RoundingError, Rule
from consistency.worker.context import Context
from consistency.worker.judging import quantized_base


def run(context: Context) -> None:
    """Record every tensor of the base, and note the digests of all."""
    base, record = context.base, context.record
    exact = _exact_tables(base.model)
    parameters = {name for name, _ in base.model.named_parameters()}  # a buffer may hold infinities, as masks do
    wanted = {name for name in base.tensors if record.wants("base", split_name(name)[0])}
    for done, (name, tensor) in enumerate(base.on_device(wanted)):
        layer, part = split_name(name)
        context.events.step(name, done, len(wanted))
        here, in_file = base.digest_of(name, tensor), base.in_file.get(name)
        # of a base that stayed loaded, a tensor with the digest of its file is not read once more
        expected = tensor if here == in_file else base.expected(name)
        evidence = {}
        if name in base.not_in_file:
            evidence["not_in_file"] = "no file holds it: " + (
                "values made from its name" if expected is not None else "initialised by transformers"
            )
        if expected is not None:
            base.in_file[name] = in_file or digest(expected)
            if context.job.makes_reference and name in parameters and name not in base.not_finite:
                base.not_finite[name] = count_not_finite(expected.to("cpu"))
            key = base.file_names.get(name, name)
            row = TensorRecord(
                "base",
                layer,
                part,
                rule=Rule.BITWISE,
                status="equal",
                evidence=evidence,
                name_in_file="" if key == name else key,
                not_finite=base.not_finite.get(name, 0),
            )
            record.moved(row, actual=tensor, expected=expected, digests=(here, base.in_file[name]))
            continue
        table = exact.get(name)
        computed = table is not None and tensor.dtype in UNIT_ROUNDOFF and table.shape == tensor.shape
        host = tensor.detach().to("cpu")
        measure = measure_against_exact(host, table) if computed and table is not None else None
        on_cpu, buffer = context.device.type == "cpu", name not in base.persistent
        row = TensorRecord(
            "base",
            layer,
            part,
            rule=Rule.RELATIVE,
            status="measured",
            rounding=_of_table(measure) if measure is not None and on_cpu else None,
            blob=record.keep_small(tensor),
            buffer=buffer,
            evidence=evidence | ({"buffer": "not in the state dict"} if buffer else {}),
        )
        record.computed(row, host, digests=[here], found=measure)
    quantized_base.run(context)


def _of_table(measure: Measure) -> RoundingError:
    """Return the error of a table on the CPU: its elements are computed one by one, so it has one of each."""
    elements = max(1, measure.elements)
    return RoundingError(largest=measure.max_abs, samples=elements, drawn=elements)


def look_again(context: Context, changed: Mapping[str, TensorDigest]) -> None:
    """Record the tensors of the base that loading the adapter has changed.

    Some methods rewrite base weights on loading (PiSSA, OLoRA): those are compared with the reference worker's. All
    others have the bytes from before, which were compared with the file.
    """
    base, record = context.base, context.record
    for name, tensor in base.on_device(changed):
        after = changed[name]
        layer, part = split_name(name)
        if not record.wants("base", layer):
            continue
        row = TensorRecord(
            "base",
            layer,
            f"{part}_after_adapter",
            rule=Rule.PEER,
            status="measured",
            word=words.RECOMPUTED,
            blob=record.keep_small(tensor),
            evidence={"before": base.digests[name].value, "dtype": name_of(tensor.dtype)},
        )
        record.computed(row, tensor, digests=[after])


def _exact_tables(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Build the modules that hold only computed tables again, in float64 on the CPU.

    transformers' rotary embeddings are such modules: made from the config alone, their buffers in no state dict.
    """
    tables: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        config = getattr(module, "config", None)
        if not buffers or config is None or next(module.parameters(), None) is not None:
            continue
        arguments = inspect.signature(type(module).__init__).parameters
        if "config" not in arguments:
            continue
        try:
            twin = in_float64(type(module), config=config)
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError):
            continue  # it needs more than its config: the reference worker is the reference
        for part, table in twin.named_buffers(recurse=False):
            if table.dtype == torch.float64 and table.device.type == "cpu":
                tables[f"{name}.{part}" if name else part] = table
    return tables
