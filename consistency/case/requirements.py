"""The files and accelerators that every host of a fleet must have in common before anything runs.

`consistency fleet` writes them down once, and each node checks them: a checkpoint that was copied to a thousand hosts
is not on all of them what it was.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from consistency.case.case import Case
from consistency.devices.spec import DeviceInfo
from consistency.errors import InputError, UsageError

SCHEMA = "consistency.requirements/1"

_ENDINGS = (".safetensors", ".json", ".bin", ".py", ".model", ".txt", ".tiktoken")
"""Endings of the files that a case may read in a folder; a README may differ between hosts."""


class Requirements(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The files and devices that a host must have."""

    schema: str = SCHEMA
    files: dict[str, dict[str, str]] = {}
    """SHA-256 of each file, by role (`base`, `adapter`, …) and by name."""
    accelerators: int = 0
    """Number of devices other than the CPU."""

    def check_devices(self, devices: Sequence[DeviceInfo]) -> None:
        """Raise `UsageError` where there are fewer accelerators than required."""
        counts = count_accelerators(devices)
        if sum(counts.values()) < self.accelerators:
            listing = ", ".join(f"{count} × {model}" for model, count in counts.items())
            raise UsageError(
                "fewer accelerators than required",
                got=listing or "none",
                wanted=self.accelerators,
                hint="is one lost, or not given to this job?",
            )

    def check_files(self, case: Case) -> None:
        """Raise `InputError` where a file of the case is missing, or is not the one that is required."""
        paths = _paths(case)
        for role, digests in digests_of(case).items():
            required = self.files.get(role, {})
            for name in sorted(digests.keys() | required.keys()):
                if digests.get(name) != required.get(name):
                    raise InputError(
                        f"the {role} is not the one of the fleet",
                        where=paths[role] / name,
                        got=_digest_text(digests.get(name)),
                        wanted=_digest_text(required.get(name)),
                        hint="copy it to this host again",
                    )


def requirements_of(case: Case, *, accelerators: int = 0) -> Requirements:
    """Return the requirements of a host that checks this very case."""
    return Requirements(files=digests_of(case), accelerators=accelerators)


def digests_of(case: Case) -> dict[str, dict[str, str]]:
    """Return the SHA-256 of the files that a case reads, by role and by name."""
    files_by_role = {role: dict(_files(path)) for role, path in _paths(case).items()}
    digests = {}
    with ThreadPoolExecutor() as pool:  # hashing leaves the interpreter to others, and a sharded base has many files
        for role, files in files_by_role.items():
            digests[role] = dict(zip(files, pool.map(_sha256, files.values()), strict=True))
    return digests


def count_accelerators(devices: Sequence[DeviceInfo]) -> dict[str, int]:
    """Return how many accelerators there are, by model; numerical variants of one count once."""
    models = {(info.spec.type, info.spec.index): info.model for info in devices if not info.spec.is_cpu}
    return dict(Counter(models.values()))


def _paths(case: Case) -> Mapping[str, Path]:
    """Return the files and folders of a case by role; what a function makes has none."""
    paths: dict[str, str] = {}
    if case.base and not case.factory:
        paths["base"] = case.base
    if case.adapter is not None and not case.adapters:
        paths["adapter"] = case.adapter
    for adapter in case.adapters:
        paths[f"adapter {adapter.name}"] = adapter.path
    if case.inputs is not None:
        paths["inputs file"] = case.inputs
    # otherwise it is the name of a map that transformers computes
    if case.device_map and Path(case.device_map).is_file():
        paths["device map"] = case.device_map
    return {role: Path(path) for role, path in paths.items()}


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and path of a file, or of each file in a folder that a case may read."""
    if path.is_file():
        yield path.name, path
        return
    for file in sorted(path.iterdir()):
        if file.suffix in _ENDINGS and file.is_file():
            yield file.name, file


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError("cannot read", where=path, got=error) from None


def _digest_text(digest: str | None) -> str:
    """Return a digest as an error shows it."""
    return "no such file" if digest is None else f"SHA-256 {digest[:16]}…"
