"""The float64 activations, gradients and trajectory: made by one worker on the CPU, read by all.

They are in a scratch folder that is removed after the run; a capture keeps the measures against them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from consistency.capture.json_codec import decode_json, encode_json
from consistency.capture.whole_file import write_whole
from consistency.errors import CaptureError
from consistency.numerics.error_spread import ErrorLimits
from consistency.numerics.file_tensor import Readable, mapped, read_tensor
from consistency.worker.protocol import (
    REFERENCE_FILE,
    REFERENCE_LOST,
    EventLog,
)

POLL_S = 0.05
NOTE_EVERY_S = 5.0


class Tables(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the exact tensors, in a file beside theirs."""

    failures: dict[str, str]
    """Why a mode has none, by mode."""
    names: tuple[str, ...]
    """Of the exact tensors."""
    limits: dict[str, dict[str, ErrorLimits]] = {}
    """Of what rounding makes, by the name of the products (`consistency.worker.cpu_error`), then by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Exact tensors by name, and the errors that rounding makes in the tested dtype."""

    path: Path
    tables: Tables
    made: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Those of this process, which need not be read from the file."""

    @classmethod
    def of(cls, path: Path) -> Reference:
        return cls(path=path, tables=decode_json(_tables(path).read_bytes(), Tables))

    @classmethod
    def of_this_process(cls, made: Mapping[str, torch.Tensor]) -> Reference:
        """Return one that is not published."""
        return cls(path=Path(), tables=Tables(failures={}, names=()), made=made)

    def read(self, name: str) -> Readable | None:
        """Return an exact tensor on the CPU; None where the reference has none of that name."""
        if name in self.made:
            return self.made[name]
        return read_tensor(self.path, name) if name in self.tables.names else None

    def known(self, name: str) -> torch.Tensor:
        """Return an exact tensor that the reference has, mapped from its file."""
        value = self.read(name)
        assert value is not None, name
        return mapped(value)

    def given(self, mode: str, name: str, own: torch.Tensor) -> torch.Tensor:
        """Return what enters or leaves a block in the exact pass of a mode, as a device has it; else its own value."""
        value = self.incoming(mode, name, own)
        return own if value is None else value

    def incoming(self, mode: str, name: str, own: torch.Tensor) -> torch.Tensor | None:
        """Return the same, or the gradient that comes in; None where there is none."""
        value = self.read(given_name(mode, name))
        return None if value is None or value.shape != own.shape else mapped(value).to(own.device, own.dtype)


def given_name(mode: str, name: str) -> str:
    """Return the name in the reference of what enters or leaves a block."""
    return f"given::{mode}::{name}"


def publish(scratch: Path, exact: dict[str, torch.Tensor], tables: Tables, file: str = REFERENCE_FILE) -> None:
    """Write exact tensors and their tables, so that a worker that finds the file of the tensors can read both."""
    partial = scratch / f"{file}.tmp"
    try:
        save_file({name: t.contiguous() for name, t in exact.items()}, partial)
    except (OSError, SafetensorError) as error:
        raise CaptureError("cannot write a scratch file", where=partial, got=error) from error
    publish_file(partial, scratch / file, tables)


def publish_file(partial: Path, path: Path, tables: Tables) -> Reference:
    """Do the same with a safetensors file that is written already: it gets its name last."""
    _tables(path).write_bytes(encode_json(tables))
    os.replace(partial, path)
    return Reference(path=path, tables=tables)


def wait_for(scratch: Path, events: EventLog, file: str = REFERENCE_FILE) -> Reference | str:
    """Return the reference once it exists, or the reason why it never will."""
    noted = 0.0
    path, marks = scratch / file, (scratch / REFERENCE_LOST, _failed(scratch / file))
    while True:
        if path.exists():
            return Reference.of(path)
        lost = next((mark for mark in marks if mark.exists()), None)
        if lost is not None:
            return f"no float64 reference: {lost.read_text(encoding='utf-8')}"
        if time.monotonic() - noted > NOTE_EVERY_S:
            events.wait("for the float64 reference")
            noted = time.monotonic()
        time.sleep(POLL_S)


def give_up(scratch: Path, file: str, reason: str) -> None:
    """Tell the workers that wait for a file that it will not come, nor one of its steps."""
    write_whole(_failed(scratch / file), [reason.encode()])


def _failed(path: Path) -> Path:
    return path.with_name(f"{path.stem.partition('-')[0]}.failed")


def _tables(path: Path) -> Path:
    return path.with_suffix(".json")
