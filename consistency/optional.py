"""Parts of this package that others name and do not import: where one is deleted, nothing else is missing.

A part is named by its module, or by a function of it: `consistency.stages.transfer.worker:run`.
"""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).parent


def is_there(reference: str) -> bool:
    """Return whether the module of a reference exists, without importing any module.

    A module of another package is taken to exist.
    """
    module = reference.partition(":")[0]
    package, *names = module.split(".")
    if package != _ROOT.name:
        return True
    path = _ROOT.joinpath(*names)
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()
