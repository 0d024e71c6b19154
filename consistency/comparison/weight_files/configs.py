"""Settings that lie beside weights and change what they compute: `config.json` and `adapter_config.json`, compared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from consistency.case.checkpoint import read_json
from consistency.comparison.result import Finding

_FILES = ("adapter_config.json", "config.json")

# where it came from, which versions wrote it, how it was to be used: no number of a forward pass depends on these
_SAYS_NOTHING = frozenset(
    {
        "_name_or_path",
        "_commit_hash",
        "auto_mapping",
        "base_model_name_or_path",
        "dtype",  # what it was saved as; the tensors themselves tell
        "inference_mode",
        "peft_version",
        "revision",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


def find_settings(actual: Path, expected: Path, labels: tuple[str, str]) -> Iterator[Finding]:
    """Yield what differs between the settings of two folders, one finding per file.

    A setting that changes numbers is an error: equal weights with another `lora_alpha` are another adapter.
    """
    for name in _FILES:
        present = [(folder / name).exists() for folder in (actual, expected)]
        if not any(present) or not (actual.is_dir() and expected.is_dir()):
            continue
        if not all(present):
            which = labels[0] if present[0] else labels[1]
            yield Finding(
                kind="settings", severity="error", message=f"{name} is in {which} alone", workers=(labels[0],)
            )
            continue
        got, wanted = read_json(actual / name), read_json(expected / name)
        keys = [key for key in dict.fromkeys((*wanted, *got)) if not _same(got.get(key), wanted.get(key))]
        grave = [key for key in keys if key not in _SAYS_NOTHING]
        for severity, chosen in (("error", grave), ("note", [key for key in keys if key not in grave])):
            if chosen:
                text = "; ".join(f"{key} is {got.get(key)!r}, was {wanted.get(key)!r}" for key in chosen[:5])
                more = f"; and {len(chosen) - 5} more" if len(chosen) > 5 else ""
                yield Finding(
                    kind="settings",
                    severity="error" if severity == "error" else "note",
                    message=f"{name} of {labels[0]} differs: {text}{more}",
                    workers=(labels[0],),
                )


def _same(actual: Any, expected: Any) -> bool:
    """Compare two values of JSON; PEFT writes sets of names as lists in any order."""
    if (
        isinstance(actual, list)
        and isinstance(expected, list)
        and all(isinstance(v, str) for v in (*actual, *expected))
    ):
        return sorted(actual) == sorted(expected)
    if isinstance(actual, float | int) and isinstance(expected, float | int):
        return actual == expected and isinstance(actual, bool) == isinstance(expected, bool)
    return bool(actual == expected)
