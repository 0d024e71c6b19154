"""Devices that fail: in which phases, by which errors, and what a report has to say of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.reported import rows

_MORE = "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be"

ERRORS: Mapping[str, Mapping[str, Any]] = {
    "ecc": {"says": f"CUDA error: uncorrectable ECC error encountered{_MORE}"},
    "no-kernel": {"says": f"CUDA error: no kernel image is available for execution on the device{_MORE}"},
    "illegal-address": {"says": f"CUDA error: an illegal memory access was encountered{_MORE}", "sticky": True},
    "memory": {"says": f"CUDA error: out of memory{_MORE}"},
}
"""Fields of the double's `DeviceFailure`, by a name for the error. Torch 2.13 says them so (`CUDAException.cpp`)."""

PHASES: Mapping[str, tuple[str, str, str]] = {
    "load": ("model/loading.py:load_base", "base", "isolated"),
    "adapter": ("model/loading.py:load_adapter", "adapter", "isolated"),
    "merge": ("stages/merged/stage.py:run", "merged", "isolated"),
    "forward": ("stages/forward.py:run", "forward", "isolated"),
    "gradient": ("stages/gradient/stage.py:run", "gradient", "isolated"),
    # with all devices visible, so that the healthy ones copy from the one that fails
    "transfer": ("stages/transfer/stage.py:run", "transfer", "shared"),
}
"""What is on the stack at that time, and the stage and the load path of the shortest run that comes there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A device that fails in a phase by an error: names in `PHASES` and `ERRORS`."""

    device: str = "npu:1"
    phase: str
    error: str

    @property
    def failure(self) -> dict[str, Any]:
        """Return the double's `DeviceFailure`."""
        return {"device": self.device, "during": PHASES[self.phase][0], "from_call": 3, **ERRORS[self.error]}

    @property
    def words(self) -> str:
        """Return what the runtime says, without the rest that torch adds."""
        return str(ERRORS[self.error]["says"]).partition("\n")[0]


class LossyRun:
    """A run in which devices are lost, and at least two are not.

    Attributes
    ----------
    settings : dict
        Of the double.
    options : dict
        Of the run.
    """

    def __init__(self, *losses: Loss) -> None:
        count = max(4, len(losses) + 2)
        self._losses = losses
        self._workers = ("cpu", *(f"npu:{number}" for number in range(count)))
        self.settings = {"devices": count, "failures": [loss.failure for loss in losses]}
        self.options = {
            "devices": ",".join(self._workers),
            "stages": ",".join(PHASES[loss.phase][1] for loss in losses),
            "load_paths": ",".join({PHASES[loss.phase][2] for loss in losses}),
        }

    def wrong(self, status: int, report: Mapping[str, Any] | None) -> list[str]:
        """Return what is wrong about how the run tells of the losses, one sentence each."""
        if report is None:
            return [f"exit {status}, and no report"]
        workers = {worker["name"]: worker for worker in report["workers"]}
        found = [] if status == 3 else [f"exit {status}, wanted 3"]
        for loss in self._losses:
            worker = workers[loss.device]
            if worker["status"] != "lost":
                found.append(f"{loss.device} is {worker['status']}")
            if loss.words not in (worker["reason"] or ""):
                found.append(f"{loss.device} does not give its runtime's words")
        lost = {loss.device for loss in self._losses}
        others = [name for name in self._workers if name not in lost]
        found += [f"{name} is {workers[name]['status']}" for name in others if workers[name]["status"] != "ok"]
        errors = [finding for finding in report["findings"] if finding["severity"] == "error"]
        found += [f"{finding['kind']}: {finding['message']}" for finding in errors if finding["kind"] != "lost-worker"]
        named = [
            name.partition(" ")[0] for finding in errors if finding["kind"] == "lost-worker"
            for name in finding["workers"]
        ]  # fmt: skip
        if sorted(named) != sorted(lost):
            found.append(f"findings name {', '.join(named) or 'none'} as lost")
        compared = {row["worker"] for row in rows(report) if row["status"] in ("equal", "within")}
        found += [f"nothing of {name} is compared" for name in others if name not in compared]
        return found
