"""Decide whether this process may use the compiled kernel.

An installation has the kernel if there was a C compiler (`build.py`). Otherwise NumPy computes the same results, bit
for bit except for mean and root mean square, which are sums of floats (`check.SUMS_APART`). A wrong measure or digest
is a false alarm or a miss. So before a process first uses the kernel for a purpose, it checks it against NumPy on a
small, hard input (`check.py`). If they differ, or if the kernel cannot be loaded, the process stays with NumPy, and
`state` gives the reason.
"""

from __future__ import annotations

import functools

from consistency.numerics.kernels import check
from consistency.numerics.kernels.compiled import PURPOSES, VARIANTS, Kernel, load


@functools.cache
def _refused(purpose: str) -> str | None:
    found = load()
    return found if isinstance(found, str) else check.check(found, purpose)


def trusted(purpose: str) -> Kernel | None:
    """Return the kernel if it may be used for one of `PURPOSES`; None means NumPy."""
    found = load()
    return found if isinstance(found, Kernel) and _refused(purpose) is None else None


def state() -> str:
    """Return which path this process takes: `compiled: ` and the variant, or `numpy: ` and the reason."""
    found = load()
    if isinstance(found, str):
        return f"numpy: {found}"
    refused = [f"{purpose}: {reason}" for purpose in PURPOSES if (reason := _refused(purpose)) is not None]
    return f"numpy: {'; '.join(refused)}" if refused else f"compiled: {VARIANTS[found.variant]}"


def forget() -> None:
    """Clear the results, so that the next use checks again: for tests, which disable and break the kernel."""
    load.cache_clear()
    _refused.cache_clear()
