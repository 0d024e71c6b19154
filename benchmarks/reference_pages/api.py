"""`docs/api.md`: the public names of the package."""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Iterator
from typing import Any, NewType

import consistency
import consistency.testing
from benchmarks.reference_pages.markdown import code, fence, prose, table
from consistency.case.case import Fit
from consistency.case.engine_file import EngineFile
from consistency.case.load_path import LoadPath
from consistency.case.named_adapters import NamedAdapter
from consistency.case.profile import Switch
from consistency.case.stage import Level, Stage
from consistency.comparison.outcomes import Outcome
from consistency.comparison.result import Consequence, Finding, TensorComparison, WorkerSummary
from consistency.errors import CaptureError, InputError, UsageError
from consistency.worker.protocol import Event

_NAMES = {"Stage": "Name of a [stage](stages.md); a plug-in may have further ones."}
"""What a type of names is, which has no docstring."""

USED: tuple[Any, ...] = (
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
        lines += [f"## {name}", "", *_described(name, getattr(consistency, name))]
        if inspect.ismodule(module := getattr(consistency, name)):
            for member in module.__all__:
                lines += [f"### {name}.{member}", "", *_described(member, getattr(module, member))]
    lines += [_TESTING]
    for name in consistency.testing.__all__:
        lines += [f"### {name}", "", *_described(name, getattr(consistency.testing, name))]
    lines += ["## Types of fields, and errors", "", "The names above have them in fields, take or raise them.", ""]
    for kind in USED:
        lines += [f"### {kind.__name__}", "", *_described(kind.__name__, kind)]
    return "\n".join(lines)


def _row(name: str) -> list[str]:
    if name == "__version__":
        return [code(name), "str", "The version of this package"]
    found = getattr(consistency, name)
    kind = "class" if inspect.isclass(found) else "function"
    if inspect.ismodule(found):
        kind = "module"
    if kind == "class" and issubclass(found, Exception):
        kind = "error"
    first = (inspect.getdoc(found) or "").partition("\n\n")[0]
    return [f"[{code(name)}](#{name.lower()})", kind, prose(first)]


def _described(name: str, found: Any) -> Iterator[str]:
    """Yield what a forge shows as it stands: how to call it, its docstring, and the members of a class."""
    if isinstance(found, NewType):
        yield from fence(f'{name} = NewType("{name}", {found.__supertype__.__name__})', "python")
        yield from ("", _NAMES[name], "")
        return
    if inspect.ismodule(found):
        yield from _docstring(inspect.getdoc(found) or "")
        return
    if isinstance(found, enum.EnumType):
        values = {member: one.value for member, one in inspect.getmembers(found) if member.isupper()}
        yield from fence("\n".join(f'{name}.{member} = "{value}"' for member, value in values.items()), "python")
    elif not inspect.isclass(found):
        yield from fence(_signature(name, found), "python")
    else:
        yield from fence(f"class {name}\n" + "".join(_fields(found)), "python")
    yield ""
    yield from _docstring(inspect.getdoc(found) or "")
    members = [] if not inspect.isclass(found) or issubclass(found, str) else _members(found)
    for member, one in members:
        is_property = isinstance(one, property)
        of = one.fget if is_property else getattr(one, "__func__", one)
        shown = f"{name}.{member}" if is_property else _signature(f"{name}.{member}", of)
        yield f"* {code(' '.join(shown.split()))}: {prose((inspect.getdoc(of) or '').partition(chr(10) * 2)[0])}"
    if members:
        yield ""


def _signature(name: str, found: Any) -> str:
    given = inspect.signature(found)
    takes = [one for one in given.parameters.values() if one.name not in ("self", "cls")]
    gives = "" if given.return_annotation is given.empty else f" -> {given.return_annotation}"
    line = f"{name}{given.replace(parameters=takes, return_annotation=given.empty)}".replace("'", "")
    return f"{line}{gives}" if len(line) < 100 else f"{name}(" + "".join(
        f"\n    {str(one).replace(chr(39), '')}," for one in takes
    ) + f"\n){gives}"  # fmt: skip


def _fields(found: Any) -> Iterator[str]:
    for kind in reversed(found.__mro__[:-1]):
        if not kind.__module__.startswith("consistency"):
            continue
        for name, annotation in inspect.get_annotations(kind).items():
            if not name.startswith("_") and "ClassVar" not in str(annotation):
                yield f"    {name}: {annotation if isinstance(annotation, str) else annotation.__name__}\n"


def _members(found: Any) -> list[tuple[str, Any]]:
    """Return the methods and properties of a class of this package that are documented."""
    of = [kind for kind in found.__mro__ if kind.__module__.startswith("consistency")]
    return [
        (name, one)
        for kind in of
        for name, one in vars(kind).items()
        if not name.startswith("_")
        and (isinstance(one, property) or inspect.isroutine(getattr(one, "__func__", one)))
        and (inspect.getdoc(one.fget if isinstance(one, property) else one))
    ]


_SECTION = re.compile(r"^(\w[\w ]*)\n-{3,}\n", re.MULTILINE)


def _docstring(text: str) -> Iterator[str]:
    """Yield a docstring in numpy's style as Markdown: its paragraphs, then a list per section."""
    first, *sections = _SECTION.split(text)
    yield from _paragraphs(first)
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        yield f"**{title}**"
        yield ""
        for entry in re.split(r"\n(?=\S)", body.strip()):
            name, _, rest = entry.partition("\n")
            told = " ".join(prose(line.strip()) for line in rest.splitlines())
            yield f"* {code(name)}" + (f": {told}" if told else "")
        yield ""


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.strip().split("\n\n"):
        if paragraph.startswith(("::", "    ")):
            yield from fence(inspect.cleandoc(paragraph.removeprefix("::")))
        else:
            yield prose(paragraph)
        yield ""
