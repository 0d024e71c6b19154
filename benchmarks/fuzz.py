"""Damage what the tool reads, and see what it makes of it.

    python -m benchmarks.fuzz                                  # 100,000 mutations of all surfaces
    python -m benchmarks.fuzz --mutations 2000 --seed 1 --only captures,reports

Run from the root of the repository. Each surface is a file or a folder that somebody may send, or that a disk may
damage, and what reads it, in this process. A mutation flips a bit, drops, repeats or cuts lines and bytes, or exchanges
a key or a value of a JSON document. Wanted: no capture of a run with a finding that reads as consistent, no exception
that is no `ConsistencyError`, and nothing that takes longer than 20 s.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from consistency.capture.reader import read_capture
from consistency.case import standard
from consistency.case.builtin import builtin_folder
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.case.reading import read_options
from consistency.errors import ConsistencyError
from consistency.extras.diagnosis.drill.drill import choose, drill, prepare_trials
from consistency.extras.diagnosis.drill.plantable import several_adapters
from consistency.extras.operations.history.baseline import read_baseline
from consistency.extras.operations.history.past import HistoryAndBaseline
from consistency.extras.operations.history.store import History
from consistency.extras.operations.status.reading import read_status
from consistency.report.json import as_bytes
from consistency.worker.faults.catalogue import FAULTS
from consistency.workflows import judging, pipeline
from consistency.workflows.report_folder import read_comparison

SLOW_S = 20.0
FOUND_BY_ONE_ROW = ("placed-elsewhere", "labels-changed-on-hop", "adapter-inactive", "transfer-corrupt", "merge-off")
"""Faults whose findings hang on few rows, most of them with no second evidence."""

Random = random.Random
NASTY: tuple[Any, ...] = (None, True, -1, 0, 10**30, 1.5, 1e308, "nan", "", "\x1b[31m\n", [], {}, [None], {"a": 1})


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """Something that is read.

    Attributes
    ----------
    name : str
    folder : Path
        What is damaged: one of its files at a time.
    read : callable
        Read the folder, and return a verdict where it has one.
    files : str
        Pattern of the files that are damaged.
    """

    name: str
    folder: Path
    read: Callable[[Path], str | None]
    files: str = "**/*"


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of the mutations of one surface."""

    mutations: int = 0
    false_consistent: list[str] = field(default_factory=list)
    tracebacks: dict[str, str] = field(default_factory=dict)
    slow: list[str] = field(default_factory=list)


# --- what is read ---------------------------------------------------------------------------------------------------


def surfaces(home: Path) -> Iterator[Surface]:
    """Make every surface below a folder."""
    yield from captures(home / "captures")
    yield from of_a_run(home / "run")
    yield from of_a_user(home / "user")


def captures(home: Path) -> Iterator[Surface]:
    """Yield captures of runs in which a fault was planted: each has a finding."""
    faults = choose([name for name in FOUND_BY_ONE_ROW if name in FAULTS])
    options = Options(devices=("cpu", "cpu@baseline"))
    with several_adapters() as several:
        trials = prepare_trials(faults, options, several=several, out=None, watch=_silent)
        drill(trials, out=home, watch=_silent, replace=True)
    for fault in faults:
        yield Surface(
            name=f"captures of {fault.name}", folder=home / fault.name / "captures", read=_verdict,
            files="**/*.json*",
        )  # fmt: skip


def _verdict(folder: Path) -> str:
    found = judging.compare_captures([read_capture(folder)])
    as_bytes(found)
    return found.verdict


def of_a_run(home: Path) -> Iterator[Surface]:
    """Yield what a run leaves, and what a history keeps of it."""
    options = Options(devices=("cpu", "cpu@baseline"), stages=(standard.BASE, standard.MERGED))
    history, out = History(str(home / "history")), home / "out"
    pipeline.run(pipeline.prepare(options), out, watch=_silent, past=HistoryAndBaseline(history=history))
    report = home / "report"
    report.mkdir()
    for name in ("report.json", "status.json"):
        shutil.copy(out / name, report / name)
    yield Surface(name="reports", folder=report, read=_report, files="report.json")
    yield Surface(name="status", folder=report, read=_status, files="status.json")
    yield Surface(name="histories", folder=home / "history", read=_history)


def _report(folder: Path) -> None:
    as_bytes(read_comparison(folder)[0])


def _status(folder: Path) -> None:
    read_status(folder)


def _options(folder: Path) -> None:
    read_options(folder / "case.toml")


def _baseline(folder: Path) -> None:
    read_baseline(folder / "baseline.json")


def _history(folder: Path) -> None:
    history = History(str(folder))
    for run in history.runs():
        for worker in run.workers:
            history.table(worker.table)


def of_a_user(home: Path) -> Iterator[Surface]:
    """Yield models, adapters, and files that a user writes."""
    shutil.copytree(builtin_folder("llama"), home / "case")
    yield Surface(name="configs and headers", folder=home / "case", read=_case, files="**/*")
    options, baseline = home / "options", home / "baseline"
    options.mkdir()
    (options / "case.toml").write_text(
        'base = "./llama"\nadapter = "./lora"\ndevices = ["cpu", "cuda:0"]\nrepeat = 2\n\n'
        "[set]\ncudnn_benchmark = false\n\n"
        '[[tolerance]]\nstage = "forward"\nlayer = "*"\natol = 1e-5\nrtol = 1e-4\n'
    )
    yield Surface(name="TOML", folder=options, read=_options)
    baseline.mkdir()
    (baseline / "baseline.json").write_text(json.dumps({"schema": "consistency.baseline/1", "accepted": [{
        "kind": "zeros", "devices": ["GPU-1"], "tensors": ["adapter::a.lora_B"], "message": "zeros", "reason": "known",
        "date": "2026-01-01",
    }]}))  # fmt: skip
    yield Surface(name="baselines", folder=baseline, read=_baseline)


def _case(folder: Path) -> None:
    prepare_case(Options(base=str(folder / "base"), adapter=str(folder / "adapter")))


# --- how it is damaged ----------------------------------------------------------------------------------------------


def damaged(raw: bytes, by: Random) -> tuple[bytes, str]:
    """Return bytes with one mutation, and its name."""
    kind = by.choice([_bit, _bit, _bit, _byte, _dropped_line, _repeated_line, _cut_at_line, _cut, _document])
    return kind(raw, by), kind.__name__.strip("_")


def _bit(raw: bytes, by: Random) -> bytes:
    found = bytearray(raw)
    if found:
        place = by.randrange(min(len(found), 2**20))  # headers are in front
        found[place] ^= 1 << by.randrange(8)
    return bytes(found)


def _byte(raw: bytes, by: Random) -> bytes:
    place = by.randrange(len(raw) + 1)
    return raw[:place] + by.choice([b"", by.randbytes(1), by.randbytes(9)]) + raw[place + 1 :]


def _dropped_line(raw: bytes, by: Random) -> bytes:
    lines = raw.splitlines(keepends=True)
    if lines:
        del lines[by.randrange(len(lines))]
    return b"".join(lines)


def _repeated_line(raw: bytes, by: Random) -> bytes:
    lines = raw.splitlines(keepends=True)
    if lines:
        lines.insert(by.randrange(len(lines)), by.choice(lines))
    return b"".join(lines)


def _cut_at_line(raw: bytes, by: Random) -> bytes:
    lines = raw.splitlines(keepends=True)
    return b"".join(lines[: by.randrange(len(lines) + 1)])


def _cut(raw: bytes, by: Random) -> bytes:
    return raw[: by.randrange(len(raw) + 1)]


def _document(raw: bytes, by: Random) -> bytes:
    """Exchange a key or a value of a JSON document, or of a line of one; of other files flip a bit."""
    lines = raw.splitlines(keepends=True)
    try:
        value = json.loads(raw)
        return json.dumps(_exchanged(value, by)).encode()
    except (ValueError, RecursionError):
        pass
    try:
        place = by.randrange(len(lines))
        lines[place] = json.dumps(_exchanged(json.loads(lines[place]), by)).encode() + b"\n"
        return b"".join(lines)
    except (ValueError, RecursionError):
        return _bit(raw, by)


def _exchanged(value: Any, by: Random) -> Any:
    if isinstance(value, dict) and value and by.random() < 0.9:
        key = by.choice(list(value))
        what = by.randrange(8)
        if what == 0:
            return {name: one for name, one in value.items() if name != key}
        if what == 1:
            return {name + "x" if name == key else name: one for name, one in value.items()}
        return {name: _exchanged(one, by) if name == key else one for name, one in value.items()}
    if isinstance(value, list) and value and by.random() < 0.9:
        place = by.randrange(len(value))
        return [*value[:place], _exchanged(value[place], by), *value[place + 1 :]]
    return by.choice(NASTY)


# --- the run --------------------------------------------------------------------------------------------------------


def fuzz(surface: Surface, mutations: int, by: Random, scratch: Path) -> Outcome:
    """Damage a copy of one surface again and again, and read it."""
    outcome, place = Outcome(), scratch / "damaged"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(surface.folder, place)
    files = sorted(path for path in place.glob(surface.files) if path.is_file())
    healthy = surface.read(place)
    assert healthy != "consistent", f"{surface.name} has no finding to lose"
    for number in range(mutations):
        file = by.choice(files)
        raw = file.read_bytes()
        changed, kind = damaged(raw, by)
        if changed == raw:
            continue
        file.write_bytes(changed)
        what = f"{number}: {kind} in {file.relative_to(place)}"
        began = time.monotonic()
        try:
            if surface.read(place) == "consistent":
                outcome.false_consistent.append(what)
        except ConsistencyError:
            pass
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            key = f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}"
            outcome.tracebacks.setdefault(key, f"{what}: {error}"[:300])
        if time.monotonic() - began > SLOW_S:
            outcome.slow.append(what)
        outcome.mutations += 1
        file.write_bytes(raw)
    return outcome


def run(
    mutations: int, seed: int, *, only: Sequence[str] = (), make: Callable[[Path], Iterator[Surface]] = surfaces
) -> Mapping[str, Outcome]:
    """Share mutations out among the surfaces, and return what became of them by name."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        home = Path(scratch)
        chosen = [one for one in make(home) if not only or any(one.name.startswith(name) for name in only)]
        share = max(1, mutations // len(chosen))
        return {one.name: fuzz(one, share, Random(seed), home) for one in chosen}


def _silent(_label: str, _event: object) -> None:
    """Show no progress."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=lambda text: text.split(","), default=())
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    began = time.monotonic()
    found = run(given.mutations, given.seed, only=given.only)
    print("| surface | mutations | false consistent | tracebacks | over 20 s |\n| --- | --- | --- | --- | --- |")
    for name, one in found.items():
        cells = (name, one.mutations, len(one.false_consistent), len(one.tracebacks), len(one.slow))
        print("| " + " | ".join(map(str, cells)) + " |")
    for name, one in found.items():
        for text in (*one.false_consistent, *(f"{k}: {v}" for k, v in one.tracebacks.items()), *one.slow):
            print(f"{name}: {text}")
    print(f"{time.monotonic() - began:.0f} s; msgspec {msgspec.__version__}")


if __name__ == "__main__":
    main()
