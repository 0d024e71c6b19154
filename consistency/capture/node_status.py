"""The status of a node of a fleet while it makes its capture: one small file beside it, rewritten in place.

The fleet learns from it how far a node is, and from its silence that a node has frozen or died, whichever engine has
started it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from consistency.capture.bounded import read_regular
from consistency.capture.json_codec import decode_json, encode_json
from consistency.capture.transport import is_remote, read_bytes, write_bytes
from consistency.errors import CaptureError

SCHEMA = "consistency.node/1"

BEAT_S = 5.0
"""Seconds between two writes of a node."""

_BYTES = 4096  # a page: written at once, and in blocks that the file keeps when the disk is full
_MOST_TEXT = 1500  # bytes: with the rest of it, and every quotation mark escaped, less than a page

Phase = Literal["waiting", "checking", "running", "delivered", "failed"]


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of one node."""

    schema: str = SCHEMA
    phase: Phase = "waiting"
    """`waiting` is written by the fleet, before the node starts."""
    beat: int = 0
    """A number that rises each time that the status is written."""
    host: str = ""
    stage: str = ""
    number: int = 0
    of: int = 0
    """`stage`, `number`, `of`: the stage that the node's slowest worker is in, its number, and the number of stages."""
    reason: str = ""
    """Why the node failed."""
    software: dict[str, str] = {}
    """Versions of the software, by name."""
    accelerators: dict[str, int] = {}
    """Number of accelerators, by model."""

    @property
    def place(self) -> str:
        """Return the place of the slowest worker: `forward, 5 of 9`."""
        if not self.stage:
            return "start"
        count = f", {self.number} of {self.of}" if self.number and self.of else ""
        return f"{self.stage}{count}"


def write_status(target: str, status: NodeStatus) -> None:
    """Write a status to a file or URL.

    A file is rewritten in place, not renamed: a client of NFS that opens a file gets what was written to it last, but
    may take a name for a replaced file for a minute. It keeps its size and so its blocks: a full disk does not keep a
    node from saying that it is full.

    Raises
    ------
    CaptureError
        It cannot be written.
    """
    short = msgspec.structs.replace(status, reason=status.reason.encode()[:_MOST_TEXT].decode(errors="ignore"))
    raw = encode_json(short).ljust(_BYTES - 1) + b"\n"
    if is_remote(target):
        write_bytes(target, raw)
        return
    try:
        file = os.open(target, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(file, raw, 0)
            os.ftruncate(file, len(raw))
        finally:
            os.close(file)
    except OSError as error:
        raise CaptureError("cannot write the status", where=target, got=error) from None


def read_status(target: str) -> NodeStatus | None:
    """Return a status; None where there is none that can be read now."""
    try:
        raw = read_bytes(target) if is_remote(target) else read_regular(Path(target))
        return decode_json(raw, NodeStatus)
    except (OSError, CaptureError, msgspec.MsgspecError):
        return None
