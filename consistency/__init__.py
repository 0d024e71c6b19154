"""Check that a base model and a LoRA adapter produce the same numbers on every device.

Importing this package imports no torch, and no module of its own until a name is used: the pytest plugin is in it, and
a session that does not use the plugin should not pay for it.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in `typing`, whose import takes longer than all the rest of this one
if TYPE_CHECKING:
    from typing import Any

    from consistency.capture.version import __version__
    from consistency.case.case import Case
    from consistency.case.options import Options
    from consistency.case.tolerance import Override
    from consistency.errors import ConsistencyError
    from consistency.worker.text_check import Text, TextReport, check_text
    from consistency.worker.wrapper_check import WrapperReport, check_wrapped
    from consistency.workflows.api import (
        Comparison,
        Report,
        SuiteResult,
        assert_consistent,
        check_merged,
        compare,
        diff,
        load_report,
        run,
        run_suite,
    )

__all__ = [
    "Case",
    "Comparison",
    "ConsistencyError",
    "Options",
    "Override",
    "Report",
    "SuiteResult",
    "Text",
    "TextReport",
    "WrapperReport",
    "__version__",
    "assert_consistent",
    "check_merged",
    "check_text",
    "check_wrapped",
    "compare",
    "diff",
    "load_report",
    "run",
    "run_suite",
]

_HOMES = {
    "__version__": "consistency.capture.version",
    "Case": "consistency.case.case",
    "Options": "consistency.case.options",
    "ConsistencyError": "consistency.errors",
    "Override": "consistency.case.tolerance",
    "Comparison": "consistency.workflows.api",
    "Report": "consistency.workflows.api",
    "SuiteResult": "consistency.workflows.api",
    "assert_consistent": "consistency.workflows.api",
    "check_merged": "consistency.workflows.api",
    "compare": "consistency.workflows.api",
    "diff": "consistency.workflows.api",
    "load_report": "consistency.workflows.api",
    "run": "consistency.workflows.api",
    "run_suite": "consistency.workflows.api",
    # these import torch when they are used
    "Text": "consistency.worker.text_check",
    "TextReport": "consistency.worker.text_check",
    "check_text": "consistency.worker.text_check",
    "WrapperReport": "consistency.worker.wrapper_check",
    "check_wrapped": "consistency.worker.wrapper_check",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'consistency' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
