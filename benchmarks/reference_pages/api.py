"""`docs/api.md`: the public names of the package."""

from __future__ import annotations

import enum
import inspect

import consistency
import consistency.testing
from benchmarks.reference_pages.markdown import code, fence, prose, table
from consistency.case.engine_file import EngineFile
from consistency.case.fit import Fit
from consistency.case.load_path import LoadPath
from consistency.case.named_adapters import NamedAdapter
from consistency.case.profile import Switch
from consistency.case.stages import Level, Stage
from consistency.comparison.outcomes import Outcome
from consistency.comparison.result import Consequence, Finding, TensorComparison, WorkerSummary
from consistency.errors import CaptureError, InputError, UsageError
from consistency.worker.protocol import Event

USED: tuple[type, ...] = (
    Finding, Consequence, TensorComparison, Outcome, WorkerSummary, Stage, Level, LoadPath, Switch, NamedAdapter,
    EngineFile, Fit, Event, UsageError, InputError, CaptureError,
)  # fmt: skip
"""Types that the public ones have in their fields, take or raise."""

_HEAD = """# Python interface

`import consistency` imports no torch, and a name of this list is imported when it is used. Nothing that is not on this
page is part of the interface.
"""

_TESTING = """## consistency.testing

[Which tolerance for my test?](testing.md) shows how these are used. Importing this module imports torch, and no other
library of models.
"""


def page() -> str:
    """Return the page."""
    names = [name for name in consistency.__all__ if not name.startswith("__")]
    lines = [_HEAD, *table(("name", "kind", "purpose"), map(_row, consistency.__all__)), ""]
    for name in names:
        directive = _directive(f"consistency.{name}", getattr(consistency, name))
        lines += [f"## {name}", "", *fence(directive, "{eval-rst}"), ""]
    lines += [_TESTING]
    for name in consistency.testing.__all__:
        found = getattr(consistency.testing, name)
        lines += [f"### {name}", "", *fence(_directive(f"consistency.testing.{name}", found), "{eval-rst}"), ""]
    lines += ["## Types of fields, and errors", "", "The names above have them in fields, take or raise them.", ""]
    for kind in USED:
        lines += [*fence(_directive(f"{kind.__module__}.{kind.__name__}", kind), "{eval-rst}"), ""]
    return "\n".join(lines)


def _row(name: str) -> list[str]:
    if name == "__version__":
        return [code(name), "str", "The version of this package"]
    found = getattr(consistency, name)
    kind = "class" if inspect.isclass(found) else "function"
    if kind == "class" and issubclass(found, Exception):
        kind = "error"
    first = (inspect.getdoc(found) or "").partition("\n\n")[0]
    return [f"[{code(name)}](#{name.lower()})", kind, prose(first)]


def _directive(name: str, found: object) -> str:
    if not inspect.isclass(found):
        return f".. autofunction:: {name}"
    return f".. autoclass:: {name}\n   :members:" + ("\n   :undoc-members:" if issubclass(found, enum.Enum) else "")
