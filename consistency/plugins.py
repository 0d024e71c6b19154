"""What plugs in: folders of `extras/`, and of other distributions that register one. No torch here.

An extra is a package with a module `plugin`, whose `PLUGIN` says what it adds. Parts are named as `module:name`, and
imported when they are used, so that a command pays for no other. A distribution of its own registers the same object as
an entry point of the group `consistency.plugins`:

    [project.entry-points."consistency.plugins"]
    ours = "our_package.plugin:PLUGIN"

The frame finds an extra here and names none. One whose folder is deleted is not there, and nothing else is missing. One
of another distribution that cannot be imported costs itself alone: what it would have added is not there, and
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
        What it is called where somebody is told that it is there, or that it is not.
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
    """Return the extras of this package that are there, by name."""
    return tuple(_checked(module.PLUGIN) for module in modules_of("extras", "plugin"))


def modules_of(room: str, name: str) -> Iterator[ModuleType]:
    """Yield the module of this name of each folder of a room of this package, by the folders' names."""
    for place in sorted((Path(__file__).parent / room).glob(f"*/{name}.py")):
        yield importlib.import_module(f"{__package__}.{room}.{place.parent.name}.{name}")


@functools.cache
def _others() -> tuple[Plugin, ...]:
    """Return the plug-ins of other distributions; those that fail are noted."""
    if not _is_any_registered():
        return ()
    from importlib import metadata  # takes longer than all of the rest

    plugins = []
    for point in sorted(metadata.entry_points(group=GROUP), key=lambda point: point.name):
        try:
            plugins.append(_checked(point.load()))
        except (Exception, SystemExit) as error:  # whatever its code raises, it is that plug-in's
            distribution = point.dist.name if point.dist is not None else point.value
            note_failure(f"the plug-in {point.name} of {distribution}", error)
    return tuple(plugins)


def _is_any_registered() -> bool:
    """Report whether any distribution may register a plug-in, by the text of its entry points.

    The import system answers that too, after an import that takes as long as a whole command line otherwise.
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


def _checked(found: object) -> Plugin:
    if not isinstance(found, Plugin):
        raise TypeError(f"not a consistency.plugins.Plugin, but {type(found).__name__}")
    return found


def plugins() -> tuple[Plugin, ...]:
    """Return all plug-ins: the extras of this package first, then those of other distributions."""
    return own() + _others()


_failures: list[Failure] = []


def note_failure(what: str, error: BaseException) -> None:
    """Note that something of another distribution cannot be used: nobody else is to suffer from it."""
    text = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
    failure = Failure(what=what, error=text[:300])
    if failure not in _failures:
        _failures.append(failure)


@contextmanager
def at_own_cost(reference: str, what: str, *, passes: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Let an error of this package's code through, and note one of another distribution, which costs itself alone.

    Parameters
    ----------
    reference : str
        What is called, as `module:name`.
    what : str
        What a user calls it: `the section ours.page:SECTION`.
    passes : tuple of exception classes
        What it may raise, whoever wrote it.
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
    """Yield what plug-ins name in a field of `Plugin` whose parts have `is_asked`, as far as a case wants it."""
    for reference, value in offered(part):
        is_wanted = False
        with at_own_cost(reference, f"{reference}, asked whether a case wants it,"):
            is_wanted = value.is_asked(case)
        if is_wanted:
            yield value


def failures() -> tuple[Failure, ...]:
    """Return what other distributions offered, as far as it was asked for, and cannot be used."""
    return tuple(_failures)


INSTALL = "pip install --force-reinstall --no-deps peft-consistency brings it back"
"""What to do where an extra of this package is not installed."""


@functools.cache
def absent(part: str) -> dict[str, str]:
    """Return what is not here of the commands, stages, options or names (`api`) of this package, each with its extra.

    A file beside this module says what each extra adds, since one that is not here cannot.
    """
    import json

    try:
        content = (Path(__file__).parent / "extras.json").read_text(encoding="utf-8")
    except OSError:
        return {}
    there = {plugin.name for plugin in own()}
    added_by: dict[str, dict[str, list[str]]] = json.loads(content)
    return {name: extra for extra, parts in added_by.items() if extra not in there for name in parts[part]}


def not_installed(what: str, extra: str) -> str:
    """Return the sentence for what somebody asks of an extra that is not here."""
    return (
        f"{what} is a part of the extra {extra}, which is not installed here" if extra else f"{what} is not installed"
    )


def commands(named: str | None = None) -> dict[str, list[str]]:
    """Return the commands of all plug-ins by the module that declares them.

    Where a command is `named` that an extra of this package has, nothing else is looked for: to ask which distributions
    are installed takes longer than most commands need to start.
    """
    of_own = _by_module(own())
    if named is not None and any(named in names for names in of_own.values()):
        return of_own
    return _by_module(plugins())


def is_own(module: str) -> bool:
    """Report whether a module is of this package."""
    return module.startswith(f"{__package__}.")


def _by_module(of: tuple[Plugin, ...]) -> dict[str, list[str]]:
    modules: dict[str, list[str]] = {}
    for plugin in of:
        for command, module in plugin.commands.items():
            modules.setdefault(module, []).append(command)
    return modules


def resolved(reference: str) -> Any:
    """Return what a plug-in names as `module:name`."""
    import pkgutil

    return pkgutil.resolve_name(reference)


def kinds() -> Iterator[str]:
    """Yield the kinds of findings of all plug-ins."""
    for _, enumeration in offered("kinds"):
        yield from map(str, enumeration)


def statement_of(comparison: Any) -> Statement | None:
    """Return what a plug-in says of a comparison that is no run; None where it is one, or nobody knows."""
    if len(comparison.load_paths) != 1:
        return None
    (compared,) = comparison.load_paths
    for plugin in plugins():
        if compared in plugin.statements and is_there(plugin.statements[compared]):
            statement: Statement = resolved(plugin.statements[compared])(comparison)
            return statement
    return None


def api() -> dict[str, str]:
    """Return the module of each name that plug-ins add to `import consistency`."""
    return {name: module for plugin in plugins() for name, module in plugin.api.items() if is_there(module)}


def offered(part: str) -> Iterator[tuple[str, Any]]:
    """Yield what plug-ins name in a field of `Plugin` whose parts are `module:name`, each with its reference.

    What another distribution names and cannot be imported is noted, and left out; so is what was deleted of an extra.
    """
    for plugin in plugins():
        for reference in getattr(plugin, part):
            if not is_there(reference):
                continue
            try:
                value = resolved(reference)
            except (Exception, SystemExit) as error:
                if is_own(reference):
                    raise
                note_failure(f"{reference} of the plug-in {plugin.name}", error)
            else:
                yield reference, value
