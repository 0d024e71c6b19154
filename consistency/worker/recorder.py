"""Judge what a stage measures, and turn it into records."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from consistency.capture.folder import pack_blocks
from consistency.capture.names import LIMITS, WHOLE_MODEL
from consistency.capture.records import RecordStatus, TensorRecord
from consistency.case.stages import SPECS, registered
from consistency.case.tolerance import Override, choose
from consistency.numerics import words
from consistency.numerics.aten_calls import largest_share
from consistency.numerics.bound import UserAllowance
from consistency.numerics.chunks import Chunks
from consistency.numerics.diagnosis import Diagnosis
from consistency.numerics.diagnosis_computed import diagnose_computed
from consistency.numerics.diagnosis_moved import Known, diagnose_moved, diagnose_structure
from consistency.numerics.digest import TensorDigest, differing_blocks, digest
from consistency.numerics.distance import measure
from consistency.numerics.dtype import name_of
from consistency.numerics.measure import Measure
from consistency.numerics.real import Real
from consistency.numerics.rules import Rule, passes
from consistency.numerics.words import Word
from consistency.worker.nondeterministic import NondeterministicOperations
from consistency.worker.record_store import RecordStore

KEEP_BYTES = 64 * 2**20
"""A tensor outside its rule is stored in full up to this size; beyond it, block digests and the worst element do."""

PEER_KEEP_BYTES = 2**20
"""A tensor without a file is stored up to this size, so that a difference can be shown element by element."""


Kept = tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]
TraceWrong = Callable[[str, str, Callable[[torch.Tensor], float]], Kept | None]
"""Called with layer, tensor, and what tells how far a result is off, of one that is outside the `block` rule; returns
what a reproducer needs to compute it again, and evidence. None where nothing computes it by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTolerance(UserAllowance):
    """The override that applies to a tensor, and how the command line states it."""

    stated: str


class Skip(Exception):  # noqa: N818 - no error
    """Why a stage, or a part of it, has no result: recorded in its place by `Recorder.skipping`.

    Parameters
    ----------
    reason : str
    status : str
        `blocked` where something else failed before.
    """

    def __init__(self, reason: str, *, status: RecordStatus = "skipped") -> None:
        super().__init__(reason)
        self.status = status


class Recorder(RecordStore):
    """Judge tensors and facts of one worker, and record them.

    Parameters
    ----------
    folder, blobs, only, remembers, operations
        See `RecordStore`.
    keep : bool
        Store every computed tensor that is judged.
    tolerance : sequence of Override
        What the user allows instead of the derived rules.
    """

    def __init__(
        self,
        folder: Path,
        blobs: Path,
        *,
        only: Sequence[str] = (),
        keep: bool = False,
        tolerance: Sequence[Override] = (),
        remembers: bool = False,
        operations: NondeterministicOperations | None = None,
    ) -> None:
        super().__init__(folder, blobs, only=only, remembers=remembers, operations=operations)
        self._keep = keep
        self._tolerance = tolerance
        self._trace: TraceWrong | None = None
        self._traced: set[str] = set()

    @contextmanager
    def tracing(self, trace: TraceWrong) -> Iterator[None]:
        """Let the first tensor of a stage that is outside its rule be computed again, for a reproducer."""
        self._trace = trace
        try:
            yield
        finally:
            self._trace = None

    def skipping(
        self, stage: str, *tensors: str, layer: str = WHOLE_MODEL, rule: Rule | None = None
    ) -> AbstractContextManager[None, bool]:
        """Record a `Skip` of a `with` block in the place of its rows, and go on after it.

        Parameters
        ----------
        tensors, rule
            Of these rows: of the stage as a whole, unless given.
        """
        return _Skipping(self, stage, tensors, layer, rule)

    def skipped(
        self,
        stage: str,
        reason: str,
        *tensors: str,
        layer: str = WHOLE_MODEL,
        rule: Rule | None = None,
        status: RecordStatus = "skipped",
        dtype: str = "",
        unsupported: bool = False,
    ) -> None:
        """Record why there is nothing in the place of some rows, or of a whole stage."""
        spec = SPECS[registered(stage)]
        row = TensorRecord(
            stage,
            layer,
            spec.whole,
            rule=rule or spec.rule,
            status=status,
            reason=reason,
            dtype=dtype,
            unsupported=unsupported,
        )
        for tensor in tensors or (spec.whole,):
            self.write(msgspec.structs.replace(row, tensor=tensor))

    def tolerance(self, *, stage: str, layer: str, dtype: torch.dtype) -> UserTolerance | None:
        """Return what the user allows for a tensor, None where the derived rules apply."""
        found = choose(self._tolerance, stage=stage, layer=layer, dtype=name_of(dtype))
        return None if found is None else UserTolerance(atol=found.atol, rtol=found.rtol, stated=str(found))

    def moved(
        self,
        row: TensorRecord,
        *,
        actual: torch.Tensor,
        expected: torch.Tensor,
        known: Known | None = None,
        keep: bool = False,
        digests: tuple[TensorDigest, TensorDigest] | None = None,
    ) -> None:
        """Compare a tensor whose bytes were only moved with the bytes in the file, and record the result.

        Parameters
        ----------
        row : TensorRecord
            What is recorded if they are equal, but for shape, dtype and digests.
        actual : torch.Tensor
            On its device; it is copied to the host only where it differs, or where `keep` asks.
        expected : torch.Tensor
            On the CPU.
        known : Known, optional
            What else the tensor could hold.
        keep : bool
            Store both tensors, so that captures made apart can be compared element by element.
        digests : tuple of TensorDigest, optional
            Of both tensors, if they are known.
        """
        here, reference = digests or (digest(actual), digest(expected))
        row = msgspec.structs.replace(
            row,
            shape=tuple(actual.shape),
            dtype=name_of(actual.dtype),
            digest=here.value,
            blocks=pack_blocks(here.blocks),
            reference="file",
            reference_digest=reference.value,
        )
        if here.value == reference.value:
            blob = self.keep(actual) if keep else None
            self.write(msgspec.structs.replace(row, blob=blob, reference_blob=blob))
            return
        host = actual.detach().to("cpu")
        found, diagnosis = None, diagnose_structure(host, expected)
        if diagnosis is None:
            found = measure(host, expected)
            diagnosis = diagnose_moved(host, expected, found, known=known)
            if found.mismatched == 0:
                # the digest on the device and the bytes on the host disagree: the read-back changed the tensor
                diagnosis = dataclasses.replace(diagnosis, word=words.DIFFERS, evidence={"digest_only": True})
        self.differs(
            row,
            host,
            expected,
            found,
            diagnosis,
            evidence={"blocks": differing_blocks(here.blocks, reference.blocks)[:64]},
            keep=keep or host.nbytes <= KEEP_BYTES,
        )

    def differs(
        self,
        row: TensorRecord,
        actual: torch.Tensor,
        expected: torch.Tensor,
        found: Measure | None,
        diagnosis: Diagnosis,
        *,
        evidence: Mapping[str, Any],
        keep: bool,
    ) -> None:
        """Complete and write the row of moved bytes that differ from the expected ones."""
        self.write(
            msgspec.structs.replace(
                row,
                status="outside",
                measure=found,
                word=diagnosis.word,
                evidence={**row.evidence, **diagnosis.evidence, **evidence},
                blob=self.keep(actual) if keep else None,
                reference_blob=self.keep(expected) if keep else None,
            )
        )

    def computed(
        self,
        row: TensorRecord,
        actual: torch.Tensor,
        *,
        digests: Sequence[TensorDigest] = (),
        found: Measure | None = None,
        chunks: Chunks | None = None,
        diagnose: Callable[[Measure, Chunks], Diagnosis] = diagnose_computed,
        tolerance: UserTolerance | None = None,
        ingredients: Mapping[str, torch.Tensor | None] | None = None,
    ) -> None:
        """Judge a tensor that a device computed by its measure, name the difference, and record both.

        Parameters
        ----------
        row : TensorRecord
            With the rule that judges it where no tolerance does, the status of a tensor that is not judged here, a word
            for one outside its rule where more than its numbers tells it, and the dtype that it was computed in where
            it is stored in a wider one.
        digests : sequence of TensorDigest
            One per run on this device, the first run first; that of `actual` unless given.
        found : Measure or None
            Against the exact value, by the user's tolerance where there is one; None where no exact value is known, so
            that only other workers can judge.
        chunks : callable, optional
            Yields the tensor with its exact value; called only where it is outside its rule. None where the tensor is
            not judged here.
        diagnose : callable
            Names what is outside its rule.
        ingredients : mapping, optional
            On the CPU; kept where the tensor is outside its rule, for a reproducer: `exact`, and what it is made from.
        """
        digests = digests or [digest(actual)]
        rule, status, word = row.rule, row.status, row.word
        more: Mapping[str, Any] = {}
        if found is not None and chunks is not None and found.ratio is not None:
            status = "within" if passes(found.ratio) else "outside"
            if status == "outside" and word is None:
                diagnosis = diagnose(found, chunks)
                word, more = diagnosis.word, diagnosis.evidence
            elif status == "within" and tolerance is None:
                word = words.ACCUMULATION_ORDER  # within a tolerance that nobody derived, nothing is known of the cause
            if float(found.max_abs) == 0 and found.mismatched == 0:
                status = "equal"
        failed = status == "outside"
        worth_keeping = failed and actual.nbytes <= KEEP_BYTES
        parts = dict(ingredients or {}) if worth_keeping else {}
        exact, allowed = parts.get("exact"), parts.get("allowed")
        if exact is not None and allowed is not None and self._trace is not None and row.stage not in self._traced:
            traced = self._trace(
                row.layer, row.tensor, lambda one: largest_share(one, exact, allowed, more.get(LIMITS))[0]
            )
            if traced is not None:
                self._traced.add(row.stage)
                parts, more = {**parts, **traced[0]}, {**more, **traced[1]}
        kept = {name: self.keep(t) for name, t in parts.items() if t is not None and t.nbytes <= KEEP_BYTES}
        if found is None:
            rule = Rule.PEER
        elif tolerance is not None:
            rule = Rule.USER
        elif rule == Rule.RELATIVE:  # a comparison takes the ratio from the error of rounding
            found = msgspec.structs.replace(found, ratio=None)
        elif rule in (Rule.BOUND, Rule.BLOCK) and not failed:
            found = found.without_values()
        self.write(
            msgspec.structs.replace(
                row,
                shape=tuple(actual.shape),
                dtype=row.dtype or name_of(actual.dtype),
                rule=rule,
                status=status,
                digest=digests[0].value,
                # blocks locate bitwise differences; after a sum in another order all blocks differ
                blocks=pack_blocks(digests[0].blocks) if failed or found is None else "",
                reference=None if found is None else "float64",
                measure=found,
                word=word,
                evidence={**row.evidence, **more},
                blob=self.keep(actual) if worth_keeping or (self._keep and chunks is not None) else row.blob,
                reference_blob=kept.pop("exact", None),
                repeats=tuple(d.value for d in digests[1:]),
                ingredients=kept,
                tolerance=tolerance.stated if found is not None and tolerance is not None else "",
            )
        )

    def keep_small(self, tensor: torch.Tensor) -> str | None:
        """Store a tensor of at most `PEER_KEEP_BYTES`; return its name, None of a larger one."""
        return self.keep(tensor) if tensor.nbytes <= PEER_KEEP_BYTES else None

    def fact(
        self,
        stage: str,
        layer: str,
        tensor: str,
        *,
        status: RecordStatus,
        word: Word | None = None,
        share: float | None = None,
        evidence: Mapping[str, Any] | None = None,
        reason: str | None = None,
    ) -> None:
        """Record a fact with a limit: bytes on a device, ids in a batch, the peak of a merge.

        Parameters
        ----------
        stage, layer, tensor : str
            The layer or device concerned, and the name of the fact.
        status : str
            `equal` where it matches exactly, `within` where it stays below a limit, `outside` where neither holds;
            `skipped` with a `reason`.
        share : float, optional
            Measured over allowed.
        evidence : mapping, optional
            The figures, units in their names.
        """
        self.write(
            TensorRecord(
                stage,
                layer,
                tensor,
                rule=Rule.LIMIT,
                status=status,
                word=word,
                limit_ratio=None if share is None else Real(share),
                evidence=dict(evidence or {}),
                reason=reason,
            )
        )


@dataclass(frozen=True, slots=True)
class _Skipping(AbstractContextManager[None, bool]):
    record: Recorder
    stage: str
    tensors: tuple[str, ...]
    layer: str
    rule: Rule | None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if not isinstance(error, Skip):
            return False
        self.record.skipped(
            self.stage, str(error), *self.tensors, layer=self.layer, rule=self.rule, status=error.status
        )
        return True
