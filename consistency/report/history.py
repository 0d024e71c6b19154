"""A history for people: one line per night, or one device from night to night."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from consistency.comparison.history.store import History, WorkerRecord
from consistency.errors import UsageError
from consistency.report.terminal import without_trailing_blanks
from consistency.report.text import clean

_MOST_FINDING = 100  # characters of a finding in a line


class NightRow(msgspec.Struct, frozen=True, kw_only=True):
    """One night."""

    at: str
    host: str
    case: str
    verdict: str
    devices: int
    lost: int
    drifted: tuple[str, ...]
    versions: dict[str, Any]
    findings: tuple[str, ...]


class DeviceRow(msgspec.Struct, frozen=True, kw_only=True, rename={"load_path": "road"}):
    """One device on one night.

    Attributes
    ----------
    bits : str
        Letters by stage: the same letter is the same bits as on the night with that letter before.
    change : str
        What is not as on the night before: `drift in merged`, `other software`, `other inputs`.
    """

    at: str
    host: str
    name: str
    device: str
    load_path: str
    status: str
    case: str
    bits: dict[str, str]
    change: str


def night_rows(history: History, last: int) -> list[NightRow]:
    """Return the last nights, the latest first; all of them where `last` is 0."""
    names = history.names()
    rows = []
    for night in history.runs(names[:last] if last else names):
        rows.append(
            NightRow(
                at=night.at,
                host=night.host,
                case=night.case,
                verdict=night.verdict,
                devices=len({worker.device for worker in night.workers}),
                lost=sum(worker.status != "ok" for worker in night.workers),
                drifted=tuple(dict.fromkeys(worker.name for worker in night.workers if worker.drift)),
                versions=night.versions,
                findings=night.findings,
            )
        )
    return rows


def device_rows(history: History, device: str, last: int) -> list[DeviceRow]:
    """Return one device from night to night, the earliest first.

    Raises
    ------
    UsageError
        No night has it.
    """
    rows: list[DeviceRow] = []
    before: dict[tuple[str, str], WorkerRecord] = {}
    letters: dict[tuple[str, str, str], dict[str, str]] = {}
    known: set[str] = set()
    for night in reversed(list(history.runs())):
        for worker in night.workers:
            known.add(worker.device)
            if device not in (worker.device, worker.name):
                continue
            key = (worker.device, worker.load_path)
            bits = {}
            for stage, digest in worker.bits.items():
                seen = letters.setdefault((*key, stage), {})
                bits[stage] = seen.setdefault(digest, _letter(len(seen)))
            row = DeviceRow(
                at=night.at, host=night.host, name=worker.name, device=worker.device, load_path=worker.load_path,
                status=worker.status, case=night.case, bits=bits, change=_change(before.get(key), worker),
            )  # fmt: skip
            rows.append(row)
            before[key] = worker
    if not rows:
        raise UsageError(
            "no night has this device", where="--device", got=device, wanted=", ".join(sorted(known)) or "none"
        )
    return rows[-last:] if last else rows


def print_nights(rows: list[NightRow], console: Console) -> None:
    """Print one line per night."""
    table = _table("night", "host", "case", "verdict", "devices", "drift", "torch", "first finding")
    for row in rows:
        finding = row.findings[0] if row.findings else ""
        devices = f"{row.devices}" + (f" ({row.lost} lost)" if row.lost else "")
        _add(table, row.at[:16].replace("T", " "), row.host, row.case, row.verdict, devices, ", ".join(row.drifted),
             row.versions.get("torch", ""), finding[:_MOST_FINDING])  # fmt: skip
    with without_trailing_blanks(console):
        console.print(table)
        console.print(f"\n{len(rows)} {'night' if len(rows) == 1 else 'nights'}")


def print_device(rows: list[DeviceRow], device: str, console: Console) -> None:
    """Print one device from night to night."""
    stages = list(dict.fromkeys(stage for row in rows for stage in row.bits))
    table = _table("night", "name", "road", "status", *stages, "not as on the night before")
    for row in rows:
        cells = [row.bits.get(stage, "") for stage in stages]
        _add(table, row.at[:16].replace("T", " "), row.name, row.load_path, row.status, *cells, row.change)
    with without_trailing_blanks(console):
        console.print(clean(f"{device}: the same letter is the same bits\n"))
        console.print(table)


def _change(before: WorkerRecord | None, now: WorkerRecord) -> str:
    parts = [f"drift in {', '.join(now.drift)}"] if now.drift else []
    if before is not None:
        parts += ["other software"] if before.software != now.software else []
        parts += ["other inputs"] if before.inputs != now.inputs else []
    return "; ".join(parts)


def _letter(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else str(number)


def _table(*titles: str) -> RichTable:
    table = RichTable(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for title in titles:
        table.add_column(title, header_style="bold", overflow="fold")
    return table


def _add(table: RichTable, *cells: object) -> None:
    table.add_row(*(Text(clean(str(cell))) for cell in cells))
