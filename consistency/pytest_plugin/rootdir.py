"""Options that make pytest take a model's folder for its own root directory.

pytest chooses its root directory, and with it the ini file, node ids and the cache, before it loads plugins. Until then
it takes the value of a plugin's option for a path to tests, unless an equals sign joins the two. When the plugin is
first asked, another ini file has been read, and its `addopts`, `pythonpath` and plugins are in force: this can be
refused, not undone.
"""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Iterator, Sequence

import pytest
from _pytest.config.findpaths import determine_setup

from consistency.case.options import OPTIONS, Edge


def refuse_displaced_root(config: pytest.Config, arguments: Sequence[str]) -> None:
    """Refuse a command line whose options have moved the root directory or the ini file.

    Raises
    ------
    UsageError
        With the options as they are to be written.
    """
    spaced = list(_spaced(arguments))
    paths = list(config.known_args_namespace.file_or_dir)
    right = _setup(config, paths)
    if (config.rootpath, config.inipath) == right or _setup(config, [*paths, *(v for _, v in spaced)]) == right:
        return
    moved = [(name, value) for name, value in spaced if os.path.lexists(value)]
    raise pytest.UsageError(
        f"pytest takes {' and '.join(value for _, value in moved)} for a path to tests: its root directory would be "
        f"{config.rootpath}, not {right[0]}\n"
        f"  write   {' '.join(f'{name}={value}' for name, value in moved)}"
    )


def _spaced(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the options of the plugin that are given without an equals sign, each with its value."""
    switches = {Edge.PYTEST.spell(name) for name in ("skip_without_case", *(o.name for o in OPTIONS if o.type is bool))}
    for name, value in itertools.pairwise(arguments):
        if name.startswith(Edge.PYTEST.value) and "=" not in name and name not in switches:
            yield name, value


def _setup(config: pytest.Config, paths: Sequence[str]) -> tuple[object, object]:
    """Return the root directory and ini file that pytest chooses for these paths."""
    namespace = config.known_args_namespace
    given = {
        "inifile": namespace.inifilename,
        "override_ini": namespace.override_ini,
        "args": paths,
        "rootdir_cmd_arg": namespace.rootdir or None,
        "invocation_dir": config.invocation_params.dir,
    }
    known = inspect.signature(determine_setup).parameters  # pytest 8 has no override_ini
    root, ini, *_ = determine_setup(**{name: value for name, value in given.items() if name in known})
    return root, ini
