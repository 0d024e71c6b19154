"""Run tests and built-in cases with the versions of one environment; make the table of `docs/supported-versions.md`.

    tox -e corner-oldest-py313                              # one corner of the supported versions: `tox list`
    python -m benchmarks.versions FILE                      # what tox runs: the versions of this Python, into FILE
    python -m benchmarks.versions --write build/versions    # the page: rows of all files there in place of earlier ones

Run from the root of the repository, with the environment's Python; the installed package is used. The tests are those
that start no process, and the built-in cases in float32 on two kernel variants, each in a process of its own. The exit
status is 1 where a test fails or a case is not consistent.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from packaging.version import Version

from benchmarks.generated_parts import show

PAGE = Path(__file__).parents[1] / "docs" / "supported-versions.md"
PACKAGES = ("torch", "transformers", "peft", "numpy", "accelerate", "safetensors", "msgspec", "pytest")
BUILT_IN = ("llama", "gpt2", "bert")
FAST = ("-n", "2", "-m", "not process and not cluster and not engines and not aarch64 and not sanitizers and not large")


class Corner(msgspec.Struct, frozen=True, kw_only=True):
    """The versions of one environment, and what came out.

    Attributes
    ----------
    tests : mapping of str to int
        Number of tests that `passed`, `failed` or were `skipped`.
    cases : mapping of str to str
        The verdict of each built-in case, or the last line that it printed where it has none.
    failed : tuple of str
        The tests that failed, by class and name as JUnit XML has them.
    kernels : str
        The instruction set of torch's kernels on the processor that it was run on, as a report names it.
    date : str
        The day on which it was run: ISO 8601, UTC.
    """

    python: str
    versions: dict[str, str]
    tests: dict[str, int]
    cases: dict[str, str]
    failed: tuple[str, ...] = ()
    kernels: str
    date: str

    @property
    def passed(self) -> bool:
        return not self.failed and set(self.cases.values()) == {"consistent"}


def run(options: list[str]) -> Corner:
    """Run all that a corner has to pass, with this Python."""
    with tempfile.TemporaryDirectory(prefix="consistency-versions-") as scratch:
        cases = {name: _verdict(name, Path(scratch) / name) for name in BUILT_IN}
        kernels = _kernels(Path(scratch) / BUILT_IN[0])
        results = Path(scratch) / "results.xml"
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={results}"]
        subprocess.run([*command, *(options or FAST)], check=False)
        tests, failed = _counted(results)
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return Corner(
        python=platform.python_version(),
        versions=versions,
        tests=tests,
        cases=cases,
        failed=failed,
        kernels=kernels,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )


def _verdict(name: str, out: Path) -> str:
    command = [sys.executable, "-P", "-m", "consistency", "run", "--base", f"builtin:{name}", "--dtype", "float32"]
    done = subprocess.run(
        [*command, "--devices", "cpu,cpu@baseline", "--out", str(out)], capture_output=True, text=True, check=False
    )
    if (out / "report.json").exists():
        found: dict[str, Any] = json.loads((out / "report.json").read_text(encoding="utf-8"))
        return str(found["verdict"])
    return next(iter((done.stderr or done.stdout).strip().splitlines()[-1:]), f"exit status {done.returncode}")


def _kernels(out: Path) -> str:
    """Return the architecture of the worker `cpu` in a report, without that of the machine; empty without a report."""
    if not (out / "report.json").exists():
        return ""
    found: dict[str, Any] = json.loads((out / "report.json").read_text(encoding="utf-8"))
    architecture = next(worker["architecture"] for worker in found["workers"] if worker["name"] == "cpu")
    return str(architecture.partition(" ")[2])


def _counted(results: Path) -> tuple[dict[str, int], tuple[str, ...]]:
    counts: Counter[str] = Counter(passed=0, failed=0, skipped=0)
    failed = []
    for case in ElementTree.parse(results).iter("testcase"):
        kinds = {child.tag for child in case}
        what = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts[what] += 1
        if what == "failed":
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    if not sum(counts.values()):
        raise SystemExit("no test was run")
    return dict(counts), tuple(failed)


SHOWN = ("torch", "transformers", "peft", "numpy")
TITLES = ("`tox -e`", "Python", *SHOWN, "kernels", "built-in cases", "tests passed", "skipped", "failed", "date")


def row_of(name: str, corner: Corner) -> tuple[str, ...]:
    """Return the row of a corner in the table of the page."""
    verdicts = ", ".join(dict.fromkeys(corner.cases.values()))
    counts = (str(corner.tests[what]) for what in ("passed", "skipped", "failed"))
    versions = (corner.versions[package] for package in SHOWN)
    return (f"`{name}`", corner.python, *versions, corner.kernels, verdicts, *counts, corner.date)


def rows_of(page: str) -> list[tuple[str, ...]]:
    """Return the rows that the page has."""
    lines = [line for line in page.splitlines() if line.startswith("| `corner-")]
    return [tuple(cell.strip() for cell in line.strip("| ").split("|")) for line in lines]


def table(rows: Iterable[tuple[str, ...]]) -> str:
    """Return the table of the page: a corner for each line, the newest versions first."""
    lines = [TITLES, ("---",) * len(TITLES), *sorted(rows, key=_newest, reverse=True)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", type=Path, help="the file to write, or with --write the folder of such files")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    given, options = parser.parse_known_args()
    if given.write:
        files = sorted(given.where.glob("*.json"))
        made = [row_of(file.stem, msgspec.json.decode(file.read_bytes(), type=Corner)) for file in files]
        # a corner that was not run again keeps its row, with its date
        rows = {row[0]: row for row in (*rows_of(PAGE.read_text(encoding="utf-8")), *made)}
        show({"corners": table(rows.values())}, PAGE, write=True)
        return 0
    found = run(options)
    given.where.parent.mkdir(parents=True, exist_ok=True)
    given.where.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    print(msgspec.json.format(msgspec.json.encode(found)).decode())
    return 0 if found.passed else 1


def _newest(row: tuple[str, ...]) -> tuple[Version, ...]:
    """Return the versions of torch, transformers, PEFT and Python of a row."""
    cells = dict(zip(TITLES, row, strict=True))
    return tuple(Version(cells[title]) for title in (*SHOWN[:3], "Python"))


if __name__ == "__main__":
    sys.exit(main())
