"""Parts of this package that others name and do not import: where one is deleted, what it adds is gone, and no more.

A part is named by its module, or by a function of it: `consistency.stages.transfer.worker:run`.
"""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).parent


def is_there(reference: str) -> bool:
    """Return whether the module of a reference exists, without importing any; one of another package is taken to."""
    package, *names = reference.partition(":")[0].split(".")
    place = _ROOT.joinpath(*names)
    return package != _ROOT.name or place.with_suffix(".py").exists() or (place / "__init__.py").exists()
