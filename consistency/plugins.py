"""Plug-ins: the extras of this package (folders of `extras/`), and those of other distributions. No torch here.

An extra is a package with a module `plugin`, whose `PLUGIN` says what it adds. Parts are named as `module:name`, and
imported when they are used, so that a command pays for no other. A distribution of its own registers the same object as
an entry point of the group `consistency.plugins`:

    [project.entry-points."consistency.plugins"]
    ours = "our_package.plugin:PLUGIN"

The frame finds an extra here and names none. An extra whose folder is deleted is not there, and nothing else is
missing. A plug-in of another distribution that cannot be imported costs itself alone: its parts are not there, and
`failures` says why, by its name.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from consistency.optional import is_there

GROUP = "consistency.plugins"


class Plugin(NamedTuple):
    """What one extra adds: give each part by its name.

    No dataclass, since every start of a command would pay for making it.

    Attributes
    ----------
    name : str
        Name of the extra where somebody is told that it is there, or that it is not.
    commands : mapping of str to str
        Module by the name of a command of `consistency`; its `add` declares the command.
    options : tuple of str
        Fields of `consistency.Options` that nothing but this extra reads.
    stages : tuple of str
        Stages, `module:NAME`, each a `consistency.case.stage.StageSpec`; no torch there.
    glossary : tuple of str
        Pages with entries for `consistency explain`, `package:file`, in the form and with the headings of
        `docs/glossary.md`.
    kinds : tuple of str
        Kinds of findings, `module:KINDS`, each an enumeration or a tuple of them.
    statements : mapping of str to str
        What a report says in the place of a run's verdict, `module:function`, by the name of what was compared: the
        only load path of its rows. The function takes a `Comparison` and returns a `Statement`.
    final_steps : tuple of str
        What a worker does after its stages, `module:NAME`, each a `consistency.case.final_step.FinalStep`; no torch
        there.
    faults : tuple of str
        Rows of planted faults, `module:ROWS`, which the drill finds (`consistency.worker.faults.fault`).
    api : mapping of str to str
        Module by the name that `import consistency` offers.
    finders : tuple of str
        Finders of a comparison, `module:NAME`, each a `consistency.comparison.findings.finder.Finder`.
    remarks : tuple of str
        What is known of findings that others make, `module:NAME`, each a
        `consistency.comparison.findings.remark.Remark`.
    formats : tuple of str
        Formats of a report, `module:NAME`, each a `consistency.report.formats.Format`.
    sections : tuple of str
        Sections of a run's page, `module:NAME`, each a `consistency.report.page.section.PageSection`.
    output_judges : tuple of str
        What judges more by the outputs that the stage `forward` computes in float64, `module:NAME`, each a
        `consistency.worker.judging.outputs.OutputJudge`.
    pasts : tuple of str
        What opens a history and a baseline, `module:function`; it returns a `consistency.workflows.past.Past`.
    case_checks : tuple of str
        What is checked of a case before it is run, `module:function`; it takes a `consistency.Case`, and raises.
    engine_captures : tuple of str
        What judges files of an engine's outputs for the case of a capture, `module:function`: given that capture, the
        files, where to write, and what watches, it returns a capture.
    backends : tuple of str
        Types of devices, `module:NAME`, each a `consistency.devices.backend.Backend`.
    forms : tuple of str
        Closed forms of adapter methods, `module:function`: called once, it returns what makes a form by PEFT's class of
        the layer and that of its LoRA's variant, as `stages/merged/forms/registry.py` has its own.
    """

    name: str
    commands: Mapping[str, str] = {}
    options: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    glossary: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    statements: Mapping[str, str] = {}
    final_steps: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    api: Mapping[str, str] = {}
    finders: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    output_judges: tuple[str, ...] = ()
    pasts: tuple[str, ...] = ()
    case_checks: tuple[str, ...] = ()
    engine_captures: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    forms: tuple[str, ...] = ()


class Statement(NamedTuple):
    """What a report says first: a sentence, and before it a word or two in capitals."""

    sentence: str
    heading: str = ""


class Failure(NamedTuple):
    """A plug-in of another distribution, or a part of one, that cannot be used."""

    what: str
    error: str

    @property
    def sentence(self) -> str:
        """Return what a user is told."""
        return f"{self.what} cannot be used: {self.error}"


@functools.cache
def own() -> tuple[Plugin, ...]:
    """Return the extras of this package that are there, in the order of their folders' names."""
    return tuple(_as_plugin(module.PLUGIN) for module in modules_of("extras", "plugin"))


def modules_of(room: str, name: str) -> Iterator[ModuleType]:
    """Yield the module `name` of every folder in a room of this package, in the order of the folders' names."""
    for path in sorted((Path(__file__).parent / room).glob(f"*/{name}.py")):
        yield importlib.import_module(f"{__package__}.{room}.{path.parent.name}.{name}")


@functools.cache
def _of_other_distributions() -> tuple[Plugin, ...]:
    """Return the plug-ins of other distributions; note those that fail."""
    if not _is_any_registered():
        return ()
    from importlib import metadata  # takes longer than all of the rest

    plugins = []
    for point in sorted(metadata.entry_points(group=GROUP), key=lambda point: point.name):
        try:
            plugins.append(_as_plugin(point.load()))
        except (Exception, SystemExit) as error:  # whatever its code raises, it is that plug-in's
            distribution = point.dist.name if point.dist is not None else point.value
            note_failure(f"the plug-in {point.name} of {distribution}", error)
    return tuple(plugins)


def _is_any_registered() -> bool:
    """Report whether any distribution may register a plug-in, by the text of its entry points.

    The import system answers that too, but importing it takes as long as a whole command line otherwise.
    """
    for entry in sys.path:
        folder = entry or "."
        if os.path.isfile(folder):  # noqa: PTH113 - pathlib takes several times as long for all of this
            return True  # an archive: what is in it, the import system knows
        with suppress(OSError):
            for name in os.listdir(folder):  # noqa: PTH208
                if name.endswith("-info") and _registers(f"{folder}/{name}/entry_points.txt"):
                    return True
    return False


def _registers(file: str) -> bool:
    """Report whether a distribution's entry points have one of this group."""
    try:
        with open(file, encoding="utf-8") as content:  # noqa: PTH123
            return f"[{GROUP}]" in content.read()
    except (OSError, UnicodeDecodeError):
        return False


def _as_plugin(value: object) -> Plugin:
    """Return what a module or an entry point gives as its plug-in; raise TypeError where it is none."""
    if not isinstance(value, Plugin):
        raise TypeError(f"not a consistency.plugins.Plugin, but {type(value).__name__}")
    return value


def plugins() -> tuple[Plugin, ...]:
    """Return all plug-ins: the extras of this package first, then those of other distributions."""
    return own() + _of_other_distributions()


_failures: list[Failure] = []


def note_failure(what: str, error: BaseException) -> None:
    """Note that something of another distribution cannot be used: nobody else is to suffer from it.

    `what` is its name in a sentence: `the plug-in ours of our-package`.
    """
    message_lines = str(error).strip().splitlines() or ["no message"]
    reason = f"{type(error).__name__}: {message_lines[0]}"
    failure = Failure(what=what, error=reason[:300])
    if failure not in _failures:
        _failures.append(failure)


@contextmanager
def at_own_cost(reference: str, what: str, *, passes: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Let an error of this package's code through, and note one of another distribution, which costs itself alone.

    Parameters
    ----------
    reference : str
        The object that is called, as `module:name`.
    what : str
        Its name for users: `the section ours.page:SECTION`.
    passes : tuple of exception classes
        Errors that are let through, whoever wrote the code.
    """
    try:
        yield
    except passes:
        raise
    except Exception as error:
        if is_own(reference):
            raise
        note_failure(what, error)


def asked(part: str, case: Any) -> Iterator[Any]:
    """Yield the parts of plug-ins that a case wants, of a field of `Plugin` whose parts have `is_asked`."""
    for reference, value in offered(part):
        is_wanted = False
        with at_own_cost(reference, f"{reference}, asked whether a case wants it,"):
            is_wanted = value.is_asked(case)
        if is_wanted:
            yield value


def failures() -> tuple[Failure, ...]:
    """Return the failures of other distributions' plug-ins, as far as their parts were asked for."""
    return tuple(_failures)


INSTALL = "pip install --force-reinstall --no-deps peft-consistency brings it back"
"""Advice where an extra of this package is not installed."""


@functools.cache
def absent(part: str) -> dict[str, str]:
    """Return the commands, stages, options or names (`api`) that are not installed, each with its extra.

    A file beside this module says what each extra of this package adds, since an extra that is not here cannot.
    """
    import json

    try:
        content = (Path(__file__).parent / "extras.json").read_text(encoding="utf-8")
    except OSError:
        return {}
    installed = {plugin.name for plugin in own()}
    parts_by_extra: dict[str, dict[str, list[str]]] = json.loads(content)
    missing: dict[str, str] = {}
    for extra, parts in parts_by_extra.items():
        if extra not in installed:
            missing |= dict.fromkeys(parts[part], extra)
    return missing


def not_installed(what: str, extra: str) -> str:
    """Return the sentence for a part of an extra that somebody asks for and that is not here."""
    if extra:
        return f"{what} is a part of the extra {extra}, which is not installed here"
    return f"{what} is not installed"


def commands(named: str | None = None) -> dict[str, list[str]]:
    """Return the commands of all plug-ins by the module that declares them.

    Where a command is `named` that an extra of this package has, nothing else is looked for: to ask which distributions
    are installed takes longer than most commands need to start.
    """
    own_commands = _commands_by_module(own())
    if named is not None and any(named in names for names in own_commands.values()):
        return own_commands
    return _commands_by_module(plugins())


def is_own(module: str) -> bool:
    """Report whether a module is of this package."""
    return module.startswith(f"{__package__}.")


def _commands_by_module(plugins_asked: tuple[Plugin, ...]) -> dict[str, list[str]]:
    modules: dict[str, list[str]] = {}
    for plugin in plugins_asked:
        for command, module in plugin.commands.items():
            modules.setdefault(module, []).append(command)
    return modules


def resolved(reference: str) -> Any:
    """Return the object that a plug-in names as `module:name`; this imports its module."""
    import pkgutil

    return pkgutil.resolve_name(reference)


def kinds() -> Iterator[str]:
    """Yield the kinds of findings of all plug-ins."""
    for _, enumeration in offered("kinds"):
        yield from map(str, enumeration)


def statement_of(comparison: Any) -> Statement | None:
    """Return a plug-in's statement on a comparison that is no run; None for a run, or where no plug-in knows it."""
    if len(comparison.load_paths) != 1:
        return None
    (compared,) = comparison.load_paths  # of what is no run, the name of what was compared
    for plugin in plugins():
        reference = plugin.statements.get(compared)
        if reference is not None and is_there(reference):
            statement: Statement = resolved(reference)(comparison)
            return statement
    return None


def api() -> dict[str, str]:
    """Return the names that plug-ins add to `import consistency`, with their modules."""
    homes: dict[str, str] = {}
    for plugin in plugins():
        homes |= {name: module for name, module in plugin.api.items() if is_there(module)}
    return homes


def offered(part: str) -> Iterator[tuple[str, Any]]:
    """Yield the parts of plug-ins in a field of `Plugin` whose parts are `module:name`, each with its reference.

    A part of another distribution that cannot be imported is noted, and left out. A part of an extra whose module was
    deleted is left out too.
    """
    for plugin in plugins():
        for reference in getattr(plugin, part):
            if not is_there(reference):
                continue
            try:
                value = resolved(reference)
            except (Exception, SystemExit) as error:  # a module may end the process on import
                if is_own(reference):
                    raise
                note_failure(f"{reference} of the plug-in {plugin.name}", error)
            else:
                yield reference, value
