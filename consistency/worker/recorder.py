"""Judge what a stage measures, and turn it into records."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
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
from consistency.numerics.aten_calls import largest_ratio
from consistency.numerics.bound import UserAllowance
from consistency.numerics.chunks import Chunks
from consistency.numerics.diagnosis import Diagnosis
from consistency.numerics.diagnosis_computed import diagnose_computed
from consistency.numerics.diagnosis_moved import OtherContents, diagnose_moved, diagnose_structure
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

_MOST_BLOCKS_NAMED = 64
"""Numbers of differing digest blocks that a record holds at most."""


TracedOperation = tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]
"""The tensors from which a reproducer computes a wrong result again, by name, and evidence about the operation."""

TraceWrong = Callable[[str, str, Callable[[torch.Tensor], float]], TracedOperation | None]
"""Called for a tensor outside the `block` rule, with its layer, its name, and a function that returns the largest ratio
of a result; returns the operation that computed it, None where no operation computes it by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTolerance(UserAllowance):
    """The user's tolerance that applies to a tensor.

    Attributes
    ----------
    stated : str
        The tolerance as it is written on the command line.
    """

    stated: str


class Skip(Exception):  # noqa: N818 - no error
    """Leave a stage, or a part of it, without a result; `Recorder.skipping` records the reason in its place.

    Parameters
    ----------
    reason : str
    status : str
        `skipped`, or `blocked` where something else failed before.
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
        Store every computed tensor that is judged, not only those outside their rules.
    tolerance : sequence of Override
        The user's tolerances, which replace the derived rules.
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
        self._traced_stages: set[str] = set()

    @contextmanager
    def tracing(self, trace: TraceWrong) -> Iterator[None]:
        """Compute the first tensor of a stage that is outside its rule again with `trace`, for a reproducer."""
        self._trace = trace
        try:
            yield
        finally:
            self._trace = None

    def skipping(
        self, stage: str, *tensors: str, layer: str = WHOLE_MODEL, rule: Rule | None = None
    ) -> AbstractContextManager[None, bool]:
        """Return a context manager that records a `Skip` raised in it in the place of its rows, and goes on after it.

        Parameters
        ----------
        tensors, rule
            Names and rule of these rows; those of the stage as a whole unless given.
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
        """Record the reason why some rows, or all rows of a stage, have no result."""
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
        """Return the user's tolerance for a tensor, None where the derived rules apply."""
        override = choose(self._tolerance, stage=stage, layer=layer, dtype=name_of(dtype))
        if override is None:
            return None
        return UserTolerance(atol=override.atol, rtol=override.rtol, stated=str(override))

    def moved(
        self,
        row: TensorRecord,
        *,
        actual: torch.Tensor,
        expected: torch.Tensor,
        other_contents: OtherContents | None = None,
        keep: bool = False,
        digests: tuple[TensorDigest, TensorDigest] | None = None,
    ) -> None:
        """Compare a tensor whose bytes were only moved with the bytes in the file, and record the result.

        Parameters
        ----------
        row : TensorRecord
            The row to record if they are equal; shape, dtype and digests are filled in here.
        actual : torch.Tensor
            On its device; it is copied to the host only where it differs, or where `keep` asks.
        expected : torch.Tensor
            The tensor of the file, on the CPU.
        other_contents : OtherContents, optional
            Other values that the tensor may hold by mistake, to name the difference by.
        keep : bool
            Store both tensors, so that captures made apart can be compared element by element.
        digests : tuple of TensorDigest, optional
            Digests of `actual` and `expected`, where the caller has them.
        """
        actual_digest, expected_digest = digests or (digest(actual), digest(expected))
        row = msgspec.structs.replace(
            row,
            shape=tuple(actual.shape),
            dtype=name_of(actual.dtype),
            digest=actual_digest.value,
            blocks=pack_blocks(actual_digest.blocks),
            reference="file",
            reference_digest=expected_digest.value,
        )
        if actual_digest.value == expected_digest.value:
            blob = self.keep(actual) if keep else None
            self.write(msgspec.structs.replace(row, blob=blob, reference_blob=blob))
            return
        host = actual.detach().to("cpu")
        difference, diagnosis = None, diagnose_structure(host, expected)
        if diagnosis is None:
            difference = measure(host, expected)
            diagnosis = diagnose_moved(host, expected, difference, other_contents=other_contents)
            if difference.mismatched == 0:
                # the digest on the device and the bytes on the host disagree: the read-back changed the tensor
                diagnosis = dataclasses.replace(diagnosis, word=words.DIFFERS, evidence={"digest_only": True})
        self.differs(
            row,
            host,
            expected,
            difference,
            diagnosis,
            evidence={"blocks": differing_blocks(actual_digest.blocks, expected_digest.blocks)[:_MOST_BLOCKS_NAMED]},
            keep=keep or host.nbytes <= KEEP_BYTES,
        )

    def differs(
        self,
        row: TensorRecord,
        actual: torch.Tensor,
        expected: torch.Tensor,
        measure: Measure | None,
        diagnosis: Diagnosis,
        *,
        evidence: Mapping[str, Any],
        keep: bool,
    ) -> None:
        """Complete and write the row of a tensor whose bytes were moved and differ from the expected ones.

        Parameters
        ----------
        measure : Measure or None
            The measured difference; None where shape or dtype differ already.
        keep : bool
            Store both tensors.
        """
        blob = reference_blob = None
        if keep:
            blob, reference_blob = self.keep(actual), self.keep(expected)
        self.write(
            msgspec.structs.replace(
                row,
                status="outside",
                measure=measure,
                word=diagnosis.word,
                evidence={**row.evidence, **diagnosis.evidence, **evidence},
                blob=blob,
                reference_blob=reference_blob,
            )
        )

    def computed(
        self,
        row: TensorRecord,
        actual: torch.Tensor,
        *,
        digests: Sequence[TensorDigest] = (),
        measure: Measure | None = None,
        chunks: Chunks | None = None,
        diagnose: Callable[[Measure, Chunks], Diagnosis] = diagnose_computed,
        tolerance: UserTolerance | None = None,
        ingredients: Mapping[str, torch.Tensor | None] | None = None,
    ) -> None:
        """Judge a tensor that a device computed by its measure, name the difference, and record both.

        Parameters
        ----------
        row : TensorRecord
            The row to complete. It has the rule that judges the tensor where no tolerance of the user does, and the
            status of a tensor that is not judged here. It may have a word for a tensor outside its rule, where the
            caller knows more than the numbers tell, and the dtype that the tensor was computed in, where it is stored
            in a wider one.
        digests : sequence of TensorDigest
            One per run on this device, the first run first; unless given, the digest of `actual` is taken.
        measure : Measure or None
            The measure against the exact value, by the user's tolerance where there is one; None where no exact value
            is known, so that only other workers can judge.
        chunks : callable, optional
            Yields the tensor with its exact value; called only where it is outside its rule. None where the tensor is
            not judged here.
        diagnose : callable
            Names the difference of a tensor outside its rule.
        tolerance : UserTolerance, optional
            The tolerance that `measure` was measured by, None where the rule of the row is derived.
        ingredients : mapping, optional
            Tensors on the CPU that are stored where the tensor is outside its rule, for a reproducer: `exact`, and the
            operands that it is computed from.
        """
        digests = digests or [digest(actual)]
        verdict = _judge(row, measure, chunks, diagnose, is_derived=tolerance is None)
        evidence: Mapping[str, Any] = verdict.evidence
        is_outside = verdict.status == "outside"
        # of a larger tensor, block digests and the worst element are recorded alone
        is_stored_as_wrong = is_outside and actual.nbytes <= KEEP_BYTES
        ingredient_blobs: dict[str, str] = {}
        if is_stored_as_wrong:
            tensors = dict(ingredients or {})
            traced_tensors, traced_evidence = self._trace_first_of_stage(row, tensors, evidence.get(LIMITS))
            ingredient_blobs = self._store_ingredients({**tensors, **traced_tensors})
            evidence = {**evidence, **traced_evidence}
        is_stored_on_request = self._keep and chunks is not None
        # blocks locate bitwise differences; after a sum in another order all blocks differ
        has_blocks = is_outside or measure is None
        stated_tolerance = tolerance.stated if measure is not None and tolerance is not None else ""
        self.write(
            msgspec.structs.replace(
                row,
                shape=tuple(actual.shape),
                dtype=row.dtype or name_of(actual.dtype),
                rule=_rule_applied(row, measure, tolerance),
                status=verdict.status,
                digest=digests[0].value,
                blocks=pack_blocks(digests[0].blocks) if has_blocks else "",
                reference=None if measure is None else "float64",
                measure=_recorded_measure(row, measure, tolerance, is_outside=is_outside),
                word=verdict.word,
                evidence={**row.evidence, **evidence},
                blob=self.keep(actual) if is_stored_as_wrong or is_stored_on_request else row.blob,
                reference_blob=ingredient_blobs.pop("exact", None),
                repeats=tuple(repeat.value for repeat in digests[1:]),
                ingredients=ingredient_blobs,
                tolerance=stated_tolerance,
            )
        )

    def _trace_first_of_stage(
        self, row: TensorRecord, ingredients: Mapping[str, torch.Tensor | None], limits: Any
    ) -> TracedOperation:
        """Compute the first wrong tensor of a stage again; return the operation's tensors and evidence about it.

        Both are empty where the stage has been traced already, where nothing traces, and where no operation computes
        this tensor by itself.

        Parameters
        ----------
        limits : any
            Evidence of the diagnosis under the key `LIMITS`, None where it has none.
        """
        exact, allowed = ingredients.get("exact"), ingredients.get("allowed")
        if exact is None or allowed is None or self._trace is None or row.stage in self._traced_stages:
            return {}, {}

        def ratio_of(result: torch.Tensor) -> float:
            return largest_ratio(result, exact, allowed, limits)[0]

        traced = self._trace(row.layer, row.tensor, ratio_of)
        if traced is None:
            return {}, {}
        self._traced_stages.add(row.stage)
        return traced

    def _store_ingredients(self, tensors: Mapping[str, torch.Tensor | None]) -> dict[str, str]:
        """Store tensors that are small enough; return the names that they are stored under, by their own names."""
        return {
            name: self.keep(tensor)
            for name, tensor in tensors.items()
            if tensor is not None and tensor.nbytes <= KEEP_BYTES
        }

    def keep_small(self, tensor: torch.Tensor) -> str | None:
        """Store a tensor of at most `PEER_KEEP_BYTES`; return the name of its blob, None if it is larger."""
        return self.keep(tensor) if tensor.nbytes <= PEER_KEEP_BYTES else None

    def fact(
        self,
        stage: str,
        layer: str,
        tensor: str,
        *,
        status: RecordStatus,
        word: Word | None = None,
        ratio: float | None = None,
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
        ratio : float, optional
            The measured value divided by what is allowed.
        evidence : mapping, optional
            The figures, with units in their names.
        """
        self.write(
            TensorRecord(
                stage,
                layer,
                tensor,
                rule=Rule.LIMIT,
                status=status,
                word=word,
                limit_ratio=None if ratio is None else Real(ratio),
                evidence=dict(evidence or {}),
                reason=reason,
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    """How a computed tensor is judged: its status, the word for its difference, and evidence of the diagnosis."""

    status: RecordStatus
    word: Word | None
    evidence: Mapping[str, Any] = field(default_factory=dict)


def _judge(
    row: TensorRecord,
    measure: Measure | None,
    chunks: Chunks | None,
    diagnose: Callable[[Measure, Chunks], Diagnosis],
    *,
    is_derived: bool,
) -> _Verdict:
    """Judge a tensor by the ratio of its measure; one without a ratio keeps the status and the word of its row."""
    if measure is None or chunks is None or measure.ratio is None:
        return _Verdict(status=row.status, word=row.word)
    is_exact = float(measure.max_abs) == 0 and measure.mismatched == 0
    word, evidence = row.word, dict[str, Any]()
    if passes(measure.ratio):
        # within a user's tolerance, which nobody derived, nothing is known of the cause
        if is_derived:
            word = words.ACCUMULATION_ORDER
        return _Verdict(status="equal" if is_exact else "within", word=word)
    if word is None:
        diagnosis = diagnose(measure, chunks)
        word, evidence = diagnosis.word, diagnosis.evidence
    return _Verdict(status="equal" if is_exact else "outside", word=word, evidence=evidence)


def _rule_applied(row: TensorRecord, measure: Measure | None, tolerance: UserTolerance | None) -> str:
    """Return the rule that judges a tensor: `peer` where no exact value is known."""
    if measure is None:
        return Rule.PEER
    return row.rule if tolerance is None else Rule.USER


def _recorded_measure(
    row: TensorRecord, measure: Measure | None, tolerance: UserTolerance | None, *, is_outside: bool
) -> Measure | None:
    """Leave out of a measure what a comparison takes from elsewhere, and the values of a tensor inside its bound."""
    if measure is None or tolerance is not None:
        return measure
    if row.rule == Rule.RELATIVE:  # a comparison takes the ratio from the error of rounding
        return msgspec.structs.replace(measure, ratio=None)
    if row.rule in (Rule.BOUND, Rule.BLOCK) and not is_outside:
        return measure.without_values()
    return measure


@dataclass(frozen=True, slots=True)
class _Skipping(AbstractContextManager[None, bool]):
    """Record a `Skip` that leaves the `with` block in the place of some rows of a stage."""

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
