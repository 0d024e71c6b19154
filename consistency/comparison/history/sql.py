"""A history in SQL: SQLite in memory, filled for one query.

What is a list or an object in a record is JSON in a column of type `JSON`, and comes back as it was.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from typing import Any

from consistency.capture.json_codec import encode_json, json_number
from consistency.comparison.history.records import Observation
from consistency.comparison.history.store import History
from consistency.errors import UsageError

_KINDS = {
    "versions": "JSON", "findings": "JSON", "cases": "JSON", "bits": "JSON", "drift": "JSON", "planted": "BOOLEAN",
    "simulated": "BOOLEAN", "ratio": "REAL",
}  # fmt: skip
_OF_RUN = ("host", "case", "verdict", "tool", "versions", "findings", "cases", "report", "planted")
_OBSERVED = Observation.__struct_fields__

_ALLOWED = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
"""What a query may do: read these tables, and no file."""


def query(history: History, text: str) -> list[dict[str, Any]]:
    """Run a query on the tables `runs` and `workers`: one row per run, and one per worker of a run.

    Raises
    ------
    UsageError
        SQLite cannot run the query.
    """
    with closing(sqlite3.connect(":memory:", detect_types=sqlite3.PARSE_DECLTYPES)) as connection:
        _fill(connection, history)
        connection.create_function("len", 1, _length, deterministic=True)
        connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY)
        try:
            found = connection.execute(text)
            names = [column[0] for column in found.description or ()]
            return [{n: _plain(v) for n, v in zip(names, row, strict=True)} for row in found]
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            raise UsageError("SQLite cannot run this query", where="--sql", got=error) from None


def _fill(connection: sqlite3.Connection, history: History) -> None:
    connection.execute(f"CREATE TABLE runs (run, {_columns(_OF_RUN)})")
    connection.execute(f"CREATE TABLE seen (run, run_host, place, {_columns(_OBSERVED)}, PRIMARY KEY (run, place))")
    connection.execute("CREATE TABLE rows (run, name, device, host, place)")
    connection.execute(
        f"""CREATE VIEW workers AS SELECT run, name, device, coalesce(nullif(host, ''), run_host) AS host,
        {", ".join(map(_quoted, _OBSERVED))} FROM rows JOIN seen USING (run, place)"""
    )
    for run in history.runs():
        _insert(connection, "runs", [[run.at, *_values(run, _OF_RUN)]])
        seen = enumerate(run.workers.seen)
        _insert(connection, "seen", ([run.at, run.host, n, *_values(one, _OBSERVED)] for n, one in seen))
        _insert(connection, "rows", ((run.at, *row) for row in run.workers.rows))


def _insert(connection: sqlite3.Connection, table: str, rows: Iterable[Any]) -> None:
    count = len(connection.execute(f"SELECT * FROM {table}").description)
    connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * count)})", rows)


def _columns(names: Iterable[str]) -> str:
    return ", ".join(f"{_quoted(name)} {_KINDS.get(name, 'TEXT')}" for name in names)


def _quoted(name: str) -> str:
    return f'"{name}"'


def _values(record: object, names: Iterable[str]) -> list[Any]:
    return [_stored(_KINDS.get(name), getattr(record, name)) for name in names]


def _stored(kind: str | None, value: Any) -> Any:
    """Return a value as SQLite keeps it; NaN, which it has not, is a text, and greater than any number."""
    if kind == "JSON":
        return encode_json(value).decode()
    return json_number(value) if isinstance(value, float) else value


def _plain(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _length(value: Any) -> int | None:
    """Return the length of a list or an object in JSON."""
    return None if value is None else len(json.loads(value))


sqlite3.register_converter("JSON", json.loads)
sqlite3.register_converter("BOOLEAN", lambda value: value == b"1")
