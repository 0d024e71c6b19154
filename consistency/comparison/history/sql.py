"""Query a history in SQL with DuckDB, an extra: `pip install '.[history]'`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from consistency.capture.claim import scratch_folder
from consistency.capture.json_codec import encode_json
from consistency.comparison.history.parquet import COLUMNS, duckdb_for, quoted
from consistency.comparison.history.store import History
from consistency.errors import UsageError

_RUN_COLUMNS = {
    "night": "TIMESTAMPTZ", "host": "VARCHAR", "case": "VARCHAR", "verdict": "VARCHAR", "tool": "VARCHAR",
    "versions": "MAP(VARCHAR, VARCHAR)", "findings": "VARCHAR[]", "cases": "MAP(VARCHAR, VARCHAR)", "report": "VARCHAR",
    "planted": "BOOLEAN",
}  # fmt: skip
_FILES = "files"


def query(history: History, text: str) -> list[dict[str, Any]]:
    """Run a query on the tables `nights` and `workers`: one row per run, and one per worker of a run.

    Raises
    ------
    UsageError
        DuckDB is not installed, or cannot run the query.
    """
    duckdb = duckdb_for("--sql", "--sql")
    with ExitStack() as stack:
        scratch = stack.enter_context(scratch_folder("history"))
        connection = stack.enter_context(duckdb.connect(":memory:"))
        fleets = _write_lines(history, scratch, stack)
        for name, columns in (
            ("nights", _RUN_COLUMNS),
            ("of_records", {"night": "TIMESTAMPTZ", **COLUMNS}),
            (_FILES, {"night": "TIMESTAMPTZ", "run_host": "VARCHAR", "path": "VARCHAR"}),
        ):
            kinds = ", ".join(f"\"{column}\": '{kind}'" for column, kind in columns.items())
            connection.execute(
                f"CREATE TABLE {name} AS SELECT * FROM read_json({_text(scratch / name)}, "
                f"format='newline_delimited', columns={{{kinds}}})"
            )
        paths = f"[{', '.join(map(_text, fleets))}]"
        of_fleets = (
            f"UNION ALL BY NAME SELECT night, {', '.join(_of_fleet(name) for name in COLUMNS)} "
            f"FROM read_parquet({paths}, filename = true) AS found JOIN {_FILES} ON path = found.filename"
        )
        connection.execute(f"CREATE VIEW workers AS SELECT * FROM of_records {of_fleets if fleets else ''}")
        connection.execute(f"SET allowed_paths = {paths}")  # a query reads these tables and no other file
        connection.execute("SET enable_external_access = false")
        try:
            found = connection.execute(text)
            names = [column[0] for column in found.description or ()]
            return [{n: _plain(v) for n, v in zip(names, row, strict=True)} for row in found.fetchall()]
        except duckdb.Error as error:
            raise UsageError("DuckDB cannot run this query", where="--sql", got=error) from None


def _write_lines(history: History, scratch: Path, stack: ExitStack) -> list[Path]:
    """Write what is not in Parquet files as lines of JSON; return the Parquet files."""
    fleets: dict[str, Path] = {}
    with (
        (scratch / "nights").open("wb") as run_file,
        (scratch / "of_records").open("wb") as worker_file,
        (scratch / _FILES).open("wb") as path_file,
    ):
        for run in history.runs():
            row = {"night": run.at, **msgspec.structs.asdict(run)}
            run_file.write(encode_json({name: row[name] for name in _RUN_COLUMNS}) + b"\n")
            for worker in run.workers:
                record = {"night": run.at, **msgspec.structs.asdict(worker), "host": worker.host or run.host}
                worker_file.write(encode_json(record) + b"\n")
            if run.fleet is None:
                continue
            if run.fleet.file not in fleets:
                path = history.workers_apart(run, stack)
                if path is None:
                    continue
                fleets[run.fleet.file] = path
            known = {"night": run.at, "run_host": run.host, "path": str(fleets[run.fleet.file])}
            path_file.write(encode_json(known) + b"\n")
    return list(fleets.values())


def _of_fleet(name: str) -> str:
    return """coalesce(nullif(found.host, ''), run_host) AS host""" if name == "host" else f'found."{name}"'


def _text(path: Path) -> str:
    return f"'{quoted(path)}'"


def _plain(value: Any) -> Any:
    known = (str, int, float, bool, list, dict, type(None))
    return value if isinstance(value, known) else str(value)
