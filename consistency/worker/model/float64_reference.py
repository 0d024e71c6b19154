"""Exchange the float64 activations, gradients and trajectory: made by one worker on the CPU, read by all.

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
from consistency.worker.protocol import REFERENCE_FILE, REFERENCE_LOST, EventLog

POLL_S = 0.05
"""Seconds between two looks for a reference."""

NOTE_EVERY_S = 5.0
"""Seconds between two signs of a worker that waits."""


class Tables(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the exact tensors, in a file beside theirs."""

    failures: dict[str, str]
    """The reason why a mode has no exact tensors, by mode."""
    names: tuple[str, ...]
    """Names of the exact tensors."""
    product_types: dict[str, str] = {}
    """The narrowest dtype in which a module multiplies on the CPU, by its name: see `product_types`."""
    limits: dict[str, dict[str, ErrorLimits]] = {}
    """Limits of rounding errors, by the name of the products (`consistency.worker.cpu_error`), then by tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Exact tensors by name, and the errors that rounding makes in the tested dtype."""

    path: Path
    tables: Tables
    in_memory: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that this process has computed, which need not be read from the file."""

    @classmethod
    def open_published(cls, path: Path) -> Reference:
        """Return the reference that `publish` wrote to a file; its tensors are read when they are asked for."""
        return cls(path=path, tables=decode_json(_tables(path).read_bytes(), Tables))

    @classmethod
    def of_this_process(cls, tensors: Mapping[str, torch.Tensor]) -> Reference:
        """Return a reference that is in the memory of this process alone."""
        return cls(path=Path(), tables=Tables(failures={}, names=()), in_memory=tensors)

    def read(self, name: str) -> Readable | None:
        """Return an exact tensor on the CPU; None where the reference has none of that name."""
        if name in self.in_memory:
            return self.in_memory[name]
        return read_tensor(self.path, name) if name in self.tables.names else None

    def known(self, name: str) -> torch.Tensor:
        """Return an exact tensor that the reference has, mapped from its file."""
        value = self.read(name)
        assert value is not None, name
        return mapped(value)

    def given_value(self, mode: str, name: str, own: torch.Tensor) -> torch.Tensor:
        """Return the given value of a place in a mode's passes; `own` where the reference has none.

        Parameters
        ----------
        name : str
            Name of a place at which a tensor enters or leaves a block.
        own : torch.Tensor
            The value that the device has computed there; the given one has its device and dtype.
        """
        value = self.incoming(mode, name, own)
        return own if value is None else value

    def incoming(self, mode: str, name: str, own: torch.Tensor) -> torch.Tensor | None:
        """Return the given value, or output gradient, of a place; None where there is none of this shape."""
        value = self.read(given_name(mode, name))
        if value is None or value.shape != own.shape:
            return None
        return mapped(value).to(own.device, own.dtype)


def given_name(mode: str, name: str) -> str:
    """Return the name in the reference of the given value of a place."""
    return f"given::{mode}::{name}"


def publish(scratch: Path, exact: dict[str, torch.Tensor], tables: Tables, file: str = REFERENCE_FILE) -> None:
    """Write exact tensors and their tables, so that a worker that finds the file of the tensors can read both."""
    partial = scratch / f"{file}.tmp"
    try:
        save_file({name: tensor.contiguous() for name, tensor in exact.items()}, partial)
    except (OSError, SafetensorError) as error:
        raise CaptureError("cannot write a scratch file", where=partial, got=error) from error
    publish_file(partial, scratch / file, tables)


def publish_file(partial: Path, path: Path, tables: Tables) -> Reference:
    """Publish a safetensors file that is written already, and its tables: the file gets its name last."""
    _tables(path).write_bytes(encode_json(tables))
    os.replace(partial, path)
    return Reference(path=path, tables=tables)


def wait_for(scratch: Path, events: EventLog, file: str = REFERENCE_FILE) -> Reference | str:
    """Return the reference once it exists, or the reason why it never will."""
    noted_s = 0.0
    path, loss_marks = scratch / file, (scratch / REFERENCE_LOST, _failed(scratch / file))
    while True:
        if path.exists():
            return Reference.open_published(path)
        for mark in loss_marks:
            if mark.exists():
                return f"no float64 reference: {mark.read_text(encoding='utf-8')}"
        if time.monotonic() - noted_s > NOTE_EVERY_S:
            events.wait("for the float64 reference")
            noted_s = time.monotonic()
        time.sleep(POLL_S)


def give_up(scratch: Path, file: str, reason: str) -> None:
    """Tell the workers that wait for a file, or for the file of one of its steps, that it will not come."""
    write_whole(_failed(scratch / file), [reason.encode()])


def _failed(path: Path) -> Path:
    """Return the file with the reason why a file will not come: one for all steps of a trajectory."""
    return path.with_name(f"{path.stem.partition('-')[0]}.failed")


def _tables(path: Path) -> Path:
    return path.with_suffix(".json")
