"""Compare the settings next to weights that change what they compute: `config.json` and `adapter_config.json`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from consistency.capture.wording import and_more
from consistency.case.checkpoint import read_json
from consistency.comparison.kinds import FindingKind
from consistency.comparison.result import Finding, Severity

_FILES = ("adapter_config.json", "config.json")

# origin, versions and intended use: no value of a forward pass depends on these
_HARMLESS = frozenset((
    "_name_or_path", "_commit_hash", "base_model_name_or_path", "revision",
    "dtype", "torch_dtype",  # as which it was saved; the tensors themselves show it
    "peft_version", "transformers_version",
    "auto_mapping", "inference_mode", "use_cache",
))  # fmt: skip

_MOST_KEYS = 5  # of a sentence; the files are there to be read


def find_settings(actual: Path, expected: Path, labels: tuple[str, str]) -> Iterator[Finding]:
    """Yield the differences between the settings of two folders, one finding per file and severity.

    A setting that changes values is an error: equal weights with a different `lora_alpha` are a different adapter.
    """
    for name in _FILES:
        present = [(folder / name).exists() for folder in (actual, expected)]
        if not any(present) or not (actual.is_dir() and expected.is_dir()):
            continue
        if not all(present):
            which = labels[0] if present[0] else labels[1]
            yield _finding("error", f"only {which} has {name}", labels)
            continue
        got, wanted = read_json(actual / name), read_json(expected / name)
        keys = [key for key in dict.fromkeys((*wanted, *got)) if not _same(got.get(key), wanted.get(key))]
        grave = [key for key in keys if key not in _HARMLESS]
        by_severity: dict[Severity, list[str]] = {"error": grave, "note": [key for key in keys if key not in grave]}
        for severity, chosen in by_severity.items():
            if chosen:
                texts = [f"{key} is {got.get(key)!r}, was {wanted.get(key)!r}" for key in chosen[:_MOST_KEYS]]
                text = "; ".join(filter(None, [*texts, and_more(len(chosen) - _MOST_KEYS)]))
                yield _finding(severity, f"{name} of {labels[0]} differs: {text}", labels)


def _finding(severity: Severity, message: str, labels: tuple[str, str]) -> Finding:
    return Finding(kind=FindingKind.SETTINGS, severity=severity, message=message, workers=(labels[0],))


def _same(actual: Any, expected: Any) -> bool:
    """Compare two values of JSON; PEFT writes sets of names as lists in any order."""
    lists = isinstance(actual, list) and isinstance(expected, list)
    if lists and all(isinstance(v, str) for v in (*actual, *expected)):
        return sorted(actual) == sorted(expected)
    if isinstance(actual, float | int) and isinstance(expected, float | int):
        return actual == expected and isinstance(actual, bool) == isinstance(expected, bool)
    return bool(actual == expected)
