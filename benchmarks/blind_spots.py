"""Run other comparers on the blind-spot set, and print the tables of `docs/blind-spots.md`.

    python -m benchmarks.blind_spots             # the tables
    python -m benchmarks.blind_spots --write     # the same, into docs/blind-spots.md
    python -m benchmarks.blind_spots --write --words   # only the table of our own words

Run from the root of the repository. Libraries that are not installed are left out and listed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import io
import platform
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.comparers import SLOW, SUMMARIES, TORCH, Comparer, installed
from benchmarks.generated_parts import show
from benchmarks.state_dicts import answers
from consistency.devices.discovery import cpu_info
from consistency.numerics.diagnosis_moved import OtherContents, diagnose_moved, diagnose_structure
from consistency.numerics.digest import digest
from consistency.numerics.distance import measure
from consistency.numerics.dtype import name_of
from tests.numerics.perturbations import ALL, EQUAL, HARMLESS, PERTURBATIONS, STRUCTURE, Perturbation, cases
from tests.numerics.references import another

PAGE = Path(__file__).parents[1] / "docs" / "blind-spots.md"
SET = (*HARMLESS, *PERTURBATIONS, *STRUCTURE)
DTYPE = torch.float32


def word_of(actual: torch.Tensor, expected: torch.Tensor, *, others: Mapping[str, str] | None = None) -> str:
    """Return the diagnosis of `consistency` for a tensor whose bytes were only moved."""
    if digest(actual).value == digest(expected).value:
        return EQUAL
    structure = diagnose_structure(actual, expected)
    if structure is not None:
        return structure.word
    other_contents = OtherContents(swapped=lambda tensor: (others or {}).get(digest(tensor).value))
    return diagnose_moved(actual, expected, measure(actual, expected), other_contents=other_contents).word


@functools.cache
def others_of(dtype: torch.dtype) -> dict[str, str]:
    """Return the name of the other tensor of the run by its digest."""
    return {digest(another(dtype)).value: "another"}


@functools.cache
def our_word(perturbation: Perturbation, dtype: torch.dtype) -> str:
    expected = perturbation.reference(dtype)
    return word_of(perturbation.change(expected), expected, others=others_of(dtype))


# --- the words ------------------------------------------------------------------------------------------------------


def table_of_words() -> str:
    """Return the table of our word by perturbation and dtype, and why some are `differs`."""
    rows, reasons, faults = [], [], False
    for perturbation in SET:
        cells = [""] * len(ALL)
        for _, dtype in cases((perturbation,)):
            word = our_word(perturbation, dtype)
            wrong = word != perturbation.word
            faults |= wrong
            cells[ALL.index(dtype)] = f"{word} †" if wrong else word
        rows.append((perturbation.name, *cells))
        if perturbation.why:
            reasons.append((perturbation.name, perturbation.why))
    parts = [_table(("what was done", *map(name_of, ALL)), rows)]
    if faults:
        parts.append(
            "† A known fault of the diagnosis: the difference is seen and counted, the word should be another."
        )
    parts.append("Why it is `differs`:\n\n" + "\n".join(f"* {name}: {why}." for name, why in reasons))
    return "\n\n".join(parts)


# --- the others -----------------------------------------------------------------------------------------------------


def answer(comparer: Comparer, actual: torch.Tensor, expected: torch.Tensor) -> str:
    """Return `same`, `other`, `declines`, the name of an exception, or `–` if it was not run."""
    if comparer.slow and expected.numel() > SLOW:
        return "–"
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            return {True: "other", False: "same", None: "declines"}[comparer.differs(actual, expected)]
        except Exception as error:  # what a library raises on unexpected input is part of the answer
            return type(error).__name__


def cell(comparer: Comparer, actual: torch.Tensor, expected: torch.Tensor, *, equal: bool) -> str:
    """Return the table's cell for one answer."""
    said = answer(comparer, actual, expected)
    if said not in ("same", "other"):
        return said
    if equal:
        return "quiet" if said == "same" else "**false alarm**"
    if said == "same":
        return "**misses**"
    # a comparer that rejects an exact copy has not detected the difference
    return "sees" if answer(comparer, expected.clone(), expected) == "same" else "**always alarms**"


def tables_of_others(groups: Sequence[Sequence[Comparer]]) -> list[str]:
    """Return one table per group: perturbations of a float32 tensor by comparer."""
    rows: list[list[tuple[str, ...]]] = [[] for _ in groups]
    for perturbation in SET:
        if DTYPE not in perturbation.dtypes:
            continue
        expected = perturbation.reference(DTYPE)
        actual = perturbation.change(expected).detach()
        equal = perturbation.word == EQUAL
        ours = word_of(actual, expected, others=others_of(DTYPE))
        if (ours == EQUAL) != equal:
            ours = f"**{ours}**"
        for group, out in zip(groups, rows, strict=True):
            cells = (cell(comparer, actual, expected, equal=equal) for comparer in group)
            out.append((perturbation.name, ours, *cells))
    tables = []
    for group, out in zip(groups, rows, strict=True):
        counts = [sum("**" in row[1 + i] for row in out) for i in range(1 + len(group))]
        total = ("in bold", *map(str, counts))
        tables.append(_table(("what was done", "consistency", *(c.name for c in group)), [*out, total]))
    return tables


def legend(groups: Iterable[Sequence[Comparer]]) -> str:
    return "\n".join(f"* *{c.name}*: {c.call}" for group in groups for c in group)


def setting(groups: Iterable[Sequence[Comparer]], absent: Sequence[str]) -> str:
    """Describe the machine and the versions."""
    libraries = sorted({c.library for group in groups for c in group} | {"torch", "numpy"})
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in libraries)
    device = cpu_info()
    line = f"{device.model}, {device.architecture}, Python {platform.python_version()}, {versions}."
    return line + (f" Not installed, and left out: {', '.join(absent)}." if absent else "")


# --- the page -------------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def generated(*, words_alone: bool = False) -> dict[str, str]:
    """Make the generated parts of the page."""
    parts = {"words": table_of_words()}
    if not words_alone:
        found, absent = installed()
        groups = (TORCH, (*SUMMARIES, *found))
        parts["setting"] = setting(groups, absent)
        parts["legend"] = legend(groups)
        parts["torch"], parts["summaries"] = tables_of_others(groups)
        parts["states"] = _table(("what is written", "one tensor missing", "one too many"), answers())
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.name}")
    parser.add_argument("--words", action="store_true", help="only the table of our own words")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    show(generated(words_alone=arguments.words), PAGE, write=arguments.write)


if __name__ == "__main__":
    main()
