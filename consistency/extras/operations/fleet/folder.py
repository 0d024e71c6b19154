"""The files that a fleet keeps: captures and statuses in a store that its nodes see, and the plan to resume it by."""

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

_MOST_LOGGED = 300  # characters of a line of output


class NodeOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a node, for whoever schedules work on it."""

    state: str = "pending"  # `delivered`, `lost`, or `pending` as long as the fleet runs
    reason: str = ""  # why it is lost, or was left out
    findings: tuple[str, ...] = ()  # the errors that name one of its workers


class FleetRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a fleet was to check, and how its nodes ended."""

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
        """Return the folder in which the nodes of one group meet: beside their captures, until all have ended."""
        return Path(self.store) / TOGETHER

    def group(self, node: str) -> Path:
        return self.together / f"{node}.json"

    def log(self, node: str) -> Path | None:
        """Return the file of a node's output; None where no folder is known to be seen by the nodes."""
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
            paths = fs.ls(place, detail=False) if fs.isdir(place) else ()  # an object store has no empty folder
            path_by_name = {_last_name(str(path).rstrip("/")): str(path) for path in paths}
        if not replace and REQUIREMENTS in path_by_name:
            raise already_exists(self.store)
        write_bytes(self.requirements, encode_json(requirements))
        for node in nodes:
            capture = self.capture(node)
            earlier_capture = path_by_name.get(_last_name(capture))
            if earlier_capture is not None:
                with remote_errors("cannot replace the earlier capture", capture):
                    fs.rm(earlier_capture)
            write_status(self.status(node), NodeStatus())

    def save(self, record: FleetRecord) -> None:
        """Write the record of the fleet, by which it can be resumed."""
        write_json(self.out / PLAN, record)

    def delivered(self, record: FleetRecord, nodes: Sequence[str]) -> list[str]:
        """Return the nodes that delivered captures to an earlier run, which has to be of the same record.

        Raises
        ------
        UsageError
            The earlier run was to check something else, or there was none.
        """
        earlier = self._earlier()
        if (earlier.case, earlier.requirements) != (record.case, record.requirements):
            difference = "options" if earlier.case != record.case else "requirements (files, accelerators)"
            raise UsageError(
                f"the earlier run had other {difference}",
                where=self.out / PLAN,
                got=" ".join(earlier.case) or "none",
                wanted=" ".join(record.case) or "none",
                hint="give the same options, or another --out",
            )
        return [node for node in nodes if self._has_delivered(node)]

    def logged(self, node: str) -> str:
        """Return the last line of a node's output, empty where there is none."""
        path = self.log(node)
        if path is None:
            return ""
        with suppress(OSError):
            for line in reversed(path.read_text(encoding="utf-8", errors="replace").split("\n")):
                # Slurm adds that it has cancelled the task, which the fleet has asked for
                is_of_slurm = line.startswith("slurmstepd")
                if line.strip() and not is_of_slurm:
                    return line.strip()[:_MOST_LOGGED]
        return ""

    def _earlier(self) -> FleetRecord:
        """Return the record of the earlier run in the folder; raise UsageError where there is none."""
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


def _last_name(place: str) -> str:
    """Return the last name of a path or URL."""
    return place.rpartition("/")[2]
