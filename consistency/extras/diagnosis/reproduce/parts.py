"""Choose the script that shows a finding, the tensors that it takes, and its parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from consistency.capture.names import CALLS, CUT, HOST, LIMITS, NOT_RECOMPUTED, split_pair
from consistency.case import standard
from consistency.case.load_path import LoadPath
from consistency.devices.spec import parse_device
from consistency.errors import CaptureError, first_line
from consistency.extras.diagnosis.reproduce.evidence import Evidence
from consistency.text import one_line

if TYPE_CHECKING:
    import torch


CALLS_FILE = "calls.txt"

PROVES = {
    "merged.py": "torch alone merges this rightly, so PEFT, the model's code or the loading is at fault",
    "moved.py": "plain copies are right, so what loads, keeps or casts these bytes is at fault",
    "calls.py": "the recorded operations are right, so what happens between them is at fault",
}
"""What it proves, on the device of the finding, that a script finds nothing there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The contents of the folder: script, tensors, which part of the whole they are, and the script's parameters."""

    script: str
    tensors: Mapping[str, torch.Tensor]
    window: str
    facts: Mapping[str, Any]
    texts: Mapping[str, str] = field(default_factory=dict)  # further files, by name
    why_not: str = ""  # why the script does not compute it again, where the device has tried

    @property
    def computes(self) -> bool:
        """Return whether the script does again what the device did, or only checks what it recorded."""
        return self.script != "recorded.py"

    @property
    def script_name(self) -> str:
        """Return the name of the script in the folder."""
        return "reproduce.py" if self.computes else "check_recorded.py"


def parts_of(evidence: Evidence) -> Parts:
    """Return the contents of the folder of a finding; raise a `CaptureError` where no stored tensor shows it."""
    from consistency.extras.diagnosis.reproduce.cut import cut_moved, cut_product

    record = evidence.record
    actual, expected = evidence.stored(record.blob), evidence.stored(record.reference_blob)
    worst = None if record.measure is None else record.measure.worst_index
    recipe = record.evidence.get("recipe")
    stored = {name: evidence.stored(blob) for name, blob in record.ingredients.items()}
    made_of = {name: tensor for name, tensor in stored.items() if tensor is not None}
    complete = {"left", "right"} <= made_of.keys() == stored.keys()
    if isinstance(recipe, dict) and actual is not None and complete:
        tensors, window = cut_product({**made_of, "actual": actual}, worst)
        return Parts(script="merged.py", tensors=tensors, window=window, facts=recipe)
    if expected is not None and record.rule == "bitwise":
        whole = {"expected": expected}
        # a different shape or dtype is described in words, and cannot be compared
        if actual is not None and (actual.shape, actual.dtype) == (expected.shape, expected.dtype):
            whole["actual"] = actual
        tensors, window = cut_moved(whole, worst)
        hop = _hop(evidence) if record.stage == standard.TRANSFER else {"via": _via(evidence)}
        return Parts(script="moved.py", tensors=tensors, window=window, facts=hop)
    if record.stage == standard.TRANSFER:
        return Parts(script="moved.py", tensors={"expected": _payload()}, window="generated", facts=_hop(evidence))
    why_not = str(record.evidence.get(NOT_RECOMPUTED, ""))
    if CALLS in record.ingredients and made_of.keys() == stored.keys() and actual is not None and expected is not None:
        try:
            return _of_calls(made_of, actual, expected, worst, _limits(record.evidence.get(LIMITS)))
        except (ValueError, KeyError, TypeError, RuntimeError) as error:  # somebody has changed them
            why_not = f"its calls cannot be read: {first_line(error)}"
    if expected is not None and actual is not None and record.measure is not None:
        allowed = {name: tensor for name, tensor in made_of.items() if name == "allowed"}
        tensors, window = cut_moved({"expected": expected, "actual": actual, **allowed}, worst)
        return Parts(
            script="recorded.py", tensors=tensors, window=window, facts={"allowed": _allowed(evidence)}, why_not=why_not
        )
    raise CaptureError(
        "no stored tensor shows this finding",
        where=evidence.name,
        got=evidence.finding.message,
        hint=("it concerns a fact, not a tensor: " if record.rule == "limit" else "")
        + (evidence.finding.next or "run the case again on this machine"),
    )


def _of_calls(
    made_of: Mapping[str, torch.Tensor],
    actual: torch.Tensor,
    expected: torch.Tensor,
    worst: Sequence[int] | None,
    limits: dict[str, float] | None,
) -> Parts:
    """Return the calls that made a wrong result, and what they take; raise a `ValueError` where they are none."""
    import numpy as np

    from consistency.extras.diagnosis.reproduce.cut import MOST_BYTES, cut_results
    from consistency.numerics import aten_calls

    listed = made_of[CALLS]
    if listed.numel() > 2**20:
        raise ValueError(f"{listed.numel()} characters of calls")
    # a terminal obeys what a stranger's names may have in them
    text = "".join(f"{one_line(line)}\n" for line in bytes(listed.tolist()).decode("utf-8").splitlines())
    inputs = {name: one for name, one in made_of.items() if name.isidentifier() and name.startswith(("in", "host"))}
    calls, _ = aten_calls.read_calls(text, inputs)
    results = {"actual": actual, "expected": expected, "allowed": made_of["allowed"]}
    is_cut = f"{CUT}actual" in made_of
    if is_cut:
        results = {name: made_of[f"{CUT}{name}"] for name in results}
        _, number, _ = aten_calls.largest_share(results["actual"], results["expected"], results["allowed"])
        worst = [int(i) for i in np.unravel_index(number, results["actual"].shape)]
    size = sum(one.nbytes for one in inputs.values())
    if size > MOST_BYTES:
        raise ValueError(f"they take {size} bytes")
    kept, start = cut_results(results, worst, size - 2**20)
    what = f"made by {calls[-1].operation} alone" if is_cut else "made by its module"
    window = "whole" if start is None else f"elements {start} to {start + kept['actual'].numel()}"
    return Parts(
        script="calls.py",
        tensors={**inputs, **kept},
        window=f"{what}: {window} of shape {tuple(results['actual'].shape)}",
        facts={"start": start or 0, "limits": None if is_cut or start is not None else limits},
        texts={CALLS_FILE: text, "aten_calls.py": Path(aten_calls.__file__).read_text(encoding="utf-8")},
    )


def _limits(stated: Any) -> dict[str, float] | None:
    """Return the limits of the figures of a result, as recorded in the capture."""
    if not isinstance(stated, dict):
        return None
    found = {name: stated.get(name) for name in ("row", "element", "scale")}
    known = {name: float(one) for name, one in found.items() if isinstance(one, int | float) and one > 0}
    return {**known, "by_columns": bool(stated.get("by_columns"))} if len(known) == len(found) else None


def device_of(evidence: Evidence) -> str:
    """Return the device of the finding, without its variant."""
    return dataclasses.replace(parse_device(evidence.participant.info.name), variant=None).name


def load_arguments(evidence: Evidence) -> dict[str, Any]:
    """Return the arguments with which PEFT takes the load path of the finding."""
    load_path = _load_path(evidence)
    if load_path is None or load_path.by_transformers:
        return {}
    found: dict[str, Any] = {"low_cpu_mem_usage": True} if load_path.low_memory else {}
    if load_path.torch_device is not None:
        found["torch_device"] = "cpu" if load_path.torch_device == "cpu" else device_of(evidence)
    return found


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
    ratio = float(record.measure.ratio or 0)
    return float(record.measure.max_abs) / ratio if ratio > 0 else 0.0


def _via(evidence: Evidence) -> str | None:
    """Return the device through which PEFT's default loading goes if all devices were visible."""
    device = device_of(evidence)
    kind, _, index = device.partition(":")
    load_path = _load_path(evidence)
    hops = load_path is not None and load_path.main is LoadPath.SHARED and load_path.chooses_device
    return f"{kind}:0" if evidence.record.stage == "adapter" and hops and index not in ("", "0") else None


def _load_path(evidence: Evidence) -> LoadPath | None:
    """Return the worker's load path; None for one that this version does not know."""
    name = evidence.participant.load_path
    return LoadPath(name) if name in list(LoadPath) else None
