"""Kill commands at random moments, and let several write one place at a time: nothing may be damaged, lost or left.

    python -m benchmarks.crashes --kills 200 --rounds 50

Each kill is SIGKILL to one command, half of them in the last fifth of its time, when it writes. Then every file that
commands have written is read: each has to be whole, and the files of one report have to agree. A history never has
fewer runs than before, a baseline never fewer entries; a command that ended before it was killed has added its own. The
same command is run again as a whole; what is left of the killed one in TMPDIR or beside results is counted then.

In a round, three commands write one report, three one baseline, and three one history. The status is 1 if any count is
not 0.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from consistency.capture.json_codec import decode_json
from consistency.capture.reader import read_capture
from consistency.comparison.suite import SuiteResult
from consistency.errors import ConsistencyError
from consistency.extras.operations.history.baseline import read_baseline
from consistency.extras.operations.history.store import History
from consistency.extras.operations.status.record import Status
from consistency.report.json import read as read_report

COUNTS = ("damaged", "disagree", "lost", "left", "orphans", "failed")
_ENDED = (0, 1)
_REFUSED = "another process writes"
_ORPHAN_S = 20.0
_LEFTOVERS = ("*.tmp", ".*.partial", ".*.earlier", ".*.claim", ".claim")


@dataclass(kw_only=True)
class Place:
    """The folder of the benchmark: what commands write, and their TMPDIR."""

    home: Path
    counts: Counter[str] = field(default_factory=Counter)

    def start(self, *words: object) -> subprocess.Popen[str]:
        """Start a command in the folder."""
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "consistency", *map(str, words)],
            cwd=self.home, env={**os.environ, "TMPDIR": str(self.home / "tmp")}, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip

    def whole(self, *words: object) -> float:
        """Run a command to its end; return its time in seconds."""
        started = time.monotonic()
        process = self.start(*words)
        _, errors = process.communicate()
        if process.returncode not in _ENDED:
            self.note("failed", f"{' '.join(map(str, words))}: {process.returncode}: {errors.strip()[-300:]}")
        return time.monotonic() - started

    def note(self, kind: str, text: object) -> None:
        """Count something that must not be, and print it."""
        self.counts[kind] += 1
        print(f"  {kind}: {text}", flush=True)

    def runs(self) -> int:
        """Return the number of runs of the history."""
        history = History(str(self.home / "history"))
        count = len(list(history.runs()))
        for text in history.damage:
            self.note("damaged", text)
        return count

    def accepted(self) -> int:
        """Return the number of entries of the baseline."""
        try:
            return len(read_baseline(self.home / "baseline.json").accepted)
        except ConsistencyError as error:
            self.note("damaged", error)
            return 0

    def check(self) -> None:
        """Read every file that a command has written."""
        for folder in (self.home / "run", self.home / "compared", *self.home.glob("suite/cases/*")):
            if folder.name != "compared" and (folder / "captures").exists():
                self._try(lambda folder=folder: self._check_capture(folder))  # type: ignore[misc]
            if (folder / "report.json").exists():
                self._try(lambda folder=folder: self._check_report(folder))  # type: ignore[misc]
        if (suite := self.home / "suite/suite.json").exists():
            self._try(lambda: decode_json(suite.read_bytes(), SuiteResult))
        for name in ("run/captures", "compared/report.json"):
            aside = self.home / f"{Path(name).parent}/.{Path(name).name}.earlier"
            if not (self.home / name).exists() and not aside.exists():
                self.note("lost", name)

    def _try(self, check: Callable[[], object]) -> None:
        try:
            check()
        except (ConsistencyError, OSError, ValueError, msgspec.MsgspecError) as error:
            self.note("damaged", error)

    def _check_capture(self, folder: Path) -> None:
        for text in read_capture(folder).damage:
            self.note("damaged", text)

    def _check_report(self, folder: Path) -> None:
        found = read_report((folder / "report.json").read_bytes())
        words: set[str] = {found.verdict}
        if (folder / "status.json").exists():
            words.add(decode_json((folder / "status.json").read_bytes(), Status).verdict)
        for name in ("report.md", "report.html"):
            if (folder / name).exists():
                text = (folder / name).read_text(encoding="utf-8")
                words |= {"inconsistent" if "INCONSISTENT" in text else "consistent"} if text else {"empty"}
                if name.endswith("html") and not text.rstrip().endswith("</html>"):
                    self.note("damaged", folder / name)
        if len(words) > 1:
            self.note("disagree", f"{folder}: {', '.join(sorted(words))}")

    def leftovers(self) -> list[Path]:
        """Return what nobody needs any more; notes of runs that did not end are of the history, with their claims."""
        found = [*(self.home / "tmp").glob("consistency-*")]
        for pattern in _LEFTOVERS:
            found += [path for path in self.home.rglob(pattern) if path.parent.name != "started"]
        return [path for path in found if path.exists()]

    def orphans(self) -> list[str]:
        """Return the processes whose TMPDIR is that of the benchmark, when they had time to end."""
        until = time.monotonic() + _ORPHAN_S
        mark = f"TMPDIR={self.home / 'tmp'}".encode()
        while True:
            found = [one.parent.name for one in Path("/proc").glob("[0-9]*/environ") if mark in _content(one)]
            if not found or time.monotonic() > until:
                return found
            time.sleep(0.1)


def kill(place: Place, words: Sequence[object], duration_s: float, random_: random.Random) -> None:
    """Start a command, kill it at a random moment, look at what it left, and run it again."""
    runs, accepted = place.runs(), place.accepted()
    share = random_.uniform(0.8, 1.05) if random_.random() < 0.5 else random_.uniform(0.0, 0.8)
    process = place.start(*words)
    time.sleep(share * duration_s)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    for pid in place.orphans():
        place.note("orphans", pid)
    place.check()
    has_ended = process.returncode in _ENDED
    for what, before, now, adds in (
        ("runs of the history", runs, place.runs(), "--history" in words),
        ("entries of the baseline", accepted, place.accepted(), "accept" in words),
    ):
        if now < before + (adds and has_ended):
            place.note("lost", f"{what}: {before} before, {now} now")
    place.whole(*words)
    place.check()
    for path in place.leftovers():
        place.note("left", path.relative_to(place.home))


def at_once(place: Place, reports: Sequence[str], number: int) -> None:
    """Have three commands write each of a report, a baseline and a history at the same time."""
    runs, accepted = place.runs(), place.accepted()
    accept = ("baseline", "accept", reports[1], "--baseline", "baseline.json", "--reason")
    jobs: list[list[tuple[object, ...]]] = [
        [("compare", reports[n % 2], "--out", "compared", "--force") for n in range(number, number + 3)],
        [(*accept, f"round {number}") for _ in range(3)],
        [("compare", reports[n % 2], "--history", "history") for n in range(3)],
    ]
    for words in jobs:
        started = [place.start(*one) for one in words]
        for process in started:
            _, errors = process.communicate()
            if process.returncode not in _ENDED and not ("--out" in words[0] and _REFUSED in errors):
                place.note("failed", errors.strip()[-300:])
    place.check()
    for what, before, now in (("runs", runs, place.runs()), ("entries", accepted, place.accepted())):
        if now != before + 3:
            place.note("lost", f"{what}: {before} before, {now} after three more")
    for path in place.leftovers():
        place.note("left", path.relative_to(place.home))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="crashes-"))
    (home / "tmp").mkdir()
    place = Place(home=home)
    try:
        _measure(place, parsed.kills, parsed.rounds, random.Random(parsed.seed))
    finally:
        shutil.rmtree(home, ignore_errors=True)
    print(", ".join(f"{kind} {place.counts[kind]}" for kind in COUNTS))
    return 1 if place.counts else 0


def _measure(place: Place, kills: int, rounds: int, random_: random.Random) -> None:
    place.whole("drill", "--only", "labels-changed-on-hop", "--out", "drill")
    wrong = "drill/labels-changed-on-hop"
    (place.home / "suite.toml").write_text(
        'base = "builtin:llama"\ndevices = ["cpu"]\nstages = ["adapter"]\n[[case]]\nname = "a"\n[[case]]\nname = "b"\n'
    )
    run = ("run", "--devices", "cpu,cpu@baseline", "--stages", "adapter,merged")
    commands: dict[str, tuple[object, ...]] = {
        "run": (*run, "--out", "run", "--force"),
        "compare": ("compare", "run", "--out", "compared", "--force", "--history", "history"),
        "baseline": ("baseline", "accept", wrong, "--baseline", "baseline.json", "--reason", "known"),
        "suite": ("run", "suite.toml", "--out", "suite", "--force"),
    }
    times = {name: place.whole(*words) for name, words in commands.items()}
    print(", ".join(f"{name} {duration_s:.1f} s" for name, duration_s in times.items()), flush=True)
    names = list(commands)
    for number in range(kills):
        name = names[number % len(names)]
        print(f"kill {number + 1} of {kills}: {name}", flush=True)
        kill(place, commands[name], times[name], random_)
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", flush=True)
        at_once(place, ("run", wrong), number)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


if __name__ == "__main__":
    sys.exit(main())
