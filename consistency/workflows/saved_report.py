"""Read `report.json` again: what a command needs of it, or the whole comparison."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from consistency.capture.json_codec import decode_json, encode_json
from consistency.comparison.result import Comparison, Finding, TensorComparison, WorkerSummary
from consistency.errors import UsageError
from consistency.report.json import SCHEMA
from consistency.report.redaction import Redaction, redaction_of
from consistency.report.runs import REPORT, SUITE, latest_run


class ReportHead(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `report.json` that most commands need.

    Attributes
    ----------
    created, host : str or None, str
        When (ISO 8601, UTC) and where the report was made; not in reports of earlier versions.
    command : tuple of str
        The command line that made it, word by word.
    """

    schema: str
    findings: tuple[Finding, ...]
    created: str | None = None
    host: str = ""
    command: tuple[str, ...] = ()
    captures: tuple[str, ...] = ()
    workers: tuple[WorkerSummary, ...] = ()


class _Tensor(TensorComparison, frozen=True, kw_only=True):
    """An entry of `tensors[]`: of several equal ones the first, and the layers of all."""

    layers: tuple[str, ...] = ()


class _Whole(Comparison, frozen=True, kw_only=True):
    schema: str
    tensors: tuple[_Tensor, ...] = ()


T = TypeVar("T", ReportHead, _Whole)
D = TypeVar("D")


def read_report(path: Path) -> tuple[ReportHead, Path]:
    """Read a report, given as its file, its folder, or the folder of dated runs; return it and its folder.

    Raises
    ------
    UsageError
        There is no report, or its schema is not supported.
    """
    return _read(path, ReportHead)


def read_comparison(path: Path) -> tuple[Comparison, Path]:
    """Read the comparison that a report was written of, and raise as `read_report`.

    Tensors that share an entry of the file each get one again.
    """
    found, folder = _read(path, _Whole)
    return _unfolded(found), folder


def read_redacted(path: Path) -> tuple[Comparison, Redaction]:
    """Read the comparison without what names people and machines, and return what took that out."""
    content, file = _content(path)
    table = _decoded(content, dict[str, Any], file)
    redaction = redaction_of(table)
    found = _checked(_decoded(encode_json(redaction.value(table)), _Whole, file), file)
    return _unfolded(found), redaction


def redaction_for(path: Path, texts: Iterable[str]) -> Redaction:
    """Return what takes the names of people and machines out of a report, and of texts that were made of it."""
    content, file = _content(path)
    return redaction_of(_decoded(content, dict[str, Any], file), more=texts)


def _unfolded(found: _Whole) -> Comparison:
    tensors = [
        msgspec.structs.replace(one, layer=layer) for one in found.tensors for layer in one.layers or [one.layer]
    ]
    return msgspec.structs.replace(found, tensors=tuple(tensors))


def _read(path: Path, kind: type[T]) -> tuple[T, Path]:
    content, file = _content(path)
    return _checked(_decoded(content, kind, file), file), file.parent


def _content(path: Path) -> tuple[bytes, Path]:
    file = latest_run(path) / REPORT if path.is_dir() else path
    try:
        return file.read_bytes(), file
    except FileNotFoundError:
        is_suite = (file.parent / SUITE).exists()
        hint = f"this is a suite: give the folder of a case, {file.parent / 'cases' / 'NAME'}" if is_suite else None
        wanted = f"{REPORT}, or the --out folder of a run"
        raise UsageError("no report here", where=path, wanted=wanted, hint=hint) from None
    except OSError as error:
        raise UsageError("cannot read the report", where=file, got=error) from None


def _decoded(content: bytes, kind: type[D], file: Path) -> D:
    try:
        return decode_json(content, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError("not a report", where=file, got=error) from None


def _checked(head: T, file: Path) -> T:
    if head.schema != SCHEMA:
        raise UsageError("unsupported report schema", where=file, got=head.schema, wanted=SCHEMA)
    return head
