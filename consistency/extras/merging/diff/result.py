"""Compare two weight files or folders, and say what came out: `consistency diff`."""

from __future__ import annotations

import time
from pathlib import Path

from consistency.capture.wording import counted
from consistency.comparison.result import Comparison, with_provenance
from consistency.extras.merging.diff.weights import diff_weights
from consistency.plugins import Statement
from consistency.workflows.api import AnyPath
from consistency.workflows.report_folder import output, refuse_among_weights, write_reports


def diff(
    reference: AnyPath,
    other: AnyPath,
    *,
    out: AnyPath | None = None,
    allow_pickle: bool = False,
    replace: bool = False,
) -> Comparison:
    """Compare two weight files, adapters or model folders to the bit, without any model code.

    Parameters
    ----------
    reference, other : path
        A safetensors file, an index of shards, or a folder; in the order of `consistency diff`.
    out : path, optional
        Folder for the report; nothing is kept without it.
    allow_pickle : bool
        Read `.bin` weights, with `weights_only=True`.
    replace : bool
        Overwrite an earlier report in `out`.

    Raises
    ------
    ConsistencyError
        One of them cannot be read. A difference is never raised.
    """
    actual, expected = Path(other), Path(reference)
    target = None if out is None else Path(out)
    if target is not None:
        refuse_among_weights(target, actual, expected)
    with output(target, replace=replace):  # refused before any work
        started = time.monotonic()
        comparison = diff_weights(actual, expected, allow_pickle=allow_pickle)
        comparison = with_provenance(comparison, time.monotonic() - started)
        return write_reports(comparison, target)


def statement(comparison: Comparison) -> Statement:
    """Return the verdict in one sentence."""
    wrong = sum(tensor.is_wrong for tensor in comparison.tensors)
    count = len(comparison.tensors)
    if wrong:
        verb = "differs" if wrong == 1 else "differ"
        return Statement(sentence=f"{wrong} of {counted(count, 'tensor')} {verb}")
    sentence = "the tensor is bitwise equal" if count == 1 else f"all {count} tensors are bitwise equal"
    if comparison.verdict != "consistent":
        sentence = f"{sentence}, but the settings differ"
    return Statement(sentence=sentence)
