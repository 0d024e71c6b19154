"""Stage `base`: every parameter and buffer of the base, before and after the adapter is loaded.

Bytes were only moved, so nothing may differ from the file, read on the CPU and cast once to the dtype in the model.
Tensors that no file holds have another reference: a table that the model computes when it is built (rotary frequencies)
is compared with the same computation in float64, and may be off by what the model's own class is, run on the CPU;
everything else with the reference worker.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
from consistency.numerics.rules import RoundingError, Rule, judge_relative
from consistency.numerics.words import Word
from consistency.worker.context import Context
from consistency.worker.judging import quantized_base


def run(context: Context) -> None:
    """Record every tensor of the base, and note the digests of all."""
    base, record = context.base, context.record
    tables = _tables(base.model)
    parameters = {name for name, _ in base.model.named_parameters()}  # a buffer may hold infinities, as masks do
    wanted = {name for name in base.tensors if record.wants("base", split_name(name)[0])}
    for done, (name, tensor) in enumerate(base.on_device(wanted)):
        context.events.step(name, done, len(wanted))
        actual_digest, digest_in_file = base.digest_of(name, tensor), base.in_file.get(name)
        # of a base that stayed loaded, a tensor with the digest of its file is not read once more
        expected = tensor if actual_digest == digest_in_file else base.expected(name)
        if expected is None:
            _record_computed(context, name, tensor, actual_digest, tables.get(name))
        else:
            base.in_file[name] = digest_in_file or digest(expected)
            if context.job.makes_reference and name in parameters and name not in base.not_finite:
                base.not_finite[name] = count_not_finite(expected.to("cpu"))
            _record_moved(context, name, tensor, expected, actual_digest)
    quantized_base.run(context)


def _record_moved(
    context: Context, name: str, tensor: torch.Tensor, expected: torch.Tensor, actual_digest: TensorDigest
) -> None:
    """Record a tensor whose bytes were moved from a file, or which has values made from its name."""
    base = context.base
    layer, part = split_name(name)
    key = base.file_names.get(name, name)
    name_in_file = "" if key == name else key
    row = TensorRecord(
        "base",
        layer,
        part,
        rule=Rule.BITWISE,
        status="equal",
        evidence=_evidence(context, name, "values made from its name"),
        name_in_file=name_in_file,
        not_finite=base.not_finite.get(name, 0),
    )
    context.record.moved(row, actual=tensor, expected=expected, digests=(actual_digest, base.in_file[name]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """A table that a model computes when it is built, made once more on the CPU from the config alone.

    Attributes
    ----------
    exact : torch.Tensor
        In float64.
    made : torch.Tensor
        By the model's own class, in the dtype that it has for the dtype of the model.
    """

    exact: torch.Tensor
    made: torch.Tensor


def _record_computed(
    context: Context, name: str, tensor: torch.Tensor, actual_digest: TensorDigest, table: _Table | None
) -> None:
    """Record a tensor that no file holds, against its table in float64 where there is one.

    The error that is allowed is that of the table that the class makes on the CPU, in the dtype that it makes it in: a
    table that was cast with the rest of a model is wrong on every worker alike.
    """
    layer, part = split_name(name)
    evidence = _evidence(context, name, "initialised by transformers")
    host = tensor.detach().to("cpu")
    measure, rounding, word, dtype = None, None, None, ""
    if table is not None and tensor.dtype in UNIT_ROUNDOFF and table.exact.shape == tensor.shape:
        measure = measure_against_exact(host, table.exact)
        rounding = _rounding_error_of_table(measure_against_exact(table.made, table.exact))
        dtype = name_of(table.made.dtype)
        if judge_relative(measure, dtype, rounding).status == "outside":
            word = _word_of_table(host, table.made)
            evidence["table"] = f"{name_of(tensor.dtype)} here, {dtype} where its class makes it"
    is_buffer = name not in context.base.persistent
    if is_buffer:
        evidence["buffer"] = "not in the state dict"
    row = TensorRecord(
        "base",
        layer,
        part,
        rule=Rule.RELATIVE,
        status="measured",
        dtype=dtype,
        word=word,
        rounding=rounding,
        blob=context.record.keep_small(tensor),
        buffer=is_buffer,
        evidence=evidence,
    )
    context.record.computed(row, host, digests=[actual_digest], measure=measure)


def _word_of_table(actual: torch.Tensor, made: torch.Tensor) -> Word | None:
    """Return the half type through which a table was rounded; None of any other difference."""
    for word, dtype in ((words.ROUNDED_TO_BF16, torch.bfloat16), (words.ROUNDED_TO_FP16, torch.float16)):
        if torch.equal(actual.to(torch.float64), made.to(dtype).to(torch.float64)):
            return word
    return None


def _evidence(context: Context, name: str, origin: str) -> dict[str, str]:
    """Return the origin of a tensor that is missing in the files of the base; empty for others."""
    return {"not_in_file": f"no file holds it: {origin}"} if name in context.base.not_in_file else {}


def _rounding_error_of_table(measure: Measure) -> RoundingError:
    """Return the error of a table on the CPU: its elements are computed one by one, so each has its own error."""
    elements = max(1, measure.elements)
    return RoundingError(largest=measure.max_abs, samples=elements, drawn=elements)


def look_again(context: Context, changed: Mapping[str, TensorDigest]) -> None:
    """Record the tensors of the base that loading the adapter has changed, with their digests.

    Some methods rewrite base weights on loading (PiSSA, OLoRA): those are compared with the reference worker's. All
    others have the bytes from before, which were compared with the file.
    """
    base, record = context.base, context.record
    for name, tensor in base.on_device(changed):
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
        record.computed(row, tensor, digests=[changed[name]])


def _tables(model: torch.nn.Module) -> dict[str, _Table]:
    """Return the tables of modules that hold nothing else, made once more on the CPU, by name.

    transformers' rotary embeddings are such modules: made from the config alone, their buffers in no state dict.
    """
    tables: dict[str, _Table] = {}
    dtype = next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), torch.float32)
    for name, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        config = getattr(module, "config", None)
        # a module with parameters holds weights too: it is no table
        if not buffers or config is None or next(module.parameters(), None) is not None:
            continue
        if "config" not in inspect.signature(type(module).__init__).parameters:
            continue
        try:
            exact = in_float64(type(module), config=config)
            made = _made(type(module), config, dtype)
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError):
            continue  # it needs more than its config: the reference worker is the reference
        made_tables = dict(made.named_buffers(recurse=False))
        for part, table in exact.named_buffers(recurse=False):
            if table.dtype == torch.float64 and table.device.type == "cpu" and part in made_tables:
                path = f"{name}.{part}" if name else part
                tables[path] = _Table(exact=table, made=made_tables[part])
    return tables


def _made(kind: type[torch.nn.Module], config: Any, dtype: torch.dtype) -> torch.nn.Module:
    """Return a module as transformers makes it on the CPU for a model of a dtype."""
    from transformers.modeling_utils import local_torch_dtype

    with torch.no_grad(), torch.device("cpu"), local_torch_dtype(dtype):
        return kind(config=config)
