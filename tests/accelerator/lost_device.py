"""One of four devices fails: in which phases, by which errors, and what a report has to say of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.reported import rows

LOST = "npu:1"
OTHERS = ("cpu", "npu:0", "npu:2", "npu:3")

_MORE = "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be"

ERRORS: Mapping[str, Mapping[str, Any]] = {
    "ecc": {"says": f"CUDA error: uncorrectable ECC error encountered{_MORE}"},
    "no-kernel": {"says": f"CUDA error: no kernel image is available for execution on the device{_MORE}"},
    "illegal-address": {"says": f"CUDA error: an illegal memory access was encountered{_MORE}", "sticky": True},
    "memory": {"says": f"CUDA error: out of memory{_MORE}"},
}
"""Fields of the double's `DeviceFailure`, by a name for the error. Torch 2.13 says them so (`CUDAException.cpp`)."""

PHASES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "load": ("model/loading.py:load_base", {"stages": "base"}),
    "adapter": ("model/loading.py:load_adapter", {"stages": "adapter"}),
    "merge": ("stages/merged/stage.py:run", {"stages": "merged"}),
    "forward": ("stages/forward.py:run", {"stages": "forward"}),
    "gradient": ("stages/gradient/stage.py:run", {"stages": "gradient"}),
    # with all devices visible, so that the healthy ones copy from the one that fails
    "transfer": ("stages/transfer/stage.py:run", {"stages": "transfer", "load_paths": "shared"}),
}
"""What is on the stack at that time, and the options of the shortest run that comes there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A device that fails in a phase by an error: names in `PHASES` and `ERRORS`."""

    phase: str
    error: str

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of the double."""
        failure = {"device": LOST, "during": PHASES[self.phase][0], "from_call": 3, **ERRORS[self.error]}
        return {"failures": [failure]}

    @property
    def options(self) -> dict[str, str]:
        """Return the options of the run."""
        return {"devices": ",".join(("cpu", "npu:0", LOST, "npu:2", "npu:3")), "load_paths": "isolated"} | dict(
            PHASES[self.phase][1]
        )

    @property
    def words(self) -> str:
        """Return what the runtime says, without the rest that torch adds."""
        return str(ERRORS[self.error]["says"]).partition("\n")[0]

    def wrong(self, status: int, report: Mapping[str, Any] | None) -> list[str]:
        """Return what is wrong about how a run tells of the loss, one sentence each."""
        if report is None:
            return [f"exit {status}, and no report"]
        workers = {worker["name"]: worker for worker in report["workers"]}
        lost = workers[LOST]
        found = [] if status == 3 else [f"exit {status}, wanted 3"]
        if lost["status"] != "lost":
            found.append(f"{LOST} is {lost['status']}")
        if self.words not in (lost["reason"] or ""):
            found.append(f"{LOST} does not give its runtime's words")
        found += [f"{name} is {workers[name]['status']}" for name in OTHERS if workers[name]["status"] != "ok"]
        found += [
            f"{finding['kind']}: {finding['message']}"
            for finding in report["findings"]
            if finding["severity"] == "error" and finding["kind"] != "lost-worker"
        ]
        compared = {row["worker"] for row in rows(report) if row["status"] in ("equal", "within")}
        found += [f"nothing of {name} is compared" for name in OTHERS if name not in compared]
        return found
