"""`docs/options.md`: every option of a case, as it is given in each place."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator

from benchmarks.reference_pages.markdown import code, prose, table
from consistency.case.options import OPTIONS, Edge, Option, Options
from consistency.case.stages import LEVELS, SPECS

_HEAD = """# Options

What a user can set about a case and where it runs. Each option is declared once, for the command line, a TOML file,
pytest and Python. A relative path in a TOML file is relative to that file. What each command takes is in its
[help](commands.md).
"""

_PLACES = (
    ("command line", Edge.COMMAND_LINE), ("TOML", Edge.TOML), ("pytest", Edge.PYTEST),
    ("pytest, ini file", Edge.PYTEST_INI),
)  # fmt: skip


def page() -> str:
    """Return the page."""
    rows = [[f"[{code(_title(one))}](#{_title(one).lstrip('-')})", prose(one.help)] for one in OPTIONS]
    lines = [_HEAD, *table(("option", "meaning"), rows), ""]
    for option in OPTIONS:
        lines += [f"## {_title(option).lstrip('-')}", "", f"{prose(option.help)}.", ""]
        lines += [*table(("", ""), _facts(option)), ""]
    return "\n".join([*lines, *_levels()])


def _title(option: Option) -> str:
    """Return the option's name on a command line, or in TOML where it is not there."""
    edge = Edge.TOML if Edge.COMMAND_LINE in option.absent else Edge.COMMAND_LINE
    return edge.spell(option.name)


def _facts(option: Option) -> Iterator[list[str]]:
    """Yield how an option is given, and what it takes."""
    (field,) = (field for field in dataclasses.fields(Options) if field.name == option.attribute)
    for place, edge in _PLACES:
        yield [place, f"no: {prose(option.absent[edge])}" if edge in option.absent else code(_given(option, edge))]
    yield ["Python", code(f"{option.attribute}: {field.type}")]
    if option.choices:
        yield ["values", ", ".join(map(code, option.choices))]
    if option.repeatable:
        yield ["several", "given several times on a command line, a list in TOML"]
    yield ["default", _default(field.default)]
    for level, value in _by_level(option):
        yield [f"at level {level}", value]
    asked = [stage for stage, spec in SPECS.items() if spec.option == option.attribute]
    if asked:
        yield ["asks for", f"stage {', '.join(map(code, asked))}"]


def _given(option: Option, edge: Edge) -> str:
    """Return an option with what it takes."""
    spelled = edge.spell(option.name)
    value = "" if option.type is bool else option.metavar or ("VALUE" if option.choices else "")
    if edge in (Edge.COMMAND_LINE, Edge.PYTEST):
        return f"{spelled} {value}".rstrip()
    return f"{spelled} = {value or 'true'}"


def _default(value: object) -> str:
    if value is None or value == ():
        return "none"
    if isinstance(value, enum.Enum):
        return code(str(value.value))
    if isinstance(value, tuple):
        return ", ".join(code(str(one)) for one in value)
    return code(str(value).lower() if isinstance(value, bool) else str(value))


def _by_level(option: Option) -> Iterator[tuple[str, str]]:
    """Yield what a level takes where the option is not given."""
    for level, plan in LEVELS.items():
        match option.attribute:
            case "stages":
                yield level.value, ", ".join(map(code, plan.stages))
            case "load_paths":
                sides = ", ".join(code(f"+{side}") for side in plan.sides)
                yield level.value, f"the default ones{', and ' + sides if sides else ''}"
            case "repeat":
                yield level.value, code(str(plan.repeat))


def _levels() -> Iterator[str]:
    yield "## What a level is"
    yield ""
    titles = ("level", "sequences", "tokens each", "safe_merge", "adapter loaded again", "not checked")
    rows = [
        [code(level.value), str(plan.sequences), str(plan.tokens), "yes" if plan.safe_merge else "no",
         "yes" if plan.reload else "no", prose(", ".join(plan.not_checked) or "nothing is left out")]
        for level, plan in LEVELS.items()
    ]  # fmt: skip
    yield from table(titles, rows)
