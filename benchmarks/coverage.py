"""Check every adapter that PEFT can save for the models of `benchmarks/zoo.py`, and summarize it in `docs/coverage.md`.

    python -m benchmarks.coverage DIR              # make models and adapters, run the suites, print the summary
    python -m benchmarks.coverage DIR --write      # the same, into docs/coverage.md
    python -m benchmarks.coverage DIR --table coverage-table.md      # the table of all cases, which goes with a release
    python -m benchmarks.coverage DIR --models t5 --stages base,adapter,merged,forward

Run from the root of the repository. `DIR/MODEL` gets the model, its adapters, `suite.toml`, and the
reports in `out`; a model that has reports there is not run again without `--again`. The devices are the three CPU
kernel variants. There is one suite per model, whose cases share the workers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import zoo
from benchmarks.generated_parts import show
from benchmarks.zoo import FIRST, MODELS, Combination

PAGE = Path(__file__).parents[1] / "docs" / "coverage.md"
DEVICES = ("cpu", "cpu@avx2", "cpu@baseline")
STAGES = ("base", "adapter", "merged", "forward", "gradient")

HALF = ("bfloat16", "float16")
"""Every method on the linear layers of the first model is checked in these dtypes too."""

EXAMPLE, EXAMPLE_METHODS = "bert", ("ADALORA", "IA3", "LOHA", "LORA")
"""The rows that the summary has in full: nothing is recomputed when these are loaded, so no kernel decides a cell."""

TOOK = "took.json"

_BAD = {"outside", "missing", "unexpected", "blocked"}


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Row:
    """One row of the table: what became of one case.

    Attributes
    ----------
    cells : tuple of str
        One per stage of `STAGES`.
    """

    model: str
    layer: str
    method: str
    dtype: str
    cells: tuple[str, ...] = field(compare=False)


@dataclass(slots=True)
class Notes:
    """Sentences below a table, each numbered once."""

    numbers: dict[str, int] = field(default_factory=dict)

    def of(self, text: str) -> str:
        return f"[{self.numbers.setdefault(text, len(self.numbers) + 1)}]"

    def listed(self) -> str:
        return "\n".join(f"{number}. {text}" for text, number in self.numbers.items())

    def expanded(self, cell: str) -> str:
        """Return a cell with the sentences in the place of their numbers."""
        texts = {f"[{number}]": text for text, number in self.numbers.items()}
        return " · ".join(texts.get(word, word) for word in cell.split())


# --- what is checked ------------------------------------------------------------------------------------------------


def cases(model: str) -> Iterator[tuple[Combination, str]]:
    """Yield every combination of a model that may be made, with each of its dtypes."""
    for one in zoo.combinations((model,)):
        plain = model == FIRST and not one.variant and one.layer == next(iter(zoo.layers(model)))
        for dtype in ("float32", *(HALF if plain else ())):
            yield one, dtype


def case_name(one: Combination, dtype: str) -> str:
    return f"{one.folder}.{dtype}"


def prepare(model: str, home: Path, *, only: Sequence[str] = ()) -> dict[str, str]:
    """Make a model, its adapters and the suite; return why PEFT makes no adapter, by name of the combination."""
    refused_file = home / "refused.json"
    refused: dict[str, str] = json.loads(refused_file.read_text()) if refused_file.exists() else {}
    made = None
    text = [f"devices = {json.dumps(DEVICES)}"]
    for one, dtype in cases(model):
        if only and one.name not in only:
            continue
        adapter = home / "adapters" / one.folder
        if one.folder not in refused and not adapter.exists():
            made = made or zoo.save_model(model, home / "base")
            why = zoo.save_adapter(one, made, home / "base", adapter)
            if why:
                refused[one.folder] = why
        if one.folder not in refused:
            place = str(adapter.relative_to(home))
            table = {"name": case_name(one, dtype), "base": "base", "adapter": place, "dtype": dtype}
            text += ["", "[[case]]", *(f"{name} = {json.dumps(value)}" for name, value in table.items())]
    refused_file.write_text(json.dumps(refused, indent=1), encoding="utf-8")
    (home / "suite.toml").write_text("\n".join(text) + "\n", encoding="utf-8")
    return refused


def run(home: Path, stages: Sequence[str]) -> int:
    """Run the suite of a model; return its status."""
    command = [sys.executable, "-P", "-m", "consistency", "run", str(home / "suite.toml"), "--out", str(home / "out")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    with (home / "run.log").open("w") as log:
        done = subprocess.run(
            [*command, "--stages", ",".join(stages), "--force"],
            check=False, env=environment, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    return done.returncode


# --- what came out --------------------------------------------------------------------------------------------------


def rows(home: Path, model: str, notes: Notes) -> Iterator[Row]:
    """Yield a row of each case that has a report."""
    suite = json.loads((home / "out" / "suite.json").read_text(encoding="utf-8"))
    folders = {case["name"]: case for case in suite["cases"]}
    for one, dtype in cases(model):
        case = folders.get(case_name(one, dtype))
        if case is None:
            continue
        path = home / "out" / case["folder"] / "report.json"
        if path.exists():
            report = json.loads(path.read_text(encoding="utf-8"))
            cells = tuple(cell(report, stage, notes) for stage in STAGES)
        else:
            cells = (notes.of(f"{case['verdict']}: {case['headline']}"),) + ("–",) * (len(STAGES) - 1)
        yield Row(model=model, layer=one.layer, method=one.name, dtype=dtype, cells=cells)


def cell(report: Mapping[str, Any], stage: str, notes: Notes) -> str:
    """Return what became of a stage: checked, in part or not, and why not.

    Nothing in a cell depends on the values: another healthy machine gives the same.
    """
    checked, why, wrong = 0, dict[str, None](), dict[str, None]()
    for outcome in report["outcomes"]:
        if outcome["stage"] != stage:
            continue
        if outcome["status"] == "skipped":
            why[_reason(outcome["reason"] or "")] = None
        elif outcome["status"] in _BAD:
            wrong[outcome["word"] or outcome["status"]] = None
        else:
            checked += 1
    numbers = " ".join(notes.of(text) for text in why)
    if wrong:
        return f"**{', '.join(wrong)}** {numbers}".strip()
    if not checked:
        return f"no {numbers}".strip()
    return f"yes {numbers}".strip()


def _reason(text: str) -> str:
    """Return the first sentence of a reason."""
    return text.strip().split("\n")[0].split(". ")[0][:300]


# --- the page -------------------------------------------------------------------------------------------------------


def table_of_rows(found: Iterable[Row]) -> str:
    """Return the table of a model; methods with the same cells share a line."""
    together: dict[tuple[str, str, tuple[str, ...]], list[str]] = defaultdict(list)
    for row in found:
        together[row.layer, row.dtype, row.cells].append(f"`{row.method}`")
    lines = [("layer", "dtype", "methods", *STAGES), ("---",) * (3 + len(STAGES))]
    lines += [(layer, dtype, ", ".join(names), *cells) for (layer, dtype, cells), names in together.items()]
    return _joined(lines)


def table_of_refused(refused: Mapping[str, Mapping[str, str]]) -> str:
    """Return the table of what PEFT does not make."""
    together: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for model, reasons in refused.items():
        for one in zoo.combinations((model,)):
            if one.folder in reasons:
                together[model, one.layer, reasons[one.folder].replace("|", "/")].append(f"`{one.name}`")
    lines = [("model", "layer", "methods", "PEFT's answer"), ("---",) * 4]
    lines += [(model, layer, ", ".join(names), why) for (model, layer, why), names in together.items()]
    return _joined(lines)


def _joined(lines: Iterable[Iterable[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def listed(page: str) -> set[tuple[str, str, str, str]]:
    """Return model, layer, method and dtype of every row of a table; dtype is empty where PEFT makes no adapter."""
    return {row for row, _ in _lines(page)}


def not_run(page: str) -> list[str]:
    """Return the models that a page names as not run."""
    found = re.search(r"Not run: (.*?)\.", page)
    return [] if found is None else [name.strip("`") for name in found[1].split(", ")]


def cells_of(page: str) -> dict[tuple[str, str, str, str], tuple[str, ...]]:
    """Return the cells of every row of a page, with its notes in the place of their numbers."""
    notes = Notes({text: int(number) for number, text in re.findall(r"^(\d+)\. (.*)$", page, re.MULTILINE)})
    return {row: tuple(notes.expanded(cell) for cell in cells) for row, cells in _lines(page) if row[3]}


def _lines(page: str) -> Iterator[tuple[tuple[str, str, str, str], tuple[str, ...]]]:
    model = ""
    for line in page.splitlines():
        if line.startswith("### `"):
            model = line.split("`")[1]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| ") or len(cells) < 4 or "`" not in cells[2]:
            continue
        made = len(cells) == 3 + len(STAGES)
        of, layer, dtype = (model, cells[0], cells[1]) if made else (cells[0], cells[1], "")
        for name in cells[2].split(", "):
            yield (of, layer, name.strip("`"), dtype), tuple(cells[3:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What became of every case of a model.

    Attributes
    ----------
    rows : tuple of Row
        Of the cases that were run.
    refused : mapping of str to str
        PEFT's answer to each combination of which it makes no adapter, by the folder's name.
    """

    model: str
    rows: tuple[Row, ...]
    refused: Mapping[str, str]

    def __post_init__(self) -> None:
        """Refuse to leave out a case, or to count one that no longer exists."""
        ran = {(row.layer, row.method, row.dtype) for row in self.rows}
        every = {(one.layer, one.name, dtype): one.folder for one, dtype in cases(self.model)}
        expected = {case for case, folder in every.items() if folder not in self.refused}
        if ran != expected or len(self.rows) != len(ran) or not set(self.refused) <= set(every.values()):
            raise ValueError(f"{self.model}: cases without a row, or rows without a case: {sorted(ran ^ expected)}")


def collect(homes: Mapping[str, Path], notes: Notes) -> list[Checked]:
    """Read what the suites of the models left."""
    return [
        Checked(
            model=model,
            rows=tuple(rows(home, model, notes)),
            refused=json.loads((home / "refused.json").read_text(encoding="utf-8")),
        )
        for model, home in homes.items()
    ]


def summary(found: Sequence[Checked], notes: Notes) -> dict[str, str]:
    """Return the generated parts of the page, without its figures: a line per model, and one model's rows."""
    lines = [("model", "family", "cases", "no adapter", "findings", *STAGES, "names"), ("---",) * (6 + len(STAGES))]
    for one in found:
        compared = (sum(not row.cells[at].startswith("no") for row in one.rows) for at in range(len(STAGES)))
        refused = len(list(cases(one.model))) - len(one.rows)
        wrong = sum(any("**" in cell for cell in row.cells) for row in one.rows)
        counts = map(str, (len(one.rows), refused, wrong, *compared))
        lines.append((f"`{one.model}`", MODELS[one.model].family, *counts, names_digest(one.model)))
    rest, own = Notes(), []
    for row in (row for one in found if one.model == EXAMPLE for row in one.rows if row.method in EXAMPLE_METHODS):
        own.append(replace(row, cells=tuple(_renumbered(cell, notes, rest) for cell in row.cells)))
    parts = {"models": _joined(lines)}
    if own:
        parts["example"] = f"{heading(EXAMPLE)}\n\n{table_of_rows(own)}\n\n{rest.listed()}".rstrip()
    return parts


def table(found: Sequence[Checked], notes: Notes, said: str) -> str:
    """Return the table of all cases, with the notes and what PEFT does not make."""
    parts = ["# Coverage: every case", said, "## Cases"]
    parts += [f"{heading(one.model)}\n\n{table_of_rows(one.rows)}" for one in found]
    refused = table_of_refused({one.model: one.refused for one in found})
    return "\n\n".join([*parts, "## Notes", notes.listed(), "## What PEFT does not make", refused]) + "\n"


def heading(model: str) -> str:
    return f"### `{model}`: {MODELS[model].family}, `{MODELS[model].model}`"


def names_digest(model: str) -> str:
    """Return what identifies the list of a model's cases, those included of which PEFT makes no adapter."""
    names = sorted(f"{one.layer} {one.name} {dtype}" for one, dtype in cases(model))
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]


def counted(page: str) -> dict[str, tuple[int, int, str]]:
    """Return of each model on a summary: cases that were run, cases without an adapter, the digest of the names."""
    line = re.compile(r"^\| `(\w+)` \| [^|]+ \| (\d+) \| (\d+) \|.* ([0-9a-f]{8}) \|$", re.MULTILINE)
    return {model: (int(ran), int(refused), names) for model, ran, refused, names in line.findall(page)}


def _renumbered(cell: str, notes: Notes, rest: Notes) -> str:
    texts = {f"[{number}]": text for text, number in notes.numbers.items()}
    return " ".join(rest.of(texts[word]) if word in texts else word for word in cell.split())


def figures(homes: Mapping[str, Path], count: int) -> str:
    """Return the sentences about the run as a whole."""
    import peft
    import torch
    import transformers

    from consistency.devices.discovery import cpu_info

    device = cpu_info()
    verdicts, took = Counter[str](), Counter[str]()
    for model, home in homes.items():
        names = {case_name(*case) for case in cases(model)}
        suite = json.loads((home / "out" / "suite.json").read_text(encoding="utf-8"))
        verdicts.update(case["verdict"] for case in suite["cases"] if case["name"] in names)
        took.update(json.loads((home / TOOK).read_text(encoding="utf-8")))
    said = ", ".join(f"{number} {verdict}" for verdict, number in sorted(verdicts.items(), key=lambda one: -one[1]))
    rest = [f"`{model}`" for model in MODELS if model not in homes]
    left = f" Not run: {', '.join(rest)}." if rest else ""
    return (
        f"{count} cases on {', '.join(DEVICES)}: {said}. {took['wall']:.0f} s in all, "
        f"{took['processor']:.0f} s of processor time with all workers. {device.model}, {device.architecture}, "
        f"{os.cpu_count()} cores; torch {torch.__version__}, transformers {transformers.__version__}, "
        f"peft {peft.__version__}.{left}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS), help="some of the models")
    parser.add_argument("--stages", type=lambda text: text.split(","), default=list(STAGES))
    parser.add_argument("--again", action="store_true", help="run again what the folder has reports of")
    parser.add_argument("--write", action="store_true", help=f"put the summary into {PAGE.name}")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the table of all cases to this file")
    given = parser.parse_args()
    zoo.quiet()
    homes = {model: given.folder.resolve() / model for model in given.models}
    for model, home in homes.items():
        home.mkdir(parents=True, exist_ok=True)
        if given.again or not (home / TOOK).exists():
            prepare(model, home)
            began, before = time.monotonic(), _of_children()
            status = run(home, given.stages)
            took = {"wall": time.monotonic() - began, "processor": _of_children() - before, "status": status}
            (home / TOOK).write_text(json.dumps(took), encoding="utf-8")
            print(f"{model}: {took}", file=sys.stderr, flush=True)
    notes = Notes()
    found = collect(homes, notes)
    said = figures(homes, sum(len(one.rows) for one in found))
    if given.table is not None:
        given.table.write_text(table(found, notes, said), encoding="utf-8")
    show({"figures": said, **summary(found, notes)}, PAGE, write=given.write)


def _of_children() -> float:
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


if __name__ == "__main__":
    main()
