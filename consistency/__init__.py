"""Check that a base model and a LoRA adapter produce the same numbers on every device.

Importing this package imports no torch, and no module of its own until a name is used: the pytest plugin is in it, and
a session that does not use the plugin should not pay for it.

Type checkers read `__init__.pyi`, which is generated: it has the names of this module and those of the extras.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in `typing`, whose import takes longer than all the rest of this one
if TYPE_CHECKING:
    from typing import Any

# where each name of the frame is; those of extras are in what they say of themselves (`consistency.plugins`)
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
    "compare": "consistency.workflows.api",
    "load_report": "consistency.workflows.api",
    "run": "consistency.workflows.api",
    "run_suite": "consistency.workflows.api",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name == "__all__":
        return __dir__()
    home = _HOMES.get(name) or _home_in_an_extra(name)
    if home is None:
        raise AttributeError(f"module 'consistency' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def _home_in_an_extra(name: str) -> str | None:
    """Return the module of a name that an extra offers; None for any other, such as a module of this package."""
    from consistency.optional import is_there

    if name.startswith("__") or is_there(f"consistency.{name}"):
        return None
    from consistency import plugins

    extra = plugins.absent("api").get(name)
    if extra is not None:
        sentence = plugins.not_installed(f"consistency.{name}", extra)
        raise AttributeError(f"{sentence}: {plugins.INSTALL}")
    return plugins.api().get(name)


def __dir__() -> list[str]:
    from consistency import plugins

    return sorted([*_HOMES, *plugins.api()])
