"""The capture beside the report of a watch: what shows each wrong block that was found."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
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
from consistency.errors import CaptureError, first_line
from consistency.extras.watching.block_evidence import ACTUAL, EXACT, BlockEvidence, evidence_of
from consistency.extras.watching.block_on_cpu import WrongBlock
from consistency.extras.watching.kinds import WRONG_BLOCK
from consistency.extras.watching.micro_batch import buffers_kept
from consistency.extras.watching.outcome import CheckOutcome, Discovery
from consistency.extras.watching.rank_talk import RankTalk
from consistency.worker.record_store import store_tensor
from consistency.workflows.report_folder import CAPTURES


class EvidenceFolder:
    """The store of the first rank, with what shows each wrong block.

    Attributes
    ----------
    records : dict
        The record of each stored result, by rank, layer and tensor.
    """

    def __init__(self, talk: RankTalk, folder: Path | None, places: Sequence[str]) -> None:
        self.records: dict[tuple[int, str, str], TensorRecord] = {}
        self._workers: dict[int, WorkerInfo] = {}
        self._talk = talk
        self._folder = folder
        self._places = places
        # the first rank writes, so that its folder decides for all
        self._is_kept: bool = talk.gather(folder is not None)[0]

    def store(self, new: Sequence[Discovery], outcomes: Sequence[CheckOutcome], title: str) -> list[str]:
        """Have the first rank store what shows each block that was found wrong just now; every rank comes here.

        Parameters
        ----------
        outcomes : sequence of CheckOutcome
            What this rank's own checks say.
        title : str
            The model, in words.

        Returns
        -------
        list of str
            A text for what cannot be had or written: no reproducer is worth a training.
        """
        if not self._is_kept:
            return []
        own = next((outcome.wrong_block for outcome in outcomes if outcome.wrong_block is not None), None)
        unwritten = []
        for discovery in new:
            if discovery.kind != WRONG_BLOCK:
                continue
            sender = discovery.ranks[0]
            evidence = None
            if self._talk.rank == sender and own is not None:
                try:
                    evidence = self._evidence_of(own)
                except Exception as error:  # model code may raise anything
                    unwritten.append(f"no reproducer of {own.name}: {first_line(error)}")
            evidence = self._talk.tell_first(evidence, sender=sender)
            if evidence is None or self._folder is None:
                continue
            try:
                self.add(sender, evidence, self._folder, title)
            except (OSError, CaptureError) as error:
                unwritten.append(f"cannot write {self._folder / CAPTURES}: {first_line(error)}")
        return unwritten

    def _evidence_of(self, wrong: WrongBlock) -> BlockEvidence | None:
        """Compute once more what shows a wrong block."""
        function, rank = wrong.function, self._talk.rank
        with wrong.batch.conditions(function.device), buffers_kept(function.block):
            return evidence_of(function, wrong.name, rank, self._places[rank])

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
