"""Choose the script that shows a finding, the tensors that it takes, and its parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from consistency.capture.names import CALLS, CUT, DEVICE, HOST, LIMITS, NOT_RECOMPUTED, split_pair
from consistency.case import standard
from consistency.case.load_path import LoadPath
from consistency.devices.spec import parse_device
from consistency.errors import CaptureError, first_line
from consistency.extras.diagnosis.reproduce.evidence import Evidence
from consistency.numerics.rules import judge_relative
from consistency.text import one_line

if TYPE_CHECKING:
    import torch


CALLS_FILE = "calls.txt"

_MOST_CALLS_BYTES = 2**20

_MOST_INPUT_BYTES = 2**30
"""Most bytes that the calls of a capture may take: it may be a stranger's."""

PROVES = {
    "merged.py": "torch alone merges this rightly, so PEFT, the model's code or the loading is at fault",
    "moved.py": "plain copies are right, so what loads, keeps or casts these bytes is at fault",
    "calls.py": "the recorded operations are right, so what happens between them is at fault",
}
"""Conclusions for scripts that find nothing on the device of the finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The contents of the folder: script, tensors, and the script's parameters."""

    script: str
    tensors: Mapping[str, torch.Tensor]
    window: str  # which part of the whole the tensors are, in words
    facts: Mapping[str, Any]  # parameters of the script
    texts: Mapping[str, str] = field(default_factory=dict)  # further files, by name
    why_not: str = ""  # why the script does not compute it again, where the device has tried

    @property
    def computes(self) -> bool:
        """Return whether the script repeats what the device did; otherwise it checks what the device recorded."""
        return self.script != "recorded.py"

    @property
    def script_name(self) -> str:
        """Return the name of the script in the folder."""
        return "reproduce.py" if self.computes else "check_recorded.py"


def parts_of(evidence: Evidence) -> Parts:
    """Return the contents of the folder of a finding; raise a `CaptureError` where no stored tensor shows it.

    The first script that fits is taken: a merge, a copy, recorded calls, and last a check of the recorded tensor.
    """
    record = evidence.record
    actual, expected = evidence.stored(record.blob), evidence.stored(record.reference_blob)
    worst = None if record.measure is None else record.measure.worst_index
    stored = {name: evidence.stored(blob) for name, blob in record.ingredients.items()}
    ingredients = {name: tensor for name, tensor in stored.items() if tensor is not None}
    has_all = ingredients.keys() == stored.keys()
    recipe = record.evidence.get("recipe")
    is_merge = isinstance(recipe, dict) and has_all and {"left", "right"} <= ingredients.keys()
    if is_merge and actual is not None:
        return _merge_parts(ingredients, actual, worst, recipe)
    if expected is not None and record.rule == "bitwise":
        return _copy_parts(evidence, actual, expected, worst)
    if record.stage == standard.TRANSFER:
        return Parts(script="moved.py", tensors={"expected": _payload()}, window="generated", facts=_hop(evidence))
    why_not = str(record.evidence.get(NOT_RECOMPUTED, ""))
    if CALLS in record.ingredients and has_all and actual is not None and expected is not None:
        try:
            return _of_calls(ingredients, actual, expected, worst, _limits(record.evidence.get(LIMITS)))
        except (ValueError, KeyError, TypeError, RuntimeError) as error:  # somebody has changed them
            why_not = f"its calls cannot be read: {first_line(error)}"
    if expected is not None and actual is not None and record.measure is not None:
        tensors = {"expected": expected, "actual": actual}
        if "allowed" in ingredients:
            tensors["allowed"] = ingredients["allowed"]
        return _recorded_parts(evidence, tensors, worst, why_not)
    hint = evidence.finding.next or "run the case again on this machine"
    if record.rule == "limit":
        hint = f"it concerns a fact, not a tensor: {hint}"
    raise CaptureError(
        "no stored tensor shows this finding", where=evidence.name, got=evidence.finding.message, hint=hint
    )


def _merge_parts(
    ingredients: Mapping[str, torch.Tensor], actual: torch.Tensor, worst: Sequence[int] | None, recipe: Any
) -> Parts:
    """Return a merge that torch alone does again, by the recipe that the capture has."""
    from consistency.extras.diagnosis.reproduce.cut import cut_product

    tensors, window = cut_product({**ingredients, "actual": actual}, worst)
    return Parts(script="merged.py", tensors=tensors, window=window, facts=recipe)


def _copy_parts(
    evidence: Evidence, actual: torch.Tensor | None, expected: torch.Tensor, worst: Sequence[int] | None
) -> Parts:
    """Return a copy that torch alone does again."""
    from consistency.extras.diagnosis.reproduce.cut import cut_moved

    whole = {"expected": expected}
    # a different shape or dtype is described in words, and cannot be compared
    if actual is not None and (actual.shape, actual.dtype) == (expected.shape, expected.dtype):
        whole["actual"] = actual
    tensors, window = cut_moved(whole, worst)
    hop = _hop(evidence) if evidence.record.stage == standard.TRANSFER else {"via": _via(evidence)}
    return Parts(script="moved.py", tensors=tensors, window=window, facts=hop)


def _recorded_parts(
    evidence: Evidence, whole: Mapping[str, torch.Tensor], worst: Sequence[int] | None, why_not: str
) -> Parts:
    """Return a check of the tensors as they were recorded."""
    from consistency.extras.diagnosis.reproduce.cut import cut_moved

    tensors, window = cut_moved(whole, worst)
    facts = {"allowed": _allowed(evidence)}
    return Parts(script="recorded.py", tensors=tensors, window=window, facts=facts, why_not=why_not)


def _of_calls(
    ingredients: Mapping[str, torch.Tensor],
    actual: torch.Tensor,
    expected: torch.Tensor,
    worst: Sequence[int] | None,
    limits: dict[str, float] | None,
) -> Parts:
    """Return the calls that made a wrong result, and their inputs; raise a `ValueError` where they are none."""
    import numpy as np

    from consistency.extras.diagnosis.reproduce.cut import MOST_BYTES, cut_results
    from consistency.numerics import aten_calls

    listed = ingredients[CALLS]
    if listed.numel() > _MOST_CALLS_BYTES:
        raise ValueError(f"{listed.numel()} characters of calls")
    # a terminal obeys what a stranger's names may have in them
    lines = bytes(listed.tolist()).decode("utf-8").splitlines()
    text = "".join(f"{one_line(line)}\n" for line in lines)
    inputs = {}
    for name, tensor in ingredients.items():
        if name.isidentifier() and name.startswith(("in", "host")):
            inputs[name] = tensor
    calls, _ = aten_calls.read_calls(text, inputs)
    results = {"actual": actual, "expected": expected, "allowed": ingredients["allowed"]}
    # the capture may have cut the calls of a module to the one that is off, whose results are stored beside
    is_cut = f"{CUT}actual" in ingredients
    if is_cut:
        results = {name: ingredients[f"{CUT}{name}"] for name in results}
        _, number, _ = aten_calls.largest_ratio(results["actual"], results["expected"], results["allowed"])
        worst = [int(index) for index in np.unravel_index(number, results["actual"].shape)]
    input_bytes = sum(tensor.nbytes for tensor in inputs.values())
    if input_bytes > _MOST_INPUT_BYTES:
        raise ValueError(f"they take {input_bytes} bytes")
    if input_bytes > MOST_BYTES:  # nothing that is cut makes a folder small that holds the weights of a block
        results_in_room, start = {name: tensor.contiguous() for name, tensor in results.items()}, None
    else:
        results_in_room, start = cut_results(results, worst, input_bytes - 2**20)
    made_by = f"made by {calls[-1].operation} alone" if is_cut else "made by its module"
    window = "whole"
    if start is not None:
        window = f"elements {start} to {start + results_in_room['actual'].numel()}"
    # limits are for figures of a whole result of the module
    has_limits = not is_cut and start is None
    return Parts(
        script="calls.py",
        tensors={**inputs, **results_in_room},
        window=f"{made_by}: {window} of shape {tuple(results['actual'].shape)}",
        facts={"start": start or 0, "limits": limits if has_limits else None},
        texts={CALLS_FILE: text, "aten_calls.py": Path(aten_calls.__file__).read_text(encoding="utf-8")},
    )


def _limits(stated: Any) -> dict[str, float] | None:
    """Return the limits of the figures of a result, as recorded in the capture; None where one is missing."""
    if not isinstance(stated, dict):
        return None
    limits: dict[str, float] = {}
    for name in ("row", "element", "scale"):
        limit = stated.get(name)
        if not isinstance(limit, int | float) or not limit > 0:
            return None
        limits[name] = float(limit)
    return {**limits, "by_columns": bool(stated.get("by_columns"))}


def device_of(evidence: Evidence) -> str:
    """Return the device of the finding, without its variant; of an inference engine, its name."""
    info = evidence.worker.info
    if info.engine is not None:
        return info.name
    # a rank of a training is not named after its device
    name = str(info.environment.get(DEVICE, info.name))
    return dataclasses.replace(parse_device(name), variant=None).name


def load_arguments(evidence: Evidence) -> dict[str, Any]:
    """Return the arguments with which PEFT takes the load path of the finding."""
    load_path = _load_path(evidence)
    if load_path is None or load_path.by_transformers:
        return {}
    arguments: dict[str, Any] = {}
    if load_path.low_memory:
        arguments["low_cpu_mem_usage"] = True
    if load_path.torch_device is not None:
        arguments["torch_device"] = "cpu" if load_path.torch_device == "cpu" else device_of(evidence)
    return arguments


def _payload() -> torch.Tensor:
    """Return 4 MiB to copy: finite values without a pattern, the same on every machine."""
    import numpy as np
    import torch

    numbers = np.random.Generator(np.random.PCG64(0)).standard_normal(1 << 20, dtype=np.float32)
    return torch.from_numpy(numbers)


def _hop(evidence: Evidence) -> dict[str, Any]:
    """Return the two ends of a copy: what the script calls `via`, and the destination device."""
    pair = split_pair(evidence.record.layer)
    source, destination = pair if pair is not None else (HOST, device_of(evidence))
    return {"via": None if source == HOST else source, "device": destination}


def _allowed(evidence: Evidence) -> float:
    """Return the tolerance of an element, as recorded in the capture."""
    record = evidence.record
    stated = record.evidence.get("allowed")
    if isinstance(stated, (int, float)):
        return float(stated)
    assert record.measure is not None
    # a tensor of the `relative` rule has no ratio of its own: its tolerance follows from what rounding makes
    if record.measure.ratio is None and record.rounding is not None:
        return judge_relative(record.measure, record.dtype, record.rounding).allowed
    ratio = float(record.measure.ratio or 0)
    return float(record.measure.max_abs) / ratio if ratio > 0 else 0.0


def _via(evidence: Evidence) -> str | None:
    """Return the device through which PEFT's default loading goes if all devices were visible."""
    device_type, _, index = device_of(evidence).partition(":")
    load_path = _load_path(evidence)
    takes_first_device = load_path is not None and load_path.main is LoadPath.SHARED and load_path.chooses_device
    is_first_device = index in ("", "0")
    if evidence.record.stage != "adapter" or not takes_first_device or is_first_device:
        return None
    return f"{device_type}:0"


def _load_path(evidence: Evidence) -> LoadPath | None:
    """Return the worker's load path; None for one that this version does not know."""
    name = evidence.worker.load_path
    return LoadPath(name) if name in list(LoadPath) else None
