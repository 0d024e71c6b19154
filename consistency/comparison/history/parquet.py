"""The workers of a fleet's run as a Parquet file, one row each: written and read by DuckDB, an extra.

Parquet writes what is equal in a column once, so a run of 8000 workers takes 160 kB where JSON takes 6 MB, most of it
what identifies each device. The same workers give the same bytes: a file is named by its content, and runs that saw
the same share one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec

from consistency.capture.claim import scratch_folder
from consistency.capture.json_codec import convert_plain, encode_json
from consistency.comparison.history.records import WorkerRecord, WorkerState, state_of
from consistency.errors import UsageError, extra_hint

COLUMNS = {
    "name": "VARCHAR", "load_path": "VARCHAR", "device": "VARCHAR", "architecture": "VARCHAR", "model": "VARCHAR",
    "status": "VARCHAR", "software": "VARCHAR", "inputs": "VARCHAR", "bits": "MAP(VARCHAR, VARCHAR)",
    "table": "VARCHAR", "drift": "VARCHAR[]", "simulated": "BOOLEAN", "case": "VARCHAR", "verdict": "VARCHAR",
    "ratio": "DOUBLE", "host": "VARCHAR", "driver": "VARCHAR",
}  # fmt: skip
"""Types by the name of a worker's field in JSON."""

_STATE = "state"
_NAMES = ", ".join(f'"{name}"' for name in COLUMNS)
_NAME, _DEVICE = (list(COLUMNS).index(name) for name in ("name", "device"))
_FEW = 100  # devices that DuckDB chooses: in 1.3 ms of a file with 8000, all of whose workers take 200 ms


def duckdb_for(what: str, where: object = None) -> Any:
    """Return the module; `what` needs it.

    Raises
    ------
    UsageError
        It is not installed.
    """
    try:
        import duckdb
    except ImportError:
        raise UsageError(
            f"{what} needs DuckDB, which is not installed", where=where, hint=extra_hint("history")
        ) from None
    return duckdb


class WorkerFiles:
    """Writes and reads the files; one connection for all of them."""

    def __init__(self, where: str) -> None:
        self._connection = duckdb_for("a history of more than 64 devices", where).connect(":memory:")
        self._connection.execute("SET threads = 1")  # the same workers give the same file

    def render(self, workers: Sequence[WorkerRecord]) -> bytes:
        """Return the file of these workers."""
        states: dict[bytes, int] = {}  # most are equal but for what identifies them
        with scratch_folder("history") as scratch:
            lines, target = Path(scratch, "workers.jsonl"), Path(scratch, "workers.parquet")
            with lines.open("wb") as file:
                for worker in workers:
                    anybody = msgspec.structs.replace(worker, name="", device="", host="")
                    known = encode_json(anybody)
                    if known not in states:
                        states[known] = state_of(worker)
                    file.write(encode_json({**msgspec.structs.asdict(worker), _STATE: states[known]}) + b"\n")
            columns = ", ".join(f"\"{name}\": '{kind}'" for name, kind in (*COLUMNS.items(), (_STATE, "UBIGINT")))
            self._connection.execute(
                f"COPY (SELECT * FROM read_json('{quoted(lines)}', format = 'newline_delimited', "
                f"columns = {{{columns}}})) TO '{quoted(target)}' (FORMAT PARQUET, COMPRESSION ZSTD)"
            )
            return target.read_bytes()

    def workers(
        self, path: Path, devices: Collection[str] | None = None, **having: Collection[str]
    ) -> tuple[WorkerRecord, ...]:
        """Return the workers of a file, or those of some devices (identities or names) `having` these values.

        Raises
        ------
        ValueError
            The file is damaged.
        """
        text, given = f"SELECT {_NAMES} FROM read_parquet(?) WHERE true", []
        for name, values in having.items():  # by the statistics of a column, most files are not read any further
            text += f' AND "{name}" IN ({_places(values)})'
            given += sorted(values)
        if devices is not None and len(devices) <= _FEW:
            text += f' AND (device IN ({_places(devices)}) OR "name" IN ({_places(devices)}))'
            given += [*sorted(devices), *sorted(devices)]
        found = self._fetch(text, path, given)
        if devices is not None:
            found = [row for row in found if row[_DEVICE] in devices or row[_NAME] in devices]
        rows = [{name: value for name, value in zip(COLUMNS, row, strict=True) if value is not None} for row in found]
        return convert_plain(rows, tuple[WorkerRecord, ...])

    def states(self, path: Path) -> list[WorkerState]:
        """Return the states of a file's workers, as `state_of` does; raise `ValueError` where it is damaged."""
        return self._fetch(f'SELECT device, load_path, "case", "name", {_STATE} FROM read_parquet(?)', path)

    def tables(self, path: Path) -> set[str]:
        """Return the names of the tables that a file's workers have; raise `ValueError` where it is damaged."""
        return {name for (name,) in self._fetch('SELECT DISTINCT "table" FROM read_parquet(?)', path)}

    def _fetch(self, text: str, path: Path, given: Sequence[str] = ()) -> list[Any]:
        try:
            found: list[Any] = self._connection.execute(text, [str(path), *given]).fetchall()
        except duckdb_for("a history of more than 64 devices").Error as error:
            raise ValueError(str(error)) from None
        return found


def _places(values: Collection[str]) -> str:
    return ", ".join("?" * len(values)) or "NULL"


def quoted(path: Path) -> str:
    """Return a path as it stands in a text of SQL."""
    return str(path).replace("'", "''")
