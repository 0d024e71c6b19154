"""Keep a base loaded between two cases: the adapter is taken off, and digests prove that nothing of it is left.

Where a tensor of the base is not what it was after loading, because the adapter was merged into it or its method
rewrites it, its bytes are taken from the file again. Where that does not bring it back, the base is loaded anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from consistency.case.case import Case
from consistency.errors import ConsistencyError
from consistency.numerics.digest import digest
from consistency.worker.model.loading import LoadedBase, class_and_labels
from consistency.worker.model.merging import adapted_layers
from consistency.worker.model.structure import Structure
from consistency.worker.protocol import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A base model kept for the next case, whose digests were all taken once more.

    Attributes
    ----------
    restored : int
        Number of tensors that were taken from the file again.
    """

    base: LoadedBase
    structure: Structure
    restored: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeptBase:
    """A base without its adapter.

    Attributes
    ----------
    key : object
        See `_key`.
    merged : frozenset of int
        Identities of the tensors that an adapter was merged into.
    """

    key: object
    base: LoadedBase
    structure: Structure
    merged: frozenset[int]


class BaseKeeper:
    """Keep the base of one case for the next one in the same process, if that needs the same one."""

    def __init__(self, jobs: Sequence[Job] = ()) -> None:
        self._following = {job.folder: after for job, after in pairwise(jobs)}
        self._first = jobs[0].folder if jobs else None
        self._keys: dict[str, object] = {}
        """Keys of jobs that were computed already, by the jobs' folders."""
        self._kept: _KeptBase | None = None

    @property
    def keeps(self) -> bool:
        return self._kept is not None

    def is_first(self, job: Job) -> bool:
        """Report whether no other case has run in this process."""
        return self._first in (None, job.folder)

    def is_wanted_after(self, job: Job) -> bool:
        """Report whether the next case needs the base of this one."""
        following = self._following.get(job.folder)
        return following is not None and self._same(self._key(job), self._key(following))

    def keep(self, job: Job, model: torch.nn.Module, base: LoadedBase, structure: Structure) -> None:
        """Take the adapter off a base, of which all digests are known, and keep it."""
        merged: set[int] = set()
        for _, layer in adapted_layers(model):
            if layer.merged_adapters:
                merged.update(id(tensor) for tensor in layer.get_base_layer().parameters())
        if structure.restore():
            self._kept = _KeptBase(key=self._key(job), base=base, structure=structure, merged=frozenset(merged))

    def take(self, job: Job) -> Taken | str | None:
        """Return the base of the case before, and keep it no longer.

        Returns
        -------
        Taken, str or None
            A sentence on why it cannot be used; None where there is none for this case.
        """
        kept, self._kept = self._kept, None
        if kept is None or not self._same(kept.key, self._key(job)):
            return None
        base, restored = kept.base, 0
        # a mapping of its own: tensors on the CPU become parts of it
        reader = base if base.files is None else dataclasses.replace(base, files=base.files.mapped_anew())
        # weights that the adapter was merged into differ anyway: they are restored before any digest is taken
        for name, tensor in base.tensors.items():
            if id(tensor) in kept.merged and _restore(reader, name):
                restored += 1
        digests = {name: digest(tensor) for name, tensor in base.tensors.items()}
        for name, now in digests.items():
            if now.value != base.digests[name].value and _restore(reader, name):
                restored += 1
                digests[name] = digest(base.tensors[name])
        different = [name for name, now in digests.items() if now.value != base.digests[name].value]
        if different:
            return f"{different[0]} is not what it was before the adapter of the case before"
        if not kept.structure.restore():
            return "tensors that shared their memory no longer do"
        base = dataclasses.replace(base, digests=digests)
        return Taken(base=base, structure=kept.structure, restored=restored)

    def _key(self, job: Job) -> object:
        """Return the key of a job's base, which is computed once: it lists the base's files."""
        if job.folder not in self._keys:
            self._keys[job.folder] = _key(job)
        return self._keys[job.folder]

    @staticmethod
    def _same(a: object, b: object) -> bool:
        return a is not None and a == b


def _restore(base: LoadedBase, name: str) -> bool:
    """Give a tensor its value in the file; report whether there is one.

    The files of `base` must have no other use: a tensor on the CPU becomes a part of their mapping.
    """
    expected, tensor = base.expected(name), base.tensors[name]
    if expected is None or expected.shape != tensor.shape:
        return False
    with torch.no_grad():
        if tensor.device.type == "cpu":
            tensor.data = expected  # mapped from the file, as transformers loads it, which takes no memory
        else:
            tensor.copy_(expected)
    return True


def _key(job: Job) -> object:
    """Return a key that two cases with the same base have in common; None of a case that shares its base with none.

    A case with a planted fault does not: the fault may be in its base.
    """
    case = job.case
    if job.fault is not None or not case.needs_model:
        return None
    source: Any = case.base
    if case.factory is None:
        try:
            files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in _files(case)]
            source = (case.base, files, *class_and_labels(case))
        except (ConsistencyError, OSError, ValueError):
            return None  # loading it states what is wrong
    return source, case.dtype, case.placement, case.allow_pickle, case.trust_remote_code, job.device


def _files(case: Case) -> list[Path]:
    return sorted(file for file in Path(case.base).iterdir() if file.is_file())
