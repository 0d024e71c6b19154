"""Other ways to decide whether two tensors are equal, each as its users call it."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

Differs = Callable[[torch.Tensor, torch.Tensor], bool | None]
"""Whether it reports the actual tensor as different from the expected one; None if it declines to answer."""

SLOW = 1 << 20
"""Largest number of elements for a comparer that checks them one by one in Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparer:
    """One way to compare.

    Attributes
    ----------
    name : str
        Short enough for a column head.
    call : str
        What is called, in Markdown.
    differs : callable
    library : str
        The distribution it is from, for its version.
    slow : bool
        Checks elements one by one in Python.
    """

    name: str
    call: str
    differs: Differs
    library: str
    slow: bool = False


def raises(check: Callable[[torch.Tensor, torch.Tensor], object]) -> Differs:
    """Turn a check that raises AssertionError on a difference into one that answers."""

    def differs(actual: torch.Tensor, expected: torch.Tensor) -> bool:
        try:
            check(actual, expected)
        except AssertionError:
            return True
        return False

    return differs


def _close(*, tolerance: float | None = None, equal_nan: bool = False) -> Differs:
    return raises(lambda a, e: torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance, equal_nan=equal_nan))


def _loop(a: torch.Tensor, e: torch.Tensor) -> bool:
    difference = (a - e).abs()
    numbers = difference.max(), difference.mean(), difference.square().mean()
    return not torch.equal(a, e) or any(float(n) != 0 for n in numbers)


def _cosine(a: torch.Tensor, e: torch.Tensor) -> bool:
    return not float(torch.nn.functional.cosine_similarity(a.flatten(), e.flatten(), dim=0)) > 0.9999


def _relative_norm(a: torch.Tensor, e: torch.Tensor) -> bool:
    return not float((a - e).norm() / e.norm()) < 1e-6


def _statistics(a: torch.Tensor, e: torch.Tensor) -> bool:
    def of(t: torch.Tensor) -> list[str]:
        return [f"{float(x):.6f}" for x in (t.min(), t.max(), t.mean(), t.std())]

    return of(a) != of(e)


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


TORCH = (
    Comparer(name="equal", call="`torch.equal(a, e)`", differs=lambda a, e: not torch.equal(a, e), library="torch"),
    Comparer(
        name="allclose", call="`torch.allclose(a, e)`", differs=lambda a, e: not torch.allclose(a, e), library="torch"
    ),
    Comparer(name="assert_close", call="`torch.testing.assert_close(a, e)`", differs=_close(), library="torch"),
    Comparer(
        name="… 1e-4",
        call="`assert_close(a, e, rtol=1e-4, atol=1e-4)`, as many of transformers' own tests have it",
        differs=_close(tolerance=1e-4),
        library="torch",
    ),
    Comparer(
        name="… equal_nan", call="`assert_close(a, e, equal_nan=True)`", differs=_close(equal_nan=True), library="torch"
    ),
    Comparer(name="… 0", call="`assert_close(a, e, rtol=0, atol=0)`", differs=_close(tolerance=0), library="torch"),
    Comparer(
        name="… 0, equal_nan",
        call="`assert_close(a, e, rtol=0, atol=0, equal_nan=True)`, its strictest setting that is quiet on equal bits",
        differs=_close(tolerance=0, equal_nan=True),
        library="torch",
    ),
    Comparer(
        name="array_equal",
        call="`numpy.array_equal(a, e)`",
        differs=lambda a, e: not np.array_equal(a.numpy(), e.numpy()),
        library="numpy",
    ),
    Comparer(
        name="np.allclose",
        call="`numpy.allclose(a, e)`",
        differs=lambda a, e: not np.allclose(a.numpy(), e.numpy()),
        library="numpy",
    ),
    Comparer(
        name="assert_allclose",
        call="`numpy.testing.assert_allclose(a, e)`",
        differs=raises(lambda a, e: np.testing.assert_allclose(a.numpy(), e.numpy())),
        library="numpy",
    ),
    Comparer(
        name="assert_array_equal",
        call="`numpy.testing.assert_array_equal(a, e)`",
        differs=raises(lambda a, e: np.testing.assert_array_equal(a.numpy(), e.numpy())),
        library="numpy",
    ),
)
"""Functions of torch and NumPy."""

_HASH = Comparer(
    name="hash_tensor",
    call="`torch.hash_tensor(a) == torch.hash_tensor(e)`",
    differs=lambda a, e: not torch.equal(torch.hash_tensor(a), torch.hash_tensor(e)),
    library="torch",
)

SUMMARIES = (
    Comparer(
        name="loop",
        call="the loop that bug reports have: largest, mean and mean squared `a - e`, and `torch.equal`",
        differs=_loop,
        library="torch",
    ),
    Comparer(
        name="mean < 1e-5",
        call="`(a - e).abs().mean() < 1e-5`",
        differs=lambda a, e: not float((a - e).abs().mean()) < 1e-5,
        library="torch",
    ),
    Comparer(name="cosine", call="cosine similarity above 0.9999", differs=_cosine, library="torch"),
    Comparer(name="norm", call="`(a - e).norm() / e.norm() < 1e-6`", differs=_relative_norm, library="torch"),
    Comparer(
        name="statistics",
        call="smallest, largest, mean and standard deviation of each, printed to six digits",
        differs=_statistics,
        library="torch",
    ),
    *([_HASH] if hasattr(torch, "hash_tensor") else []),  # not every version of torch that we support has it
    Comparer(
        name="SHA-256", call="SHA-256 of the bytes", differs=lambda a, e: _sha256(a) != _sha256(e), library="torch"
    ),
)
"""What is made of torch's and NumPy's functions: numbers, statistics and hashes."""


def _approx() -> Comparer:
    import pytest

    return Comparer(
        name="approx",
        call="`a.numpy() == pytest.approx(e.numpy())`",
        differs=lambda a, e: bool(a.numpy() != pytest.approx(e.numpy())),
        library="pytest",
        slow=True,
    )


def _deepdiff() -> Comparer:
    from deepdiff import DeepDiff

    return Comparer(
        name="deepdiff",
        call="`DeepDiff(e.numpy(), a.numpy())`",
        differs=lambda a, e: bool(DeepDiff(e.numpy(), a.numpy())),
        library="deepdiff",
        slow=True,
    )


def _polygraphy() -> Comparer:
    from polygraphy.comparator import Comparator, IterationResult, RunResults
    from polygraphy.logger import G_LOGGER

    G_LOGGER.module_severity = G_LOGGER.CRITICAL

    def differs(actual: torch.Tensor, expected: torch.Tensor) -> bool:
        runs = RunResults()
        for name, tensor in (("actual", actual), ("expected", expected)):
            array = np.ascontiguousarray(tensor.numpy()).reshape(tensor.shape)  # as it comes out of a file
            runs.append((name, [IterationResult({"x": array}, runner_name=name)]))
        return not Comparator.compare_accuracy(runs)

    return Comparer(
        name="Polygraphy",
        call="`Comparator.compare_accuracy(runs)`, what `polygraphy run --load-outputs` ends in",
        differs=differs,
        library="polygraphy",
    )


def _msprobe() -> Comparer:
    import logging

    from msprobe.core.compare.multiprocessing_compute import check_accuracy
    from msprobe.core.compare.npy_compare import CompareResult, ValidateTensor, compare_ops_apply

    logging.disable(logging.INFO)  # it tells of every algorithm that it loads

    def differs(actual: torch.Tensor, expected: torch.Tensor) -> bool | None:
        arrays = CompareResult(actual.numpy().copy(), expected.numpy().copy())  # it overwrites what is not finite
        checked = ValidateTensor().check_tensor(arrays)
        measures, _ = compare_ops_apply(checked.n_value, checked.b_value, checked.error_flag, checked.err_msg)
        reached = check_accuracy(measures[0], measures[2])  # by the cosine and the largest difference
        return {"Yes": False, "No": True, "Unmatched": True}.get(reached)

    return Comparer(
        name="msprobe",
        call='the column "Accuracy Reached or Not" of `msprobe compare`, by the functions that fill it',
        differs=differs,
        library="mindstudio-probe",
    )


_OPTIONAL = {
    "pytest": _approx,
    "deepdiff": _deepdiff,
    "polygraphy": _polygraphy,
    "mindstudio-probe": _msprobe,
}


def installed() -> tuple[tuple[Comparer, ...], tuple[str, ...]]:
    """Return the comparers of libraries that are installed, and the names of those that are not."""
    found, absent = [], []
    for library, make in _OPTIONAL.items():
        try:
            importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            absent.append(library)
        else:
            found.append(make())
    return tuple(found), tuple(absent)
