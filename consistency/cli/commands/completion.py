"""`consistency completion`: print a script that completes commands, options and their values in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping

SHELLS = ("bash", "zsh", "tcsh", "fish")

EXAMPLES = (
    ("bash", "consistency completion bash > ~/.local/share/bash-completion/completions/consistency"),
    ("zsh, in a folder of $fpath", "consistency completion zsh > ~/.zfunc/_consistency"),
    ("fish", "consistency completion fish > ~/.config/fish/completions/consistency.fish"),
)

_FOLDERS = {"DIR", "MODEL", "[NAME=]ADAPTER"}
_FILES = {"FILE", "REPORT", "CONFIG.toml", "A", "B", "URL"}


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command("completion", _completion, "print the completion script of a shell", EXAMPLES)
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads the script")


def _completion(parsed: argparse.Namespace) -> int:
    """Run the command."""
    import shtab

    from consistency.cli.main import build_parser  # which imports this module, in its turn

    root = build_parser()
    for parser in _parsers(root):
        values = _values(parser.prog)
        for action in parser._actions:
            names = action.option_strings or [str(action.metavar)]
            action.choices = next((values[name] for name in names if name in values), action.choices)
            if action.metavar in _FOLDERS | _FILES:
                # the attribute that shtab reads
                action.complete = shtab.DIRECTORY if action.metavar in _FOLDERS else shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(root, shell=parsed.shell))
    return 0


def _values(command: str) -> Mapping[str, Iterable[str]]:
    """Return the values of options that take a list, of which a shell completes the first, and of `WORD`."""
    from consistency.case.load_path import LoadPath
    from consistency.case.stages import SPECS
    from consistency.devices.backends import BACKENDS, backend_of

    stages = [*SPECS]
    kinds = list(dict.fromkeys(("cpu", *BACKENDS)))
    devices = ["auto", *kinds]
    for kind in kinds:
        devices += [f"{kind}@{variant.name}" for variant in backend_of(kind).variants]
    return {
        "--stages": stages,
        "--load-paths": [*(path.value for path in LoadPath), "all"],
        "--devices": devices,
        # `drill --only` names faults, every other `--only` stages
        "--only": _faults() if command.endswith(" drill") else stages,
        "WORD": _words() if command.endswith(" explain") else [],
    }


def _faults() -> list[str]:
    """Return the names of the faults that `drill` can plant."""
    from consistency.worker.faults.catalogue import FAULTS

    return list(FAULTS)


def _words() -> list[str]:
    """Return the words that `explain` knows."""
    from consistency.cli.glossary import known_words

    return known_words()


def _parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Return a parser and the parsers of its commands, at any depth."""
    parsers = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                parsers += _parsers(command)
    return parsers
