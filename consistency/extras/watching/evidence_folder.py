"""The capture beside the report of a watch: what shows each wrong block that was found."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from consistency import __version__
from consistency.capture import origin
from consistency.capture.folder import SCHEMA, CaptureManifest
from consistency.capture.json_codec import encode_json
from consistency.capture.records import TensorRecord, WorkerInfo
from consistency.capture.whole_file import write_whole
from consistency.capture.writer import CaptureWriter
from consistency.case.case import Case
from consistency.extras.watching.block_evidence import ACTUAL, EXACT, BlockEvidence
from consistency.worker.record_store import store_tensor
from consistency.workflows.report_folder import CAPTURES


class EvidenceFolder:
    """What was stored of wrong blocks, by the first rank.

    Attributes
    ----------
    records : dict
        The record of each stored result, by rank, layer and tensor.
    """

    def __init__(self) -> None:
        self.records: dict[tuple[int, str, str], TensorRecord] = {}
        self._workers: dict[int, WorkerInfo] = {}

    def add(self, rank: int, evidence: BlockEvidence, folder: Path, title: str) -> None:
        """Store what a rank has found beside all that was stored before.

        Parameters
        ----------
        folder : Path
            Folder of the report.
        title : str
            The model, in words.

        Raises
        ------
        CaptureError, OSError
            It cannot be written, as on a full disk.
        """
        place = folder / CAPTURES
        workers = {**self._workers, rank: evidence.worker}
        with CaptureWriter(place, replace=True) as writer:
            if self.records:
                for blob in (place / "blobs").iterdir():
                    shutil.copy(blob, writer.blobs)
            records = {**self.records, (rank, *evidence.record.key[1:]): _stored(writer.blobs, evidence)}
            slugs = {number: f"rank-{number}" for number in sorted(workers)}
            for number, slug in slugs.items():
                own = [record for key, record in records.items() if key[0] == number]
                lines = [encode_json(msgspec.structs.replace(record, order=n)) + b"\n" for n, record in enumerate(own)]
                write_whole(writer.worker_folder(slug) / "records.jsonl", lines)
                writer.write_worker(slug, workers[number])
            manifest = CaptureManifest(
                schema=SCHEMA,
                tool=__version__,
                created=origin.now(),
                host=origin.host(),
                command=origin.command(),
                case=Case(name=title, base="", stages=()),
                workers=tuple(slugs.values()),
            )
            writer.commit(manifest)
        self.records, self._workers = records, workers


def _stored(blobs: Path, evidence: BlockEvidence) -> TensorRecord:
    """Store the tensors of an evidence; return its record with their names."""
    names = {name: store_tensor(blobs, tensor) for name, tensor in evidence.tensors.items()}
    return msgspec.structs.replace(
        evidence.record, blob=names.pop(ACTUAL), reference_blob=names.pop(EXACT), ingredients=names
    )
