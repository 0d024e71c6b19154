"""What every host of a fleet must have in common before anything runs: the files of the case, and accelerators.

`consistency fleet` writes it down once, and each node checks it: a checkpoint that was copied to a thousand hosts is
not on all of them what it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from consistency.case.case import Case
from consistency.devices.spec import DeviceInfo
from consistency.errors import InputError, UsageError

SCHEMA = "consistency.requirements/1"

_READ = (".safetensors", ".json", ".bin", ".py", ".model", ".txt", ".tiktoken")
"""Endings of what a case may read of a folder; a README may differ."""


class Requirements(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a host must have."""

    schema: str = SCHEMA
    files: dict[str, dict[str, str]] = {}
    """By what they are for (`base`, `adapter`, …) the SHA-256 of the files, by name."""
    accelerators: int = 0
    """How many devices other than the CPU."""

    def check_devices(self, devices: Sequence[DeviceInfo]) -> None:
        """Raise `UsageError` where there are fewer accelerators than required."""
        found = count_accelerators(devices)
        if sum(found.values()) < self.accelerators:
            seen = ", ".join(f"{count} × {model}" for model, count in found.items())
            raise UsageError(
                "fewer accelerators than required",
                got=seen or "none",
                wanted=self.accelerators,
                hint="is one lost, or not given to this job?",
            )

    def check_files(self, case: Case) -> None:
        """Raise `InputError` where a file of the case is not the one that is required."""
        places = _folders(case)
        for role, digests in digests_of(case).items():
            wanted = self.files.get(role, {})
            for name in sorted(digests.keys() | wanted.keys()):
                got = digests.get(name)
                if got != wanted.get(name):
                    raise InputError(
                        f"the {role} is not the one of the fleet",
                        where=places[role] / name,
                        got=_shown(got),
                        wanted=_shown(wanted.get(name)),
                        hint="copy it to this host again",
                    )


def requirements_of(case: Case, *, accelerators: int = 0) -> Requirements:
    """Return what a host must have to check this very case."""
    return Requirements(files=digests_of(case), accelerators=accelerators)


def digests_of(case: Case) -> dict[str, dict[str, str]]:
    """Return the SHA-256 of the files that a case reads, by what they are for and by name."""
    found = {role: dict(_named(place)) for role, place in _folders(case).items()}
    with ThreadPoolExecutor() as pool:  # hashing leaves the interpreter to others, and a sharded base has many files
        return {role: dict(zip(files, pool.map(_sha256, files.values()), strict=True)) for role, files in found.items()}


def count_accelerators(devices: Sequence[DeviceInfo]) -> dict[str, int]:
    """Return how many accelerators there are, by model; numerical variants of one count once."""
    own = {(info.spec.type, info.spec.index): info.model for info in devices if not info.spec.is_cpu}
    return {model: list(own.values()).count(model) for model in dict.fromkeys(own.values())}


def _folders(case: Case) -> Mapping[str, Path]:
    """Return the files and folders of a case by what they are for; what a function makes has none."""
    given = {
        "base": None if case.factory or not case.base else case.base,
        "adapter": None if case.adapters else case.adapter,
        **{f"adapter {one.name}": one.path for one in case.adapters},
        "inputs file": case.inputs,
        "device map": case.device_map if case.device_map and Path(case.device_map).is_file() else None,
    }
    return {role: Path(text) for role, text in given.items() if text is not None}


def _named(place: Path) -> Iterator[tuple[str, Path]]:
    if place.is_file():
        yield place.name, place
        return
    for path in sorted(place.iterdir()):
        if path.suffix in _READ and path.is_file():
            yield path.name, path


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError("cannot read", where=path, got=error) from None


def _shown(digest: str | None) -> str:
    return "no such file" if digest is None else f"SHA-256 {digest[:16]}…"
