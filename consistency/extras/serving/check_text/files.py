"""The records of a file: JSON lines, one JSON value, a table of pyarrow, or what `torch.save` wrote."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from consistency.errors import InputError, first_line

_GZIP, _PARQUET, _ZIP = b"\x1f\x8b", b"PAR1", b"PK\x03\x04"
"""How a compressed file, a table and a file of `torch.save` begin."""


def read_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield each record of a file after the place where it stands, such as `line 3`.

    Raises
    ------
    InputError
        The file cannot be read, or is of no such kind.
    """
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError("the texts cannot be read", where=path, got=first_line(error)) from error
    if content.startswith(_PARQUET):
        yield from _numbered("row", _rows_of_table(content, path))
    elif content.startswith(_ZIP):
        yield from _numbered("record", _as_list(_saved_by_torch(content, path)))
    else:
        yield from _json_records(content, path)


def _json_records(content: bytes, path: Path) -> Iterator[tuple[str, Any]]:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError("the texts cannot be read", where=path, got=first_line(error)) from error
    # only at \n: JSON may have other ends of lines, such as U+2028, inside its strings
    lines = text.split("\n")
    if _parsed(lines[0]) is None:
        whole = _parsed(text)  # a value over many lines
        if whole is not None:
            yield from _numbered("record", _as_list(whole[0]))
            return
    is_one_line = not any(line.strip() for line in lines[1:])
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            got = first_line(error)
            raise InputError(f"line {number} is no text", where=path, got=got, wanted="a JSON object") from error
        if is_one_line and isinstance(record, list):
            yield from _numbered("record", record)
        else:
            yield f"line {number}", record


def _parsed(text: str) -> tuple[Any] | None:
    """Return the value of a JSON text, in a tuple since it may be None; None if it is no JSON."""
    try:
        return (json.loads(text),)
    except (ValueError, RecursionError):
        return None


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _numbered(word: str, records: list[Any]) -> Iterator[tuple[str, Any]]:
    for number, record in enumerate(records, 1):
        yield f"{word} {number}", record


def _rows_of_table(content: bytes, path: Path) -> list[Any]:
    try:
        import pyarrow.parquet  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise InputError(
            "a Parquet file needs pyarrow", where=path, hint="pip install pyarrow, or write the rows as JSON lines"
        ) from error
    try:
        rows: list[Any] = pyarrow.parquet.read_table(io.BytesIO(content)).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's errors are of these kinds
        raise InputError("the texts cannot be read", where=path, got=first_line(error)) from error
    return rows


def _saved_by_torch(content: bytes, path: Path) -> Any:
    """Return what `torch.save` wrote, its tensors as lists; nothing of the file is run."""
    import torch

    try:
        saved = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged archive, and any object that is more than numbers and words
        raise InputError(
            "the texts cannot be read without running code of the file",
            where=path,
            got=first_line(error),
            hint="write its records as JSON lines, tensors as lists",
        ) from error
    return _without_tensors(saved)


def _without_tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_tensors(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_tensors(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value
