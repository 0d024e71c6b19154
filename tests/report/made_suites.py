"""Suites made by hand, for every format of their report."""

from __future__ import annotations

import msgspec

from consistency.comparison.result import Comparison, Finding
from consistency.comparison.suite import CaseResult, SuiteResult
from consistency.errors import InputError
from consistency.report.summarize import summarize
from tests.report.made_comparisons import ALL, comparison, faulty, tensor, worker


def good() -> Comparison:
    """Return a consistent comparison with a moved and a computed stage."""
    return comparison(
        [
            tensor([ALL]),
            tensor([["cpu"], ALL[1:]], stage="merged", tensor="weight", ratio=0.31,
                   statuses=dict.fromkeys(ALL, "within")),
        ]
    )  # fmt: skip


def zeros(layers: int) -> Comparison:
    """Return a comparison in which cuda:1 holds zeros in `layers` layers."""
    classes = [["cpu", "cuda:0", "cuda:2"], ["cuda:1"]]
    tensors = [tensor(classes, layer=f"layers.{i}", statuses={"cuda:1": "outside"}) for i in range(layers)]
    return comparison(tensors, verdict="inconsistent", findings=(zeros_finding(layers),))


def zeros_finding(layers: int) -> Finding:
    return Finding(
        kind="zeros", severity="error", workers=("cuda:1",), detail=("got 0, wanted 1",),
        message=f"adapter · cuda:1 · zeros where the file is nonzero in {layers} of {layers} lora_B tensors",
        general="adapter · cuda:1 · zeros where the file is nonzero in lora_B tensors",
        tensors=tuple(f"adapter::layers.{i}.lora_B" for i in range(layers)),
    )  # fmt: skip


def lost() -> Comparison:
    """Return a comparison of which a worker was killed."""
    killed = worker("cuda:1", status="lost", reason="was killed by SIGKILL; last event: merged")
    finding = Finding(
        kind="lost-worker", severity="error", message="cuda:1 was lost: was killed by SIGKILL; last event: merged",
        general="cuda:1 was lost: was killed by SIGKILL", workers=("cuda:1",),
    )  # fmt: skip
    workers = (worker("cpu", "x86-64"), worker("cuda:0"), killed, worker("cuda:2"))
    found = comparison([tensor([["cpu", "cuda:0", "cuda:2"]])], verdict="incomplete", findings=(finding,))
    return msgspec.structs.replace(found, workers=workers)


def case(name: str, found: Comparison, elapsed_s: float = 1.5) -> CaseResult:
    return summarize(name, f"cases/{name}", found, elapsed_s)


def unusable(name: str) -> CaseResult:
    error = InputError("no such folder for the adapter", where="./gone", hint="check the path")
    return CaseResult.of_error(name, f"cases/{name}", error, base="./llama", adapter="./gone")


def suite(*cases: CaseResult, elapsed_s: float = 93.0) -> SuiteResult:
    return SuiteResult(name="nightly", cases=cases, elapsed_s=elapsed_s, created="2026-03-01T02:00:00+00:00")


def many() -> SuiteResult:
    """Return a hundred cases: most have zeros on cuda:1, one is worse, and two could not be checked."""
    cases = [case(f"lora-{i:03}", zeros(1 + i % 3) if i % 7 < 4 else good()) for i in range(97)]
    return suite(*cases, case("killer", lost()), unusable("gone"), case("plain", faulty()))
