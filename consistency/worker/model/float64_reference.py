"""The float64 activations and gradients: made by one worker on the CPU, read by all.

They are in a scratch folder that is removed after the run; a capture keeps the measures against them.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from consistency.worker.protocol import REFERENCE_FILE, REFERENCE_LOST, EventLog

POLL_S = 0.05
NOTE_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Exact tensors by name, and the CPU's own errors in the tested dtype.

    Attributes
    ----------
    errors : dict
        The CPU's own largest error with float32 products, by mode and name.
    errors_with : dict
        The same with other products, by the name of `consistency.worker.yardstick`.
    samples : dict
        How many independent errors that is the largest of.
    failures : dict
        Why a mode has none, by mode.
    """

    path: Path
    errors: dict[str, float]
    samples: dict[str, int]
    failures: dict[str, str]
    errors_with: dict[str, dict[str, float]]

    @classmethod
    def of(cls, path: Path) -> Reference:
        with safe_open(path, framework="pt", device="cpu") as file:
            tables = {name: json.loads(text) for name, text in file.metadata().items()}
        return cls(
            path=path,
            errors=tables["errors"],
            samples=tables["draws"],
            failures=tables["failures"],
            errors_with=tables["errors_with"],
        )

    def read(self, name: str) -> torch.Tensor | None:
        """Return an exact tensor on the CPU; None where the reference has none of that name."""
        with safe_open(self.path, framework="pt", device="cpu") as file:
            if name not in file.keys():  # noqa: SIM118 - safe_open is no mapping
                return None
            tensor = file.get_tensor(name)
        assert isinstance(tensor, torch.Tensor)
        return tensor


def publish(
    scratch: Path,
    exact: dict[str, torch.Tensor],
    *,
    errors: dict[str, float],
    samples: dict[str, int],
    failures: dict[str, str],
    errors_with: dict[str, dict[str, float]] | None = None,
    file: str = REFERENCE_FILE,
) -> Reference:
    """Write the reference atomically, so that a worker that finds it can read it."""
    partial = scratch / f"{file}.tmp"
    tables = {"errors": errors, "draws": samples, "failures": failures, "errors_with": errors_with or {}}
    save_file(
        {name: t.contiguous().clone() for name, t in exact.items()},
        partial,
        metadata={name: json.dumps(table) for name, table in tables.items()},
    )
    os.replace(partial, scratch / file)
    return Reference.of(scratch / file)


def wait_for(scratch: Path, events: EventLog, file: str = REFERENCE_FILE) -> Reference | str:
    """Return the reference once it exists, or the reason why it never will."""
    noted = 0.0
    path, lost = scratch / file, scratch / REFERENCE_LOST
    while True:
        if path.exists():
            return Reference.of(path)
        if lost.exists():
            return f"no float64 reference: {lost.read_text(encoding='utf-8')}"
        if time.monotonic() - noted > NOTE_EVERY_S:
            events.wait("for the float64 reference")
            noted = time.monotonic()
        time.sleep(POLL_S)
