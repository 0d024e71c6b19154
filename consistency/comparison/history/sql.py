"""Query a history in SQL with DuckDB, an extra: `pip install 'peft-consistency[history]'`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from consistency.capture.json_codec import by_json_name, encode_json
from consistency.comparison.history.store import History
from consistency.errors import UsageError

_COLUMNS = {
    "nights": "night: 'TIMESTAMPTZ', host: 'VARCHAR', \"case\": 'VARCHAR', verdict: 'VARCHAR', tool: 'VARCHAR', "
              "versions: 'MAP(VARCHAR, VARCHAR)', findings: 'VARCHAR[]', cases: 'MAP(VARCHAR, VARCHAR)', "
              "report: 'VARCHAR', planted: 'BOOLEAN'",
    "workers": "night: 'TIMESTAMPTZ', host: 'VARCHAR', name: 'VARCHAR', road: 'VARCHAR', device: 'VARCHAR', "
               "architecture: 'VARCHAR', model: 'VARCHAR', status: 'VARCHAR', software: 'VARCHAR', inputs: 'VARCHAR', "
               "bits: 'MAP(VARCHAR, VARCHAR)', \"table\": 'VARCHAR', drift: 'VARCHAR[]', simulated: 'BOOLEAN', "
               "\"case\": 'VARCHAR', verdict: 'VARCHAR', bound_ratio: 'DOUBLE'",
}  # fmt: skip


def query(history: History, text: str) -> list[dict[str, Any]]:
    """Run a query on the tables `nights` and `workers`: one row per run, and one per worker of a run.

    Raises
    ------
    UsageError
        DuckDB is not installed, or cannot run the query.
    """
    try:
        import duckdb
    except ImportError:
        raise UsageError(
            "--sql needs DuckDB, which is not installed", where="--sql", hint="pip install 'peft-consistency[history]'"
        ) from None
    with tempfile.TemporaryDirectory(prefix="consistency-history-") as scratch:
        files = {name: Path(scratch) / f"{name}.jsonl" for name in _COLUMNS}
        with files["nights"].open("wb") as run_file, files["workers"].open("wb") as worker_file:
            for run in history.runs():
                row = {"night": run.at, **by_json_name(run)}
                for worker in row.pop("workers"):
                    record = {"night": run.at, "host": run.host, **by_json_name(worker)}
                    worker_file.write(encode_json(record) + b"\n")
                run_file.write(encode_json(row) + b"\n")
        with duckdb.connect(":memory:") as connection:
            for name, columns in _COLUMNS.items():
                source = str(files[name]).replace("'", "''")
                connection.execute(
                    f"CREATE TABLE {name} AS SELECT * FROM read_json('{source}', format='newline_delimited', "
                    f"columns={{{columns}}})"
                )
            connection.execute("SET enable_external_access = false")  # a query reads these two tables and no file
            try:
                found = connection.execute(text)
                names = [column[0] for column in found.description or ()]
                return [{n: _plain(v) for n, v in zip(names, row, strict=True)} for row in found.fetchall()]
            except duckdb.Error as error:
                raise UsageError("DuckDB cannot run this query", where="--sql", got=error) from None


def _plain(value: Any) -> Any:
    known = (str, int, float, bool, list, dict, type(None))
    return value if isinstance(value, known) else str(value)
