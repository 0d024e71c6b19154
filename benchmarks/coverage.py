"""Check every adapter that PEFT can save for the models of `benchmarks/zoo.py`, and write `docs/coverage.md`.

    python -m benchmarks.coverage DIR              # make models and adapters, run the suites, print the page
    python -m benchmarks.coverage DIR --write      # the same, into docs/coverage.md
    python -m benchmarks.coverage DIR --models t5 --stages base,adapter,merged,forward

Run from the root of the repository. `DIR/MODEL` gets the model, its adapters, `suite.toml`, and the
reports in `out`; a model that has reports there is not run again without `--again`. The devices are the three CPU
kernel variants. There is one suite per model, whose cases share the workers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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

TOOK = "took.json"

_BAD = {"outside", "missing", "unexpected", "blocked"}


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Row:
    """One row of the page.

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
    """Return model, layer, method and dtype of every row of a page; dtype is empty where PEFT makes no adapter."""
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


def page(homes: Mapping[str, Path]) -> dict[str, str]:
    """Make the generated parts of the page."""
    notes, parts, verdicts, took = Notes(), [], Counter[str](), Counter[str]()
    count = 0
    for model, home in homes.items():
        found = list(rows(home, model, notes))
        count += len(found)
        names = {case_name(*case) for case in cases(model)}
        suite = json.loads((home / "out" / "suite.json").read_text(encoding="utf-8"))
        verdicts.update(case["verdict"] for case in suite["cases"] if case["name"] in names)
        took.update(json.loads((home / TOOK).read_text(encoding="utf-8")))
        tiny = MODELS[model]
        parts.append(f"### `{model}`: {tiny.family}, `{tiny.model}`\n\n{table_of_rows(found)}")
    refused = {model: json.loads((home / "refused.json").read_text()) for model, home in homes.items()}
    return {
        "figures": figures(homes, count, verdicts, took),
        "rows": "\n\n".join(parts),
        "notes": "\n".join(f"{number}. {text}" for text, number in notes.numbers.items()),
        "refused": table_of_refused(refused),
    }


def figures(homes: Collection[str], count: int, verdicts: Mapping[str, int], took: Mapping[str, float]) -> str:
    """Return the sentences about the run as a whole."""
    import peft
    import torch
    import transformers

    from consistency.devices.discovery import cpu_info

    device = cpu_info()
    said = ", ".join(f"{number} {verdict}" for verdict, number in sorted(verdicts.items(), key=lambda one: -one[1]))
    rest = [f"`{model}`" for model in MODELS if model not in homes]
    left = f" Not run: {', '.join(rest)}." if rest else ""
    return (
        f"{count} combinations on {', '.join(DEVICES)}: {said}. {took['wall']:.0f} s in all, "
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
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.name}")
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
    show(page(homes), PAGE, write=given.write)


def _of_children() -> float:
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


if __name__ == "__main__":
    main()
