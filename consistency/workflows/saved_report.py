"""Read `report.json` again: what a command needs of it, or the whole comparison."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from consistency.capture.archive import read_member
from consistency.capture.bounded import read_regular
from consistency.capture.folder import CASES, MANIFEST
from consistency.capture.json_codec import decode_json, encode_json
from consistency.capture.transport import ARCHIVE
from consistency.capture.wording import some
from consistency.comparison.result import Comparison
from consistency.comparison.suite import SuiteResult
from consistency.errors import UsageError
from consistency.report.json import SCHEMA, named, read, with_names
from consistency.report.redaction import Redaction, redaction_of
from consistency.report.runs import REPORT, SUITE, latest_run

_MOST_FOLDERS = 8  # named where there is no report, but below


D = TypeVar("D")


def read_comparison(path: Path) -> tuple[Comparison, Path]:
    """Read a report, given as its file, its folder, or the folder of dated runs; return it and its folder.

    Raises
    ------
    UsageError
        There is no report, or its schema is not supported.
    """
    content, file = _content(path)
    _check_schema(content, file)
    return _tried(lambda: read(content), file), file.parent


def read_suite(path: Path) -> tuple[SuiteResult, Path] | None:
    """Return the suite of a folder, or of the folder of dated runs, and its folder; None where there is none."""
    file = latest_run(path) / SUITE if path.is_dir() else path
    if file.name != SUITE or (file.parent / REPORT).exists() or not file.exists():
        return None
    return _decoded(_bytes(file, path), SuiteResult, file), file.parent


def read_redacted(path: Path) -> tuple[Comparison, Redaction]:
    """Read the comparison without what names people and machines, and return what took that out."""
    content, file = _content(path)
    _check_schema(content, file)
    table = _decoded(content, dict[str, Any], file)
    found: list[Redaction] = []

    def redacted(plain: dict[str, Any]) -> dict[str, Any]:
        found.append(redaction_of(plain))
        changed: dict[str, Any] = found[0].value(plain)
        return changed

    table = _tried(lambda: with_names(table, redacted), file)
    return _tried(lambda: read(encode_json(table)), file), found[0]


def redaction_for(path: Path, texts: Iterable[str]) -> Redaction:
    """Return what takes the names of people and machines out of a report, and of texts that were made of it."""
    content, file = _content(path)
    _check_schema(content, file)
    table = _decoded(content, dict[str, Any], file)
    return redaction_of(_tried(lambda: named(table), file), more=texts)


def _content(path: Path) -> tuple[bytes, Path]:
    if path.is_file() and path.name.endswith(ARCHIVE):
        return read_member(path, REPORT), path
    file = latest_run(path) / REPORT if path.is_dir() else path
    if file.exists():
        return _bytes(file, path), file
    hint = None
    if (file.parent / SUITE).exists():
        hint = f"this is a suite: give the folder of a case, {file.parent / CASES / 'NAME'}"
    elif below := sorted(str(one.parent) for one in path.glob(f"*/{REPORT}")):
        hint = f"there are reports in {some(below, _MOST_FOLDERS)}"
    elif any((path / name).exists() for name in (MANIFEST, f"captures/{MANIFEST}")):
        hint = f"this is a capture: consistency compare {shlex.quote(str(path))} makes its report"
    raise UsageError("no report here", where=path, wanted=f"{REPORT}, or the --out folder of a run", hint=hint)


def _bytes(file: Path, given: Path) -> bytes:
    try:
        return read_regular(file, given if given.is_dir() else None)
    except OSError as error:
        raise UsageError("cannot read the report", where=file, got=error) from None


def _decoded(content: bytes, kind: type[D], file: Path) -> D:
    return _tried(lambda: decode_json(content, kind), file)


def _tried(attempt: Callable[[], D], file: Path) -> D:
    try:
        return attempt()
    except (msgspec.DecodeError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError("not a report", where=file, got=error) from None


def _check_schema(content: bytes, file: Path) -> None:
    """Raise UsageError where a report has another schema."""
    found = _decoded(content, _Schema, file).schema
    if found != SCHEMA:
        raise UsageError("unsupported report schema", where=file, got=found, wanted=SCHEMA)


class _Schema(msgspec.Struct, frozen=True):
    schema: str
