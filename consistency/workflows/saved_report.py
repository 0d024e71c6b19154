"""Read `report.json` again: what a command needs of it, or the whole comparison."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from consistency.capture.json_codec import decode_json
from consistency.comparison.result import Comparison, Finding, TensorComparison, WorkerSummary
from consistency.errors import UsageError
from consistency.report.json import SCHEMA
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
    tensors = [
        msgspec.structs.replace(one, layer=layer) for one in found.tensors for layer in one.layers or [one.layer]
    ]
    return msgspec.structs.replace(found, tensors=tuple(tensors)), folder


def _read(path: Path, kind: type[T]) -> tuple[T, Path]:
    file = latest_run(path) / REPORT if path.is_dir() else path
    try:
        head = decode_json(file.read_bytes(), kind)
    except FileNotFoundError:
        is_suite = (file.parent / SUITE).exists()
        hint = f"this is a suite: give the folder of a case, {file.parent / 'cases' / 'NAME'}" if is_suite else None
        wanted = f"{REPORT}, or the --out folder of a run"
        raise UsageError("no report here", where=path, wanted=wanted, hint=hint) from None
    except OSError as error:
        raise UsageError("cannot read the report", where=file, got=error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError("not a report", where=file, got=error) from None
    if head.schema != SCHEMA:
        raise UsageError("unsupported report schema", where=file, got=head.schema, wanted=SCHEMA)
    return head, file.parent
