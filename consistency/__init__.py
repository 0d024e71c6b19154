"""Tell whether the same base model and the same adapter are the same numbers on every device.

Importing this package imports no torch, and nothing of its own until a name is asked for: the pytest plugin lives in
it, and a session that does not use the plugin pays nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from consistency.api import Comparison, Report, compare, run
    from consistency.case import Case, Options
    from consistency.errors import ConsistencyError
    from consistency.override import Override
    from consistency.wrapping import WrapperReport, check_wrapped

__version__ = "0.1.0"

__all__ = [
    "Case",
    "Comparison",
    "ConsistencyError",
    "Options",
    "Override",
    "Report",
    "WrapperReport",
    "__version__",
    "check_wrapped",
    "compare",
    "run",
]

_HOMES = {
    "Case": "consistency.case",
    "Options": "consistency.case",
    "ConsistencyError": "consistency.errors",
    "Override": "consistency.override",
    "Comparison": "consistency.api",
    "Report": "consistency.api",
    "compare": "consistency.api",
    "run": "consistency.api",
    # these two import torch when they are asked for
    "WrapperReport": "consistency.wrapping",
    "check_wrapped": "consistency.wrapping",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'consistency' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
