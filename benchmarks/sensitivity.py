"""Find the smallest planted error that each stage sees, and print the table of `docs/sensitivity.md`.

    python -m benchmarks.sensitivity             # the table
    python -m benchmarks.sensitivity --write     # the same, into docs/sensitivity.md
    python -m benchmarks.sensitivity --trained DIR/smollm2 --write    # the table of a trained model

Run from the root of the repository. A worker's session runs on the model in this process; where it judges a
tensor, the same code judges that tensor once more with an error planted in it.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.generated_parts import show
from consistency.capture.records import TensorRecord, WorkerInfo
from consistency.case import standard
from consistency.case.options import Dtype, Options
from consistency.case.preflight import prepare_case
from consistency.case.stage import Stage
from consistency.case.stages import SPECS
from consistency.comparison import judge as rules
from consistency.comparison.records import Records
from consistency.comparison.workers import ComparedWorker
from consistency.devices.discovery import cpu_info
from consistency.numerics.digest import digest
from consistency.numerics.dtype import name_of
from consistency.numerics.file_tensor import mapped
from consistency.stages.forward import worker as forward
from consistency.stages.gradient import worker as gradient
from consistency.stages.merged import worker as merged
from consistency.stages.operators import worker as operators
from consistency.worker import session
from consistency.worker.protocol import EventLog, Job
from consistency.worker.recorder import Recorder

PAGE = Path(__file__).parents[1] / "docs" / "sensitivity.md"
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16", "float16")
STAGES = (standard.OPERATORS, standard.BASE, standard.ADAPTER, standard.MERGED, standard.FORWARD, standard.GRADIENT)

LARGEST, SMALLEST = 20, -30
"""Exponents of ε that are tried. What is not found at a factor of a million is called never; 2⁻³⁰ is less than half a
unit in the last place of float32, so nothing changes any more."""

ONE = "model.layers.0.self_attn.q_proj"
LOOKED_AT = {
    ("operators", "matmul"): "product of two matrices",
    ("base", ONE): "weight in the base",
    ("adapter", ONE): "lora_B",
    ("merged", ONE): "merged weight",
    ("forward", "logits"): "logits, adapter on",
    ("gradient", ONE): "gradient of lora_B",
}
"""One tensor of each stage, by stage and layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Smallest exponent of ε that each comparer finds, None for never, by what the error is planted in."""

    stage: str
    dtype: Dtype
    what: str
    by: dict[str, dict[str, int | None]]


class Answers(Recorder):
    """A recorder that keeps what is written, and writes and stores nothing."""

    def __init__(self) -> None:
        self.said: list[TensorRecord] = []
        self._keep = False
        self._tolerance = ()
        self._only = ()
        self._trace = None

    def write(self, record: TensorRecord) -> None:
        self.said.append(record)

    def keep(self, _tensor: torch.Tensor) -> str:
        return ""


def status_of(record: TensorRecord, healthy: TensorRecord) -> str:
    """Return the status that a comparison gives a worker's record beside the healthy one of the reference worker."""
    workers = []
    for name, one in (("cpu", healthy), ("cpu@baseline", record)):
        info = WorkerInfo(name=name, load_path="isolated", architecture="x86-64", model="chip", status="ok")
        capture: Any = None  # a rule reads the worker and its record
        workers.append(ComparedWorker(label=name, capture=capture, info=info, records=Records.of([one])))
    reference, subject = workers
    return rules.judge(subject, reference, record.key).status


def of_the_middle(tensor: torch.Tensor) -> dict[str, Any]:
    """Return where errors are planted: the element, and the row, of median magnitude, and everything."""
    flat = tensor.detach().reshape(-1).abs().double()
    element = int(flat.argsort()[flat.numel() // 2])
    rows = tensor.detach().reshape(-1, tensor.shape[-1]).double().norm(dim=1)
    return {"element": element, "row": int(rows.argsort()[rows.numel() // 2]), "tensor": None}


def planted(tensor: torch.Tensor, where: str, place: Any, epsilon: float) -> torch.Tensor:
    """Return a copy in which one element, one row or the whole is 1 + ε times as large, rounded to its dtype."""
    exact = tensor.detach().double().clone()
    part = {"element": exact.reshape(-1), "row": exact.reshape(-1, exact.shape[-1]), "tensor": exact}[where]
    if where == "tensor":
        part *= 1 + epsilon
    else:
        part[place] *= 1 + epsilon
    return exact.to(tensor.dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    try:
        torch.testing.assert_close(actual, expected)
    except AssertionError:
        return True
    return False


def allclose(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return not np.allclose(actual.double().numpy(), expected.double().numpy())


def cosine(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    a, b = actual.reshape(-1).double(), expected.reshape(-1).double()
    return not float(torch.nn.functional.cosine_similarity(a, b, dim=0)) >= 0.999


OTHERS: dict[str, Callable[[torch.Tensor, torch.Tensor], bool]] = {
    "assert_close": assert_close, "np.allclose": allclose, "cosine 0.999": cosine,
}  # fmt: skip


def smallest(finds: Callable[[float], bool]) -> int | None:
    """Return the smallest exponent from which on every larger ε is found, by bisection; None for never.

    Rounding makes whether an ε is found no monotone function near the end: the exponent is then moved up to one from
    which on the next three are found too.
    """
    if not finds(2.0**LARGEST):
        return None
    low, high = SMALLEST - 1, LARGEST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if finds(2.0**middle) else (middle, high)
    while not all(finds(2.0**exponent) for exponent in range(high, min(high + 3, LARGEST) + 1)):
        high += 1
    return high


Record = Callable[[torch.Tensor, Answers], None]
"""Has a stage record a tensor."""


@dataclass(slots=True)
class Probe:
    """What a session meets, judged again with errors planted; `dtype` is that of the base."""

    dtype: Dtype
    found: list[Found] = field(default_factory=list)

    def look(self, stage: str, what: str, tensor: torch.Tensor, record: Record) -> None:
        """Find the smallest error in a tensor that makes its row `outside`."""
        tensor = tensor.detach().cpu().clone()

        def recorded(actual: torch.Tensor) -> TensorRecord:
            answers = Answers()
            record(actual, answers)
            (said,) = answers.said
            return said

        healthy = recorded(tensor)
        status = status_of(healthy, healthy)
        assert status != "outside", f"{stage}: the healthy tensor is outside"
        by: dict[str, dict[str, int | None]] = {}
        for where, place in of_the_middle(tensor).items():

            def ours(epsilon: float, where: str = where, place: Any = place) -> bool:
                return status_of(recorded(planted(tensor, where, place, epsilon)), healthy) == "outside"

            by.setdefault("consistency", {})[where] = smallest(ours)
            for name, finds in OTHERS.items():

                def other(epsilon: float, where: str = where, place: Any = place, finds: Any = finds) -> bool:
                    return bool(finds(planted(tensor, where, place, epsilon), tensor))

                by.setdefault(name, {})[where] = smallest(other)
        own = name_of(tensor.dtype)
        what += "" if own == self.dtype else f" ({own})"
        what += ", skipped" if status == "skipped" else ""
        self.found.append(Found(stage=stage, dtype=self.dtype, what=what, by=by))

    def moved(self, real: Callable[..., None]) -> Callable[..., None]:
        def record(recorder: Recorder, row: TensorRecord, **given: Any) -> None:
            real(recorder, row, **given)
            wanted = {"base": "weight", "adapter": "lora_B"}.get(row.stage)
            if row.layer == ONE and row.tensor == wanted and not self._has(row.stage):

                def again(actual: torch.Tensor, answers: Answers) -> None:
                    real(answers, row, **{**given, "actual": actual, "digests": None})

                self.look(row.stage, LOOKED_AT[row.stage, row.layer], given["actual"], again)

        return record

    def merged(self, real: Callable[..., None]) -> Callable[..., None]:
        def record(context: Any, place: str, computed: Any, known: Any) -> None:
            for one in computed:
                if place == ONE and one.safe is False:

                    def again(actual: torch.Tensor, answers: Answers, one: Any = one) -> None:
                        changed = replace(one, actual=actual, digests=[digest(actual)])
                        real(replace(context, record=answers), place, [changed], {})

                    self.look("merged", LOOKED_AT["merged", ONE], one.actual, again)
            real(context, place, computed, known)

        return record

    def relative(self, real: Callable[..., None]) -> Callable[..., None]:
        def record(context: Any, row: TensorRecord, held: torch.Tensor, **given: Any) -> None:
            real(context, row, held, **given)
            wanted = (row.layer, row.tensor) in (("logits", "adapter_on"), (ONE, "lora_B.gradient"))
            if wanted and not self._has(row.stage):

                def again(actual: torch.Tensor, answers: Answers) -> None:
                    real(replace(context, record=answers), row, actual, **{**given, "digests": ()})

                self.look(row.stage, LOOKED_AT[row.stage, row.layer], mapped(held), again)

        return record

    def bounded(self, real: Callable[..., None]) -> Callable[..., None]:
        def record(recorder: Recorder, stage: str, layer: str, tensor: str, **given: Any) -> None:
            real(recorder, stage, layer, tensor, **given)
            if layer == "matmul" and name_of(given["actual"].dtype) == self.dtype and not self._has(stage):

                def again(actual: torch.Tensor, answers: Answers) -> None:
                    real(answers, stage, layer, tensor, **{**given, "actual": actual, "digests": [digest(actual)]})

                self.look(stage, LOOKED_AT[stage, layer], given["actual"], again)

        return record

    def _has(self, stage: str) -> bool:
        return any(one.stage == stage for one in self.found)


def measured(dtype: Dtype, stages: tuple[Stage, ...] = STAGES, trained: Path | None = None) -> list[Found]:
    """Run a session on the built-in model in one dtype, or on that of a folder, and return what its stages find."""
    of: dict[str, Any] = {"base": "builtin:llama"}
    if trained is not None:
        of = {name: str(trained / name) for name in ("base", "adapter")}
    case = prepare_case(Options(**of, dtype=dtype, stages=stages))
    probe = Probe(dtype=dtype)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        home = Path(scratch)
        for folder in ("worker", "blobs"):
            (home / folder).mkdir()
        job = Job(
            case=case, name="cpu", device="cpu", load_path="isolated", folder=str(home / "worker"),
            blobs=str(home / "blobs"), scratch=scratch, settings={}, makes_reference=True, threads=1,
            parent_pid=os.getpid(),
        )  # fmt: skip
        for place, name, wrap in (
            (Recorder, "moved", probe.moved), (merged, "judge", probe.merged),
            (forward, "record_block", probe.relative), (gradient, "record_block", probe.relative),
            (operators, "record_bounded", probe.bounded),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(place, name, wrap(getattr(place, name))))
        with EventLog(home / "worker" / "events.jsonl") as events:
            session.run(job, events)
    if missing := {*stages} - {one.stage for one in probe.found}:  # a session records what fails, and goes on
        raise RuntimeError(f"nothing was planted in {', '.join(sorted(missing))}")
    return probe.found


def table(found: list[Found]) -> str:
    """Return the table: per stage, dtype and kind of error the smallest ε, as a power of two."""
    names = ["consistency", *OTHERS]
    lines = [["stage", "dtype", "error in", *names], ["---"] * (3 + len(names))]
    for one in sorted(found, key=lambda one: (list(SPECS).index(Stage(one.stage)), list(DTYPES).index(one.dtype))):
        for where in ("element", "row", "tensor"):
            exponents = [one.by[name][where] for name in names]
            said = ["never" if exponent is None else _power(exponent) for exponent in exponents]
            lines.append([f"{one.stage}, {one.what}", one.dtype, f"one {where}" if where != "tensor" else "all", *said])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _power(exponent: int) -> str:
    sign = "⁻" if exponent < 0 else ""
    return "2" + sign + str(abs(exponent)).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


def setting() -> str:
    """Describe the machine and the versions."""
    device = cpu_info()
    return f"{device.model}, {device.architecture}, Python {platform.python_version()}, torch {torch.__version__}, " \
           f"numpy {np.__version__}, one thread."  # fmt: skip


def generated(trained: Path | None) -> dict[str, str]:
    """Make the generated parts of the page."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if trained is not None:
        return {"trained": table([one for dtype in DTYPES for one in measured(dtype, STAGES[1:], trained)])}
    found = [one for dtype in DTYPES for one in measured(dtype)]
    return {"setting": setting(), "table": table(found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    parser.add_argument("--trained", type=Path, metavar="DIR", help="with base and adapter: the table of that model")
    given = parser.parse_args()
    show(generated(given.trained), PAGE, write=given.write)


if __name__ == "__main__":
    main()
