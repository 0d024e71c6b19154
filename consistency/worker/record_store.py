"""Write a worker's records as lines of a file, and its tensors as files that are named by their content."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from consistency.capture.folder import blob_key
from consistency.capture.json_codec import encode_json
from consistency.capture.names import MERGING
from consistency.capture.records import IN_EVIDENCE, TensorRecord
from consistency.capture.whole_file import as_readable_as_its_folder, write_fully
from consistency.case.load_path import LoadPath
from consistency.case.stages import registered
from consistency.errors import CaptureError
from consistency.numerics import words
from consistency.numerics.digest import as_bytes
from consistency.numerics.dtype import name_of
from consistency.numerics.rules import Rule
from consistency.numerics.words import Word
from consistency.worker.nondeterministic import NondeterministicOperations


class RecordStore:
    """Write records of one worker, one line at a time, so that a worker that dies leaves whole lines behind.

    Parameters
    ----------
    folder : Path
        The worker's own folder.
    blobs : Path
        The capture's content-addressed tensors, shared by all workers.
    only : sequence of str
        `stage::layer` prefixes to record; empty records everything.
    remembers : bool
        Keep the digests of recorded tensors in `digests`, by stage, layer and tensor, for a soak to compare with.
    operations : NondeterministicOperations, optional
        Collects the operations without a deterministic version that have run in the stage; without it none have.
    """

    def __init__(
        self,
        folder: Path,
        blobs: Path,
        *,
        only: Sequence[str] = (),
        remembers: bool = False,
        operations: NondeterministicOperations | None = None,
    ) -> None:
        self._file = (folder / "records.jsonl").open("ab", buffering=0)
        self._blobs = blobs
        self._only = tuple(only)
        self._order = 0
        self._load_path = ""
        self._remembers = remembers
        self.digests: dict[tuple[str, str, str], str] = {}
        self.operations = operations or NondeterministicOperations()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def wants(self, stage: str, layer: str) -> bool:
        """Report whether anything of a layer is to be recorded."""
        if not self._only or stage in self._only:
            return True
        key = f"{stage}::{layer}"
        # a prefix ends where a name ends: `forward::h.1` does not mean `h.10`
        return any(key == prefix or key.startswith((f"{prefix}.", f"{prefix}::")) for prefix in self._only)

    @contextmanager
    def on_load_path(self, load_path: LoadPath) -> Iterator[None]:
        """Record the rows of a `with` block under an alternative load path."""
        self._load_path = load_path.value
        try:
            yield
        finally:
            self._load_path = ""

    def write(self, record: TensorRecord) -> None:
        """Append a record, completed by its number, its load path, and the operations that ran without determinism.

        Fields of `IN_EVIDENCE` are written in the evidence too, where readers of a report find them.

        Raises
        ------
        ValueError
            Its stage or its word is not declared.
        """
        if record.stage != MERGING:
            registered(record.stage)
        if record.word is not None:
            words.registered(record.word)
        self._order += 1
        if self._remembers and record.digest is not None and not self._load_path:
            self.digests[record.key] = record.digest
        from_fields = {key: getattr(record, field) for field, key in IN_EVIDENCE.items() if getattr(record, field)}
        is_computed = record.digest is not None and record.rule != Rule.BITWISE
        # these statuses are words as well
        word = Word(record.status) if record.status in ("missing", "unexpected") else record.word
        completed = msgspec.structs.replace(
            record,
            order=self._order,
            load_path=self._load_path,
            evidence=from_fields | record.evidence,
            nondeterministic=self.operations.ran() if is_computed else (),
            word=word,
        )
        try:
            write_fully(self._file.fileno(), encode_json(completed) + b"\n")
        except OSError as error:
            raise CaptureError("cannot write the records", where=self._file.name, got=error) from error

    def keep(self, tensor: torch.Tensor) -> str:
        """Store a tensor under the hash of its bytes and return that name; equal bytes are stored once."""
        return store_tensor(self._blobs, tensor)


def store_tensor(blobs: Path, tensor: torch.Tensor) -> str:
    """Store a tensor in a capture's folder of tensors, under the hash of its bytes; return that name.

    Raises
    ------
    CaptureError
        The file cannot be written.
    """
    host = tensor.detach().to("cpu").contiguous()
    raw = as_bytes(host)
    name = blob_key(name_of(host.dtype), host.shape, raw.numpy().data)
    path = blobs / f"{name}.safetensors"
    if not path.exists():
        # written under another name first: other workers store into this folder too
        partial = blobs / f"{name}.{os.getpid()}.tmp"
        is_part_of_storage = host.untyped_storage().nbytes() != host.nbytes
        try:
            save_file({"tensor": host.clone() if is_part_of_storage else host}, partial)
            as_readable_as_its_folder(partial)
            os.replace(partial, path)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise CaptureError("cannot store a tensor", where=path, got=error) from error
    return name
