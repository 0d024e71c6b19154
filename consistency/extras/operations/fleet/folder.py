"""What a fleet keeps: captures and statuses in a store that its nodes see, and its plan, by which it is resumed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from consistency.capture.bounded import read_regular
from consistency.capture.json_codec import decode_json, encode_json
from consistency.capture.node_status import NodeStatus, read_status, write_status
from consistency.capture.transport import is_remote, open_store, remote_errors, write_bytes
from consistency.capture.writer import already_exists, write_json
from consistency.case.requirements import Requirements
from consistency.errors import CaptureError, UsageError

SCHEMA = "consistency.fleet/1"
PLAN = "fleet.json"
LOGS = "nodes"
REQUIREMENTS = "requirements.json"
TOGETHER = "together"


class NodeOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a node, for whoever schedules work on it."""

    state: str = "pending"  # `delivered`, `lost`, or `pending` as long as the fleet runs
    reason: str = ""  # why it is lost, or was left out
    findings: tuple[str, ...] = ()  # the errors that name one of its workers


class FleetRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a fleet was to check, and what became of its nodes."""

    engine: str
    case: tuple[str, ...]  # the options of the case, as words of a command line
    requirements: Requirements
    nodes: dict[str, NodeOutcome]
    schema: str = SCHEMA


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFolder:
    """The folder of a fleet, and the store of its captures: a folder or URL that every node can write to."""

    out: Path
    store: str

    @property
    def is_remote(self) -> bool:
        return is_remote(self.store)

    @property
    def requirements(self) -> str:
        return f"{self.store}/{REQUIREMENTS}"

    def capture(self, node: str) -> str:
        return f"{self.store}/{node}.zip"

    def status(self, node: str) -> str:
        return f"{self.store}/{node}.json"

    @property
    def together(self) -> Path:
        """Return where the nodes of one group meet: beside their captures, and removed once all have ended."""
        return Path(self.store) / TOGETHER

    def group(self, node: str) -> Path:
        return self.together / f"{node}.json"

    def log(self, node: str) -> Path | None:
        """Return where a node's output goes: nowhere, if no folder is known to be seen by the nodes."""
        return None if self.is_remote else self.out.resolve() / LOGS / f"{node}.log"

    def read_status(self, node: str) -> NodeStatus | None:
        return read_status(self.status(node))

    def prepare(self, requirements: Requirements, nodes: Sequence[str], *, replace: bool) -> None:
        """Make the folders, and a status for each of these nodes, which have no capture yet.

        A name that a client of NFS has looked for in vain stays unknown to it for a while: so each status is there
        before it is looked for, and a capture is not looked for by its name before its node has delivered it.
        """
        try:
            (self.out / LOGS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CaptureError("cannot make the folder of the fleet", where=self.out, got=error) from None
        fs, place = open_store(self.store, "cannot open the store")
        with remote_errors("cannot make the store", self.store):
            fs.makedirs(place, exist_ok=True)
            fs.invalidate_cache()
            listed = fs.ls(place, detail=False) if fs.isdir(place) else ()  # an object store has no empty folder
            there = {str(path).rstrip("/").rpartition("/")[2]: str(path) for path in listed}
        if not replace and REQUIREMENTS in there:
            raise already_exists(self.store)
        write_bytes(self.requirements, encode_json(requirements))
        for node in nodes:
            capture = self.capture(node)
            if (path := there.get(capture.rpartition("/")[2])) is not None:
                with remote_errors("cannot replace the earlier capture", capture):
                    fs.rm(path)
            write_status(self.status(node), NodeStatus())

    def save(self, record: FleetRecord) -> None:
        """Write down how the fleet stands."""
        write_json(self.out / PLAN, record)

    def delivered(self, record: FleetRecord, nodes: Sequence[str]) -> list[str]:
        """Return the nodes whose captures an earlier run has left, which was to check the same.

        Raises
        ------
        UsageError
            It was to check something else, or there was none.
        """
        earlier = self._earlier()
        if (earlier.case, earlier.requirements) != (record.case, record.requirements):
            differs = "options" if earlier.case != record.case else "requirements (files, accelerators)"
            raise UsageError(
                f"the earlier run had other {differs}",
                where=self.out / PLAN,
                got=" ".join(earlier.case) or "none",
                wanted=" ".join(record.case) or "none",
                hint="give the same options, or another --out",
            )
        return [node for node in nodes if self._has_delivered(node)]

    def logged(self, node: str) -> str:
        """Return the last line of a node's output."""
        path = self.log(node)
        with suppress(OSError):
            lines = [] if path is None else path.read_text(encoding="utf-8", errors="replace").split("\n")
            # Slurm adds that it has cancelled the task, which the fleet has asked for
            own = (line.strip() for line in reversed(lines) if not line.startswith("slurmstepd"))
            return next((line for line in own if line), "")[:300]
        return ""

    def _earlier(self) -> FleetRecord:
        path = self.out / PLAN
        try:
            return decode_json(read_regular(path), FleetRecord)
        except FileNotFoundError:
            raise UsageError("there is nothing to resume", where=path) from None
        except (OSError, msgspec.MsgspecError) as error:
            raise UsageError("cannot read the earlier run", where=path, got=error) from None

    def _has_delivered(self, node: str) -> bool:
        status = self.read_status(node)
        return status is not None and status.phase == "delivered" and self._exists(self.capture(node))

    def _exists(self, place: str) -> bool:
        fs, path = open_store(place, "cannot open the store")
        with remote_errors("cannot read the store", place):
            return bool(fs.exists(path))
